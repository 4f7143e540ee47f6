"""The judge of the `emoji` data: reads things, motions, scene and time off a clip and compares them with a prompt.

The reading never sees the prompt. It is strict: a copy, a missing thing, one that appears or disappears, or one that is
no known thing makes the clip wrong. Motion is read by tracking the detections of every frame.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from itertools import permutations

import torch
from torch import Tensor

from diffusion_runtime.quality.emoji.attributes import SCENE_NAMES, TIME_NAMES, SceneAttributes
from diffusion_runtime.quality.emoji.detector import Detections, Detector, detect, prepare
from diffusion_runtime.quality.emoji.things import THING_NAMES

MIN_SCORE = 0.35
"""Of a detection."""
MIN_PROBABILITY = 0.5
"""Of a thing over its track; below it is no known thing."""
STEADY_SHARE = 0.8
"""Of the frames that must show as many things as most frames do."""
FRAMES_AT_ONCE = 1024


@dataclass(frozen=True)
class SeenThing:
    """One track through a clip."""

    thing: str | None
    motion: str | None
    """None where the track fits no motion, and for a single frame."""
    radius: float
    """Largest half side over the clip, half-sides."""
    position: tuple[float, float]
    """Mean centre."""


@dataclass(frozen=True)
class Reading:
    """Attributes that are read off a clip. `steady` is False when the number of things changes; then there are none."""

    things: tuple[SeenThing, ...]
    scene: str
    time: str
    steady: bool
    num_frames: int


@dataclass(frozen=True)
class Verdict:
    """Which parts of a prompt a clip gets right; what the prompt leaves free is right."""

    count: bool
    thing: bool
    """Right for every thing, as are motion, size and place."""
    motion: bool
    scene: bool
    time: bool
    size: bool
    place: bool

    @property
    def joint(self) -> bool:
        """Things, their number and motions, and the scene."""
        return self.count and self.thing and self.motion and self.scene

    @property
    def everything(self) -> bool:
        """The same with time of day, sizes and places."""
        return self.joint and self.time and self.size and self.place


@torch.no_grad()
def read_clips(detector: Detector, clips: Tensor) -> list[Reading]:
    """Read clips, uint8 [B, frames, height, width, 3], on the detector's device."""
    device = next(detector.parameters()).device
    num_frames = clips.shape[1]
    parts, scenes, times = [], [], []
    for frames in torch.split(clips.flatten(0, 1), FRAMES_AT_ONCE):
        maps = detector(prepare(frames.to(device)))
        parts.append(detect(maps))
        scenes.append(maps.scene.float())
        times.append(maps.time.float())
    score, box, thing = (
        torch.unflatten(torch.cat([getattr(part, name) for part in parts]).cpu(), 0, (-1, num_frames))
        for name in ("score", "box", "thing")
    )
    scene, time = (
        torch.unflatten(torch.cat(each).log_softmax(dim=1), 0, (-1, num_frames)).mean(1) for each in (scenes, times)
    )
    return [
        _read_clip(Detections(score[row], box[row], thing[row]), SCENE_NAMES[int(scene[row].argmax())],
                   TIME_NAMES[int(time[row].argmax())])
        for row in range(len(clips))
    ]  # fmt: skip


def _read_clip(found: Detections, scene: str, time: str) -> Reading:
    num_frames = found.score.shape[0]
    counts = (found.score > MIN_SCORE).sum(dim=1).tolist()
    most, frequency = Counter(counts).most_common(1)[0]
    if most == 0 or frequency < STEADY_SHARE * num_frames:
        return Reading((), scene, time, False, num_frames)
    tracks = _link(found, [frame for frame, count in enumerate(counts) if count == most], most)
    return Reading(tuple(_read_track(track, num_frames) for track in tracks), scene, time, True, num_frames)


@dataclass
class _Track:
    frames: list[int]
    boxes: list[Tensor]
    things: list[Tensor]


def _link(found: Detections, frames: list[int], count: int) -> list[_Track]:
    """Tracks through the frames that show `count` things, each continued by the pairing of least movement."""
    tracks: list[_Track] = []
    for frame in frames:
        rows = (found.score[frame] > MIN_SCORE).nonzero()[:, 0].tolist()
        order: tuple[int, ...] = tuple(rows)
        if tracks:
            order = min(permutations(rows), key=partial(_movement, found, frame, tracks))
        else:
            tracks = [_Track([], [], []) for _ in range(count)]
        for row, track in zip(order, tracks, strict=True):
            track.frames.append(frame)
            track.boxes.append(found.box[frame, row])
            track.things.append(found.thing[frame, row])
    return tracks


def _movement(found: Detections, frame: int, tracks: list[_Track], rows: tuple[int, ...]) -> float:
    """Return how far things move to these detections; what each seems to be counts too, since things may pass."""
    return sum(
        float((found.box[frame, row, :2] - track.boxes[-1][:2]).norm())
        + 0.3 * (int(found.thing[frame, row].argmax()) != int(track.things[-1].argmax()))
        for row, track in zip(rows, tracks, strict=True)
    )


def _read_track(track: _Track, num_frames: int) -> SeenThing:
    boxes = torch.stack(track.boxes)
    # A picture seen from its side says little about what it is.
    weight = boxes[:, 2].clamp(min=0.02)
    votes = (torch.stack(track.things).log_softmax(dim=1) * weight[:, None]).sum(dim=0) / weight.sum()
    probability = votes.softmax(dim=0)
    best = int(probability.argmax())
    thing = THING_NAMES[best] if float(probability[best]) >= MIN_PROBABILITY else None
    middle = boxes[:, :2].mean(dim=0).tolist()
    motion = read_motion(boxes) if num_frames > 1 else None
    return SeenThing(thing, motion, float(boxes[:, 2:].amax(dim=1).quantile(0.9)), (middle[0], middle[1]))


def read_motion(boxes: Tensor) -> str | None:
    """The motion of a track: boxes [frames, 4] of centre (x, y), half width and half height; None if it fits none."""
    ends = max(1, len(boxes) // 10)
    first, last = boxes[:ends].mean(dim=0), boxes[-ends:].mean(dim=0)
    across, down = (last[:2] - first[:2]).tolist()
    widths, heights = boxes[:, 2], boxes[:, 3]
    growth = float(last[3] / first[3])
    turns = float(widths.min() / widths.max()) < 0.5 and float(heights.min() / heights.max()) > 0.6
    smooth = boxes[:, 1].unfold(0, min(3, len(boxes)), 1).mean(dim=1)
    climbed = float(smooth.diff().abs().sum())
    sways = float((boxes[:, :2].amax(dim=0) - boxes[:, :2].amin(dim=0)).max())
    if turns:
        return "spinning" if sways < 0.25 else None
    if growth > 1.5:
        return "growing" if abs(across) < 0.25 else None
    if abs(across) < 0.25 and climbed > 0.6 and climbed > 2.5 * abs(down):
        return "bouncing"
    if growth < 0.66:
        return None
    if abs(across) >= 0.3 and abs(down) < 0.2:
        return "left" if across < 0 else "right"
    if abs(down) >= 0.3 and abs(across) < 0.2:
        return "up" if down < 0 else "down"
    return "still" if sways < 0.15 else None


def judge(wanted: SceneAttributes, reading: Reading) -> Verdict:
    """Compare a prompt with a reading; things are paired the way that gets most attributes right."""
    scene = wanted.scene in (None, reading.scene)
    time = wanted.time is None or wanted.time == reading.time or reading.scene == "space"
    seen = reading.things
    if not reading.steady or len(seen) != len(wanted.objects):
        return Verdict(False, False, False, scene, time, False, False)
    moving = reading.num_frames > 1
    pairings = []
    for order in permutations(range(len(seen))):
        pairs = []
        for slot, index in enumerate(order):
            other = seen[order[1 - slot]].position if len(order) == 2 else (0.0, 0.0)
            one, found = wanted.objects[slot], seen[index]
            pairs.append(
                (
                    one.thing in (None, found.thing),
                    not moving or one.motion in (None, found.motion),
                    _has_size(one.size, found.radius),
                    _has_place(one.place, found.position, other),
                )
            )
        pairings.append(pairs)
    best = max(pairings, key=lambda pairs: (sum(pair[0] for pair in pairs), sum(map(sum, pairs))))
    thing, motion, size, place = (all(pair[part] for pair in best) for part in range(4))
    return Verdict(True, thing, motion, scene, time, size, place)


def _has_size(wanted: str | None, radius: float) -> bool:
    """Small is 0.25, normal 0.375, big 0.4375 of two things and 0.5 of one."""
    return wanted in (None, "normal") or (radius < 0.31 if wanted == "small" else radius > 0.38)


def _has_place(wanted: str | None, position: tuple[float, float], other: tuple[float, float]) -> bool:
    """On this side of the other thing, or of the middle where there is one thing."""
    if wanted in (None, "middle"):
        return True
    across, down = position[0] - other[0], position[1] - other[1]
    return {"left": across < -0.1, "right": across > 0.1, "top": down < -0.1, "bottom": down > 0.1}[str(wanted)]
