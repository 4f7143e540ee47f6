"""The checker of the `shapes` data: reads colour, shape, motion and background off a clip and compares them with a
prompt.

The reading never sees the prompt. It is strict: a copy, an extra or a missing object, an object that appears or
disappears, a colour between two palette colours, or a shape that fits no silhouette makes the clip wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations

import torch
from torch import Tensor

from diffusion_runtime.quality.shapes.attributes import COLOUR_NAMES, COLOURS, ObjectAttributes, SceneAttributes
from diffusion_runtime.quality.shapes.background_reading import read_background
from diffusion_runtime.quality.shapes.motion_reading import link_tracks, read_motion
from diffusion_runtime.quality.shapes.segmentation import Region, Segmentation, segment
from diffusion_runtime.quality.shapes.shape_reading import read_shape

MAX_COLOUR_DISTANCE = 0.2
"""Largest Euclidean distance of an object's mean colour (0 to 1 per channel) from its palette colour."""
_CORE_COVERAGE = 0.75


@dataclass(frozen=True)
class Reading:
    """The attributes read off a clip. `steady` is False when the number of objects changes over the frames; then there
    are none."""

    scene: SceneAttributes
    steady: bool
    num_frames: int


@dataclass(frozen=True)
class Verdict:
    """Which parts of a prompt a clip gets right; an attribute that the prompt leaves free is right."""

    count: bool
    """As many objects as the prompt names, in every frame."""
    colour: bool
    """Right for every object, as are shape and motion."""
    shape: bool
    motion: bool
    background: bool

    @property
    def joint(self) -> bool:
        """Everything right."""
        return self.count and self.colour and self.shape and self.motion and self.background


def read_clip(frames: Tensor) -> Reading:
    """Read one clip: uint8 [frames, height, width, 3]. A single frame has no motion to read (None)."""
    return read_segmentation(segment(frames))


def read_segmentation(segmentation: Segmentation) -> Reading:
    """Read one clip that is segmented already."""
    num_frames = int(segmentation.frames.shape[0])
    background = read_background(segmentation)
    tracks = link_tracks(segmentation.regions, num_frames)
    objects = tuple(
        ObjectAttributes(
            colour=_read_colour(segmentation, track),
            shape=read_shape(segmentation, track),
            motion=read_motion(track) if num_frames > 1 else None,
        )
        for track in tracks or []
    )
    return Reading(SceneAttributes(objects, background), tracks is not None, num_frames)


def _read_colour(segmentation: Segmentation, track: list[Region]) -> str | None:
    """Read the colour of a track, or None where it changes over the frames or is far from its palette colour."""
    colours = {region.colour for region in track}
    if len(colours) != 1:
        return None
    colour = colours.pop()
    region = track[len(track) // 2]
    own = segmentation.labels[region.frame, region.plane] == region.label
    inside = own.repeat_interleave(2, dim=0).repeat_interleave(2, dim=1)
    inside &= segmentation.colour[region.frame] == colour
    weight = (segmentation.coverage[region.frame] * inside) ** 4
    core = inside & (segmentation.coverage[region.frame] >= _CORE_COVERAGE)
    weight = weight * core if bool(core.any()) else weight
    mean = (segmentation.frames[region.frame] * weight).sum(dim=(1, 2)) / weight.sum().clamp(min=1e-6)
    palette = torch.tensor(COLOURS[COLOUR_NAMES[colour]], device=mean.device) / 255.0
    distance = float(torch.linalg.vector_norm(mean - palette))
    return COLOUR_NAMES[colour] if distance <= MAX_COLOUR_DISTANCE else None


def judge(attributes: SceneAttributes, reading: Reading) -> Verdict:
    """Compare a prompt with a reading; objects are paired the way that gets most attributes right."""
    background = attributes.background is None or attributes.background == reading.scene.background
    seen = reading.scene.objects
    if not reading.steady or len(seen) != len(attributes.objects):
        return Verdict(False, False, False, False, background)
    moving = reading.num_frames > 1
    pairings = [
        tuple(_compare(wanted, seen[index], moving) for wanted, index in zip(attributes.objects, order, strict=True))
        for order in permutations(range(len(seen)))
    ]
    best = max(pairings, key=lambda pairs: (all(all(pair) for pair in pairs), sum(sum(pair) for pair in pairs)))
    colour, shape, motion = (all(pair[part] for pair in best) for part in range(3))
    return Verdict(True, colour, shape, motion, background)


def _compare(wanted: ObjectAttributes, seen: ObjectAttributes, moving: bool) -> tuple[bool, bool, bool]:
    return (
        wanted.colour in (None, seen.colour),
        wanted.shape in (None, seen.shape),
        not moving or wanted.motion in (None, seen.motion),
    )


def check_clip(attributes: SceneAttributes, frames: Tensor) -> Verdict:
    """Read one clip, uint8 [frames, height, width, 3] on any device, and judge it against a prompt's attributes."""
    return judge(attributes, read_clip(frames.cpu()))
