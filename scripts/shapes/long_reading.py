"""Reads streams of minutes: overlapping windows by the checker of clips, the motion in each, how far the picture
drifts, seams between chunks, and how soon a new prompt is followed.

What is right is told by prompts alone; nothing is compared with a rendered stream. Times are in frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, permutations

import torch
import torch.nn.functional as F
from torch import Tensor

from diffusion_runtime.quality.shapes.attributes import COLOUR_NAMES, COLOURS, ObjectAttributes, SceneAttributes
from diffusion_runtime.quality.shapes.checker import judge, read_segmentation
from diffusion_runtime.quality.shapes.motion_reading import link_tracks
from diffusion_runtime.quality.shapes.segmentation import Segmentation, SegmentedFrames, segment_frames
from scripts.shapes.stream_motion import Sighting, as_regions, is_continuous, moves_as, sightings

SETTLE_CHUNKS = 2
"""Chunks after a switch in which the new prompt need not be followed yet."""
SWITCH_CHUNKS = 6
"""Chunks after a switch that are looked at one by one."""
SEAM_QUANTILE = 0.95
MIN_DISPLACEMENT, MIN_FLICKER = 0.012, 0.006
"""Below these a seam is no seam: three quarters of a pixel at 128 x 128, and one and a half levels of 256."""
SHARP = 1.0
"""Pixels up to which the width of an edge says how it lies on the grid, and not how sharp it is."""
_PIECE = 29
_MARGIN_ROOM = 0.3


@dataclass(frozen=True)
class LongSettings:
    """How a stream is read. chunk: frames per chunk after the first, which has three fewer."""

    window: int = 29
    hop: int = 8
    chunk: int = 8


@dataclass(frozen=True)
class Prompt:
    """What a stream is to show from a frame on."""

    first_frame: int
    attributes: SceneAttributes


@dataclass(frozen=True)
class Appearance:
    """What may drift while the reading stays right."""

    cells: float
    """Area of the objects, in cells of the checker's grid."""
    colour: float
    """Distance of the objects' mean colour from the palette's, 0 to 1 per channel."""
    background: tuple[float, ...]
    """Lightness at the 10th and 90th percentile, and two differences of channels."""
    softness: float
    """Width of an object's edge in pixels, by the share of them that it covers; about 0.7 where edges are sharp."""


@dataclass(frozen=True)
class Drift:
    """Appearance against that of the first window since something was to change."""

    area: float
    """Logarithm of the ratio of areas."""
    colour: float
    background: float
    softness: float
    """Logarithm of the ratio."""


@dataclass(frozen=True)
class WindowReading:
    """One window of a stream, and what of the prompt is right in it."""

    first_frame: int
    count: bool
    colour: bool
    shape: bool
    background: bool
    motion: bool
    continuous: bool
    drift: Drift
    seam: float = 1.0
    """Motion or flicker at the borders of chunks in the window over those inside chunks of the whole stream."""
    tracks: tuple[tuple[Sighting, ...], ...] = ()
    """Where each object is, frame by frame, of a window whose motion is wrong; empty where their number changes."""

    @property
    def right(self) -> bool:
        return self.count and self.colour and self.shape and self.background and self.motion and self.continuous


@dataclass(frozen=True)
class SwitchReading:
    """How one change of the prompt was followed. delay: chunks until the reading equals the new prompt, None for never
    within SWITCH_CHUNKS; kept: whether what the prompt left alone stayed."""

    first_frame: int
    delay: int | None
    kept: bool


@dataclass(frozen=True)
class StreamReading:
    """Everything read of one stream. seam_motion, seam_flicker: 95th percentile at chunk borders over that inside."""

    num_frames: int
    windows: tuple[WindowReading, ...]
    switches: tuple[SwitchReading, ...]
    seam_motion: float
    seam_flicker: float
    settings: LongSettings
    motions: tuple[tuple[int, str | None], ...] = ()
    """What the first object is to do, each with the frame from which on."""


def read_stream(frames: Tensor, prompts: Sequence[Prompt], settings: LongSettings = LongSettings()) -> StreamReading:
    """Read one stream: uint8 [frames, height, width, 3]. prompts: in order, the first at frame 0.

    Raises ValueError for a stream shorter than a window, and prompts in another order.
    """
    num_frames = int(frames.shape[0])
    firsts = [prompt.first_frame for prompt in prompts]
    if num_frames < settings.window or not prompts or firsts[0] != 0 or firsts != sorted(set(firsts)):
        raise ValueError(f"expected {settings.window} frames or more and prompts from frame 0 on, got {num_frames}")
    # Once: windows overlap, and segmenting is five sixths of the work.
    segmented = segment_frames(frames)
    seen: list[list[Sighting]] = [[] for _ in range(num_frames)]
    flicker = []
    for first in range(0, num_frames, _PIECE):
        # One frame more, for the change to the next piece.
        segmentation = segmented.clip(slice(first, first + _PIECE + 1))
        for each in sightings(segmentation, first):
            if each.frame < first + _PIECE:
                seen[each.frame].append(each)
        flicker.append(_background_changes(segmentation))
    windows, switches = [], []
    for index, prompt in enumerate(prompts):
        end = prompts[index + 1].first_frame if index + 1 < len(prompts) else num_frames
        start = prompt.first_frame + (SETTLE_CHUNKS * settings.chunk if index else 0)
        reference: Appearance | None = None
        for first in range(start, end - settings.window + 1, settings.hop):
            window, reference = _read_window(segmented, seen, prompt.attributes, first, settings, reference)
            windows.append(window)
        # A prompt that is replaced before it need be followed says nothing.
        if index and end - prompt.first_frame >= (SETTLE_CHUNKS + 2) * settings.chunk:
            switches.append(_read_switch(segmented, seen, prompts[index - 1], prompt, end, settings))
    seams = _seams(seen, torch.cat(flicker)[: num_frames - 1], prompts, settings)
    windows = [replace(each, seam=max(seams.ratios(each.first_frame, settings.window))) for each in windows]
    motions = tuple((prompt.first_frame, prompt.attributes.objects[0].motion) for prompt in prompts)
    return StreamReading(num_frames, tuple(windows), tuple(switches), *seams.ratios(), settings, motions)


def _read_window(
    segmented: SegmentedFrames,
    seen: Sequence[Sequence[Sighting]],
    wanted: SceneAttributes,
    first: int,
    settings: LongSettings,
    reference: Appearance | None,
) -> tuple[WindowReading, Appearance]:
    clip = segmented.clip(slice(first, first + settings.window))
    verdict = judge(_without_motion(wanted), read_segmentation(clip))
    tracks = _tracks(seen, first, settings.window)
    motion = tracks is not None and _motion_is_right(wanted.objects, tracks, short=False)
    continuous = tracks is not None and all(is_continuous(track) for track in tracks)
    # At the quarters of the window.
    found = _appearance(segmented.clip(slice(first, first + settings.window, max(1, settings.window // 4))), wanted)
    reference = found if reference is None else reference
    window = WindowReading(
        first,
        verdict.count,
        verdict.colour,
        verdict.shape,
        verdict.background,
        motion,
        continuous,
        _drift(found, reference),
        tracks=() if motion or tracks is None else tuple(map(tuple, tracks)),
    )
    return window, reference


def _without_motion(scene: SceneAttributes) -> SceneAttributes:
    return replace(scene, objects=tuple(replace(one, motion=None) for one in scene.objects))


def _tracks(seen: Sequence[Sequence[Sighting]], first: int, count: int) -> list[list[Sighting]] | None:
    """The objects of some frames, or None where their number changes."""
    found = [each for frame in seen[first : first + count] for each in frame]
    tracks = link_tracks(as_regions(found, first), count)
    return None if tracks is None else [[found[region.label] for region in track] for track in tracks]


def _motion_is_right(wanted: Sequence[ObjectAttributes], tracks: Sequence[Sequence[Sighting]], *, short: bool) -> bool:
    """Whether the tracks move as wanted, each paired with an object of its colour."""
    if len(tracks) != len(wanted):
        return False
    return any(
        all(
            one.colour in (None, COLOUR_NAMES[tracks[index][0].colour])
            and moves_as(one.motion, tracks[index], short=short)
            for one, index in zip(wanted, order, strict=True)
        )
        for order in permutations(range(len(tracks)))
    )


def _appearance(segmentation: Segmentation, wanted: SceneAttributes) -> Appearance:
    """Of some frames of a window."""
    coverage, images = segmentation.coverage, segmentation.frames
    inside = coverage > 0.5
    # Grey has no part in an object's colour: what is partly covered is left out.
    names = {one.colour for one in wanted.objects if one.colour is not None} or set(COLOUR_NAMES)
    palette = torch.tensor([COLOURS[name] for name in sorted(names)], device=images.device) / 255.0
    pixels = images.permute(0, 2, 3, 1)[coverage > 0.9]
    away = torch.cdist(pixels, palette).amin(dim=1).mean() if len(pixels) else torch.ones(())
    near = F.max_pool2d((coverage > 0.1).float()[:, None], 7, stride=1, padding=3)[:, 0] > 0
    ground = images.permute(0, 2, 3, 1)[~near]
    lightness = ground.mean(dim=1)
    tones = (
        torch.quantile(lightness[:: max(1, len(lightness) // 20000)], torch.tensor([0.1, 0.9], device=ground.device))
        if len(ground)
        else torch.zeros(2)
    )
    tints = (ground[:, :2] - ground[:, 1:]).mean(dim=0) if len(ground) else torch.zeros(2)
    partly = 4 * coverage * (1 - coverage) * (F.max_pool2d(inside.float()[:, None], 9, stride=1, padding=4)[:, 0])
    edge = inside & (F.avg_pool2d(inside.float()[:, None], 3, stride=1, padding=1)[:, 0] < 1)
    return Appearance(
        float(sum(region.cells for region in segmentation.regions)) / len(images),
        float(away),
        (*tones.tolist(), *tints.tolist()),
        float(partly.sum()) / max(float(edge.sum()), 1.0),
    )


def _drift(found: Appearance, reference: Appearance) -> Drift:
    def log_ratio(now: float, then: float, least: float) -> float:
        return float(torch.log(torch.tensor(max(now, least) / max(then, least))))

    return Drift(
        log_ratio(found.cells, reference.cells, 1.0),
        found.colour - reference.colour,
        max(abs(now - then) for now, then in zip(found.background, reference.background, strict=True)),
        log_ratio(found.softness, reference.softness, SHARP),
    )


def _read_switch(
    segmented: SegmentedFrames,
    seen: Sequence[Sequence[Sighting]],
    before: Prompt,
    after: Prompt,
    end: int,
    settings: LongSettings,
) -> SwitchReading:
    """Chunk by chunk: followed where this chunk and the next one show the new prompt."""
    first, chunk = after.first_frame, settings.chunk
    unchanged = _unchanged(before.attributes, after.attributes)
    right, kept = [], True
    for begin in range(first, min(end, first + SWITCH_CHUNKS * chunk) - chunk + 1, chunk):
        reading = read_segmentation(segmented.clip(slice(begin, begin + chunk)))
        tracks = _tracks(seen, begin, min(chunk + 5, end - begin))
        follows = tracks is not None and _motion_is_right(after.attributes.objects, tracks, short=True)
        right.append(judge(_without_motion(after.attributes), reading).joint and follows)
        kept = kept and judge(unchanged, reading).joint
    delays = [index for index, (now, then) in enumerate(pairwise(right)) if now and then]
    return SwitchReading(first, delays[0] if delays else None, kept)


def _unchanged(before: SceneAttributes, after: SceneAttributes) -> SceneAttributes:
    """What both prompts say alike, without the motion."""
    objects = tuple(
        ObjectAttributes(
            now.colour if now.colour == then.colour else None, now.shape if now.shape == then.shape else None, None
        )
        for then, now in zip(before.objects, after.objects, strict=True)
    )
    return SceneAttributes(objects, after.background if after.background == before.background else None)


def _background_changes(segmentation: Segmentation) -> Tensor:
    """[frames - 1]: mean change of the pixels that no object is near in either frame."""
    near = F.max_pool2d((segmentation.coverage > 0.05).float()[:, None], 7, stride=1, padding=3)[:, 0] > 0
    change = (segmentation.frames[1:] - segmentation.frames[:-1]).abs().mean(dim=1)
    ground = ~(near[1:] | near[:-1])
    return (change * ground).sum(dim=(1, 2)) / ground.sum(dim=(1, 2)).clamp(min=1)


@dataclass(frozen=True)
class _Seams:
    """Per step from a frame to the next, [frames - 1]. odd: how far a step is from those around it, NaN where that is
    not known; flicker: of the background. border: steps at borders of chunks; counted: those not at a switch."""

    odd: Tensor
    flicker: Tensor
    border: Tensor
    counted: Tensor

    def ratios(self, first: int = 0, count: int | None = None) -> tuple[float, float]:
        """Of motion and of flicker: at borders, of `count` frames from `first` on, over inside of all chunks."""
        within = torch.zeros_like(self.border)
        within[first : None if count is None else first + count - 1] = True
        at, inside = self.counted & self.border & within, self.counted & ~self.border
        return (
            _quantile_ratio(self.odd, at, inside, MIN_DISPLACEMENT),
            _quantile_ratio(self.flicker, at, inside, MIN_FLICKER),
        )


def _seams(
    seen: Sequence[Sequence[Sighting]], flicker: Tensor, prompts: Sequence[Prompt], settings: LongSettings
) -> _Seams:
    count = len(seen)
    steps = torch.full((count - 1,), float("nan"))
    for frame, (now, then) in enumerate(pairwise(seen)):
        if len(now) == len(then) == len(prompts[0].attributes.objects) and all(_is_free(each) for each in now):
            nearest = [min((a.x - b.x) ** 2 + (a.y - b.y) ** 2 for b in then) ** 0.5 for a in now]
            steps[frame] = max(nearest)
    around = steps.unfold(0, 7, 1).nanmedian(dim=1).values
    odd = torch.full_like(steps, float("nan"))
    odd[3 : 3 + len(around)] = (steps[3 : 3 + len(around)] - around).abs()
    # A border is the step over it, and those beside it: a frame shown twice is made up for by the next step.
    place = (torch.arange(count - 1) - (settings.chunk - 4)) % settings.chunk
    border = (place <= 1) | (place == settings.chunk - 1)
    switched = torch.zeros_like(border)
    for prompt in prompts[1:]:
        switched[prompt.first_frame - 1 : prompt.first_frame + SETTLE_CHUNKS * settings.chunk] = True
    return _Seams(odd, flicker, border, ~switched)


def _is_free(each: Sighting) -> bool:
    """Whether an object is away from the margins, where it turns or comes to rest."""
    left, right, top, bottom = each.edges
    return min(1 + left, 1 - right, 1 + top, 1 - bottom) > _MARGIN_ROOM / 2


def _quantile_ratio(values: Tensor, at: Tensor, inside: Tensor, least: float) -> float:
    known = ~torch.isnan(values)
    if not bool((known & at).any()) or not bool((known & inside).any()):
        return 1.0
    above, below = (float(torch.quantile(values[known & part], SEAM_QUANTILE)) for part in (at, inside))
    return max(above, least) / max(below, least)
