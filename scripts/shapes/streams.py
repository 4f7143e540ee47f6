"""Seeded sampling of streams: scenes whose motion never ends, with prompts that change on the way.

A stream is a few segments, each a scene with its own caption. From one to the next a prompt changes one attribute: the
motion of an object, its colour, its shape, or the background; everything else goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from diffusion_runtime.quality.shapes.attributes import (
    BACKGROUND_NAMES,
    COLOUR_NAMES,
    MOTION_DIRECTIONS,
    MOTION_NAMES,
    SHAPE_NAMES,
    STREAM_MOTION_NAMES,
    SceneAttributes,
    is_held_out,
)
from diffusion_runtime.quality.shapes.scene import SceneBatch, SceneSettings, sample_scenes
from scripts.shapes.render import render_slots
from scripts.shapes.trajectories import (
    AROUND,
    SPEED_RANGE,
    Bounds,
    Start,
    bounds_of,
    simulate,
)

MAX_SEGMENTS = 3
RADIUS_DRIFT, TONE_DRIFT = 0.15, 0.1
"""Of a radius, and of full brightness: streams of 10 s had areas of 0.65 to 1.18 of their first ones, and backgrounds
that jumped by 0.12."""
SPEED_DRIFT = 0.3
"""Of a speed: an object that turned at the margin went on at 0.73 of the speed that it came with."""
SWITCHES = ("motion", "colour", "shape", "background")
# (left, right, up, down, still; of two objects back and forth, up and down and around as well): where two objects
# share the frame, each moves along the line between the halves.
_WEIGHTS = {
    "one": (1.0, 1.0, 1.0, 1.0, 0.6),
    "across": (1.0, 1.0, 0.0, 0.0, 0.6, 1.6, 0.0, 0.0),
    "along": (0.0, 0.0, 1.0, 1.0, 0.6, 0.0, 1.6, 0.0),
}


@dataclass(frozen=True)
class StreamSettings:
    """How streams are sampled; shares are 0 to 1."""

    two_object_fraction: float = 0.4
    switch_share: float = 0.5
    """Share of streams with one or two switches."""
    switch_weights: tuple[float, float, float, float] = (0.70, 0.15, 0.10, 0.05)
    """Relative frequency of each of SWITCHES."""
    around_weight: float = 1.4
    """Relative frequency of "around" among the motions of one object, where those of the others add up to 7.4
    with the usual bounce_weight."""
    bounce_weight: float = 1.4
    """Likewise of "back and forth", and of "up and down"."""
    switch_frames: tuple[int, ...] = ()
    """Frames at which a segment may begin; none: no switches."""


@dataclass(frozen=True)
class StreamBatch:
    """B streams on one device, of at most MAX_SEGMENTS segments and any number of frames each."""

    segments: SceneBatch
    """B * MAX_SEGMENTS scenes, those of a stream one after the other; after a stream's last one, its copies."""
    starts: Tensor
    """[B, MAX_SEGMENTS] int64: the frame at which each segment begins; a frame past any other where there is none."""
    centre: Tensor
    """[B, frames, 2, 2] float32, half-sides."""
    times: Tensor
    """[B, frames] int64: the frame of the stream that each frame of `centre` is."""

    def __len__(self) -> int:
        return int(self.starts.shape[0])

    def first(self, count: int) -> StreamBatch:
        """The first `count` streams."""
        return StreamBatch(
            self.segments.select(slice(count * MAX_SEGMENTS)),
            self.starts[:count],
            self.centre[:count],
            self.times[:count],
        )

    def segment_of_frame(self) -> Tensor:
        """[B, frames] int64."""
        return (self.times[:, :, None] >= self.starts[:, None]).sum(dim=-1) - 1

    def attributes(self) -> list[list[SceneAttributes]]:
        """What each segment shows, MAX_SEGMENTS per stream."""
        every = self.segments.attributes()
        return [every[first : first + MAX_SEGMENTS] for first in range(0, len(every), MAX_SEGMENTS)]

    def prompts_of(self, row: int) -> list[tuple[int, SceneAttributes]]:
        """The segments of one stream that are seen, each with its first frame."""
        last = int(self.times[row].max())
        starts = self.starts[row].tolist()
        attributes = self.attributes()[row]
        return [(start, one) for start, one in zip(starts, attributes, strict=True) if start <= last]


def drifted(streams: StreamBatch, generator: torch.Generator) -> StreamBatch:
    """The same streams as a model may have drifted: in each, sizes of objects and shades of the background off by a
    little, at most RADIUS_DRIFT and TONE_DRIFT; places and times as they were."""
    segments, device = streams.segments, streams.starts.device

    def spread(largest: float, *size: int) -> Tensor:
        drawn = 2 * torch.rand(len(streams), *size, generator=generator, device=device) - 1
        return (largest * drawn).repeat_interleave(MAX_SEGMENTS, dim=0)

    radius = segments.radius * (1 + spread(RADIUS_DRIFT, 2))
    tones = (segments.tones + spread(TONE_DRIFT, 1, 1)).clamp(0.0, 1.0)
    return replace(streams, segments=replace(segments, radius=radius, tones=tones))


def at_moments(streams: StreamBatch, moments: Tensor) -> StreamBatch:
    """The same streams with every object where it is at other moments. moments: [B, frames] float32, in frames of
    `streams` counted from its first one, held to those that there are."""
    last = streams.centre.shape[1] - 1
    moments = moments.clamp(0, last)
    before = moments.long().clamp(max=max(last - 1, 0))
    share = (moments - before)[:, :, None, None]

    def at(frames: Tensor) -> Tensor:
        return streams.centre.gather(1, frames.clamp(max=last)[:, :, None, None].expand_as(streams.centre))

    return replace(streams, centre=torch.lerp(at(before), at(before + 1), share))


def render_stream_slots(
    streams: StreamBatch, size: int, render: Callable[..., tuple[Tensor, Tensor]] = render_slots
) -> tuple[Tensor, Tensor]:
    """Frames [B, frames, size, size, 3] and each object's coverage [B, 2, frames, size, size], both in 0 to 1.

    Every frame is a scene of its own, of the segment that it is in. render: `render_slots`, or the same compiled.
    """
    count, num_frames = streams.times.shape
    rows = torch.arange(count, device=streams.starts.device)[:, None] * MAX_SEGMENTS + streams.segment_of_frame()
    scenes = streams.segments.select(rows.flatten())
    frames, covered = render(scenes, 1, size, streams.centre.flatten(0, 1)[:, None])
    return frames[:, 0].unflatten(0, (count, num_frames)), covered[:, :, 0].unflatten(0, (count, num_frames)).transpose(
        1, 2
    )


def render_streams(streams: StreamBatch, size: int) -> Tensor:
    """Frames as uint8 [B, frames, size, size, 3]."""
    frames, _ = render_stream_slots(streams, size)
    return (frames * 255.0).round().to(torch.uint8)


def sample_streams(
    count: int, generator: torch.Generator, times: Tensor, settings: StreamSettings = StreamSettings()
) -> StreamBatch:
    """`count` streams on the generator's device, looked at in the frames `times`: [frames] or [count, frames] int64."""
    device = generator.device
    scenes = sample_scenes(count, generator, SceneSettings(two_object_fraction=settings.two_object_fraction))
    two = scenes.num_objects == 2
    axis = torch.randint(2, (count,), generator=generator, device=device)
    swapped = torch.rand(count, generator=generator, device=device) < 0.5
    bounds = bounds_of(scenes.radius, two, axis, swapped)
    weights = _motion_weights(two, axis, settings)
    scenes = replace(scenes, motion=_draw_motion(scenes, weights, generator))
    parts, starts = [scenes], _draw_starts(count, generator, settings)
    for _ in range(MAX_SEGMENTS - 1):
        parts.append(_switched(parts[-1], weights, generator, settings))
    speed = SPEED_RANGE[0] + (SPEED_RANGE[1] - SPEED_RANGE[0]) * torch.rand(
        count, 2, generator=generator, device=device
    )
    times = times.to(device).expand(count, -1)
    frames = torch.arange(int(times.max()) + 1, device=device)
    segment = (frames[None, :, None] >= starts[:, None]).sum(dim=-1) - 1
    motions = torch.stack([part.motion for part in parts], dim=1)
    motion = motions.gather(1, segment[..., None].expand(-1, -1, 2))
    centre = simulate(motion, bounds, _draw_start(scenes.motion, bounds, generator), speed)
    centre = centre.gather(1, times[:, :, None, None].expand(-1, -1, 2, 2))
    return StreamBatch(_interleaved(parts), starts, centre, times)


def _motion_weights(two: Tensor, axis: Tensor, settings: StreamSettings) -> Tensor:
    """[B, motions]: halves beside each other (axis 0) leave room to move up and down, others across."""
    one = (*_WEIGHTS["one"], settings.bounce_weight, settings.bounce_weight, settings.around_weight)
    table = torch.tensor([one, _WEIGHTS["along"], _WEIGHTS["across"]], device=two.device)
    return table[torch.where(two, 1 + axis, 0)]


def _draw_motion(scenes: SceneBatch, weights: Tensor, generator: torch.Generator) -> Tensor:
    """[B, 2], never one whose combination with colour and shape is held out of training."""
    allowed = weights[:, None] * _allowed(scenes, "motion")
    return torch.multinomial(allowed.flatten(0, 1), 1, generator=generator).view(-1, 2)


def _draw_starts(count: int, generator: torch.Generator, settings: StreamSettings) -> Tensor:
    """[B, MAX_SEGMENTS]: 0, then the frames of no, one or two switches."""
    device = generator.device
    never = torch.iinfo(torch.int64).max
    starts = torch.full((count, MAX_SEGMENTS), never, dtype=torch.int64, device=device)
    starts[:, 0] = 0
    if not settings.switch_frames:
        return starts
    choices = torch.tensor(settings.switch_frames, device=device)
    drawn = choices[torch.randint(len(choices), (count, 2), generator=generator, device=device)].sort(dim=1).values
    switched = torch.rand(count, generator=generator, device=device) < settings.switch_share
    twice = (torch.rand(count, generator=generator, device=device) < 0.4) & (drawn[:, 0] != drawn[:, 1])
    starts[:, 1] = torch.where(switched, drawn[:, 0], never)
    starts[:, 2] = torch.where(switched & twice, drawn[:, 1], never)
    return starts


def _draw_start(motion: Tensor, bounds: Bounds, generator: torch.Generator) -> Start:
    """Anywhere within the bounds; three of four commands begin where there is as much way before them as in clips."""
    device, (count, slots) = motion.device, motion.shape

    def uniform(*size: int) -> Tensor:
        return torch.rand(*size, generator=generator, device=device)

    extent = bounds.high - bounds.low
    commands = torch.zeros(len(STREAM_MOTION_NAMES), 2, device=device)
    commands[: len(MOTION_DIRECTIONS)] = torch.tensor(MOTION_DIRECTIONS, device=device)
    direction = commands[motion]
    share = uniform(count, slots, 2)
    ahead = (uniform(count, slots) < 0.75)[..., None] & (direction != 0)
    slack = (1 - 0.66 / extent).clamp(min=0.0)
    share = torch.where(ahead, torch.where(direction > 0, share * slack, 1 - share * slack), share)
    position = bounds.low + share * extent
    angle = 2 * torch.pi * uniform(count, slots)
    radius = bounds.room * (0.6 + 0.4 * uniform(count, slots))
    circle = bounds.middle + radius[..., None] * torch.stack([angle.cos(), angle.sin()], dim=-1)
    position = torch.where((motion == AROUND)[..., None], circle, position)
    # To the further margin: which way to go follows from the place alone, as on a circle.
    heading = torch.where(position > bounds.middle, -1.0, 1.0)
    return Start(position, heading)


def _switched(scenes: SceneBatch, weights: Tensor, generator: torch.Generator, settings: StreamSettings) -> SceneBatch:
    """The same scenes with one attribute changed; never two objects of one colour and one shape, and no combination
    that is held out of training."""
    device, count = generator.device, len(scenes)
    kind = torch.multinomial(
        torch.tensor(settings.switch_weights, device=device), count, replacement=True, generator=generator
    )
    slot = torch.randint(2, (count,), generator=generator, device=device) % scenes.num_objects
    chosen = torch.nn.functional.one_hot(slot, 2).bool()
    changes = {"motion": weights[:, None].expand(-1, 2, -1)}
    for name, size in (("colour", len(COLOUR_NAMES)), ("shape", len(SHAPE_NAMES))):
        changes[name] = torch.ones(count, 2, size, device=device)
    drawn = {}
    for name, allowed in changes.items():
        current: Tensor = getattr(scenes, name)
        masked = allowed.scatter(2, current[..., None], 0.0) * _allowed(scenes, name)
        # Where nothing else is allowed, the attribute stays.
        stuck = masked.sum(dim=-1, keepdim=True) == 0
        masked = torch.where(stuck, torch.nn.functional.one_hot(current, masked.shape[-1]).float(), masked)
        new = torch.multinomial(masked.flatten(0, 1), 1, generator=generator).view(-1, 2)
        drawn[name] = torch.where(chosen & (kind == SWITCHES.index(name))[:, None], new, current)
    other = (
        scenes.background + torch.randint(1, len(BACKGROUND_NAMES), (count,), generator=generator, device=device)
    ) % (len(BACKGROUND_NAMES))
    background = torch.where(kind == SWITCHES.index("background"), other, scenes.background)
    return replace(scenes, background=background, **drawn)


def _allowed(scenes: SceneBatch, name: str) -> Tensor:
    """[B, 2, values]: 1 for values of an attribute that an object may take, 0 for those that would be held out, or
    would make two objects alike."""
    device = scenes.colour.device
    sizes = {"motion": len(STREAM_MOTION_NAMES), "colour": len(COLOUR_NAMES), "shape": len(SHAPE_NAMES)}
    values = torch.arange(sizes[name], device=device)
    own = {part: getattr(scenes, part)[..., None].expand(-1, -1, sizes[name]) for part in sizes}
    own[name] = values.expand_as(own[name])
    held = is_held_out(own["colour"], own["shape"], own["motion"]) & (own["motion"] < len(MOTION_NAMES))
    other = {part: getattr(scenes, part).flip(1)[..., None] for part in ("colour", "shape")}
    alike = (own["colour"] == other["colour"]) & (own["shape"] == other["shape"])
    alike &= (scenes.num_objects == 2)[:, None, None]
    return (~(held | alike)).float()


def _interleaved(parts: Sequence[SceneBatch]) -> SceneBatch:
    """The scenes of all segments, those of a stream one after the other."""
    return SceneBatch(
        **{
            field.name: torch.stack([getattr(part, field.name) for part in parts], dim=1).flatten(0, 1)
            for field in fields(SceneBatch)
        }
    )
