"""Seeded sampling of scenes: which objects, where they start and end, and the background behind them.

Lengths are in half-sides: the frame spans -1 to 1 in x and in y, so a radius of 0.25 is an eighth of the width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diffusion_runtime.quality.shapes.attributes import (
    BACKGROUND_NAMES,
    COLOUR_NAMES,
    MOTION_DIRECTIONS,
    MOTION_NAMES,
    SHAPE_NAMES,
    STREAM_MOTION_NAMES,
    ObjectAttributes,
    SceneAttributes,
    is_held_out,
)
from diffusion_runtime.quality.shapes.signed_distance import BOUNDING_RADIUS
from diffusion_runtime.quality.tensor_rows import TensorRows

MAX_OBJECTS = 2
RADIUS_RANGE_ONE = (0.25, 0.35)
RADIUS_RANGE_TWO = (0.21, 0.28)
TRAVEL_RANGE_ONE = (0.64, 0.96)
TRAVEL_RANGE_TWO = (0.64, 0.90)
FRAME_MARGIN = 0.03
OBJECT_GAP = 0.1
PLACEMENT_CANDIDATES = 128
OBJECT_CANDIDATES = 64


@dataclass(frozen=True)
class SceneBatch(TensorRows):
    """A batch of B scenes as tensors on one device; slot 1 of a one-object scene is drawn but never shown."""

    num_objects: Tensor
    """[B] int64, 1 or 2."""
    colour: Tensor
    """[B, 2] int64, index into COLOUR_NAMES."""
    shape: Tensor
    """[B, 2] int64, index into SHAPE_NAMES."""
    motion: Tensor
    """[B, 2] int64, index into MOTION_NAMES; of streams, into STREAM_MOTION_NAMES."""
    radius: Tensor
    """[B, 2] float32, half-sides."""
    start: Tensor
    """[B, 2, 2] float32, (x, y) of the centre in the first frame, half-sides."""
    travel: Tensor
    """[B, 2, 2] float32, (x, y) from the first frame to the last, half-sides."""
    background: Tensor
    """[B] int64, index into BACKGROUND_NAMES."""
    tones: Tensor
    """[B, 2, 3] float32, the two background colours, 0 to 1."""
    period: Tensor
    """[B] float32, length of a stripe pair or of two checker cells, half-sides."""
    phase: Tensor
    """[B, 2] float32, offset of the pattern in periods, along x and y."""
    vertical: Tensor
    """[B] bool, whether stripes and gradients vary along y instead of along x."""

    def attributes(self) -> list[SceneAttributes]:
        """Describe the scenes in names, every attribute filled in."""
        counts, backgrounds = self.num_objects.tolist(), self.background.tolist()
        colours, shapes, motions = self.colour.tolist(), self.shape.tolist(), self.motion.tolist()
        return [
            SceneAttributes(
                objects=tuple(
                    ObjectAttributes(
                        COLOUR_NAMES[colours[row][slot]],
                        SHAPE_NAMES[shapes[row][slot]],
                        STREAM_MOTION_NAMES[motions[row][slot]],
                    )
                    for slot in range(counts[row])
                ),
                background=BACKGROUND_NAMES[backgrounds[row]],
            )
            for row in range(len(self))
        ]


@dataclass(frozen=True)
class SceneSettings:
    """Settings by which scenes are sampled."""

    two_object_fraction: float = 0.5
    """Share of scenes with two objects, 0 to 1."""
    held_out: bool = False
    """False: combinations held out of training never appear. True: object 0 of every scene is such a combination."""
    background_weights: tuple[float, float, float, float] = (0.34, 0.22, 0.22, 0.22)
    """Relative frequency of each of BACKGROUND_NAMES."""
    same_colour_fraction: float = 0.12
    """Share of two-object scenes in which both colours are made equal; others are equal by chance only."""
    same_motion_fraction: float = 0.12
    """Share of two-object scenes in which both motions are made equal."""


def sample_scenes(count: int, generator: torch.Generator, settings: SceneSettings = SceneSettings()) -> SceneBatch:
    """`count` scenes on the generator's device; the same seed, device type and settings give the same scenes."""
    device = generator.device

    def uniform(*size: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        return low + (high - low) * torch.rand(*size, generator=generator, device=device)

    two = uniform(count) < settings.two_object_fraction
    triples = _sample_triples(count, generator, settings)
    small, large = torch.tensor(RADIUS_RANGE_TWO, device=device), torch.tensor(RADIUS_RANGE_ONE, device=device)
    radius_range = torch.where(two[:, None], small, large)
    radius = radius_range[:, :1] + (radius_range[:, 1:] - radius_range[:, :1]) * uniform(count, 2)
    start, travel = _sample_placement(triples[..., 2], radius, two, generator)
    weights = torch.tensor(settings.background_weights, device=device)
    background = torch.multinomial(weights, count, replacement=True, generator=generator)
    cell_scale = torch.where(background == BACKGROUND_NAMES.index("checker"), 1.2, 1.0)
    return SceneBatch(
        num_objects=1 + two.long(),
        colour=triples[..., 0],
        shape=triples[..., 1],
        motion=triples[..., 2],
        radius=radius,
        start=start,
        travel=travel,
        background=background,
        tones=_sample_tones(count, generator),
        period=uniform(count, low=0.40, high=0.62) * cell_scale,
        phase=uniform(count, 2),
        vertical=uniform(count) < 0.5,
    )


def _sample_triples(count: int, generator: torch.Generator, settings: SceneSettings) -> Tensor:
    """(colour, shape, motion) indices, [count, 2, 3]: never two objects of one colour and one shape."""
    device = generator.device
    every = [
        (colour, shape, motion)
        for colour in range(len(COLOUR_NAMES))
        for shape in range(len(SHAPE_NAMES))
        for motion in range(len(MOTION_NAMES))
    ]
    known = torch.tensor([triple for triple in every if not is_held_out(*triple)], device=device)
    unseen = torch.tensor([triple for triple in every if is_held_out(*triple)], device=device)

    def pick(pool: Tensor, *size: int) -> Tensor:
        return pool[torch.randint(len(pool), size, generator=generator, device=device)]

    first = pick(unseen if settings.held_out else known, count)
    candidates = pick(known, count, OBJECT_CANDIDATES)
    same_colour = torch.rand(count, generator=generator, device=device) < settings.same_colour_fraction
    same_motion = torch.rand(count, generator=generator, device=device) < settings.same_motion_fraction
    equal = candidates == first[:, None]
    allowed = ~(equal[..., 0] & equal[..., 1])
    wished = allowed & (equal[..., 0] | ~same_colour[:, None]) & (equal[..., 2] | ~same_motion[:, None])
    best = (2 * wished.int() + allowed.int()).argmax(dim=1)
    second = candidates[torch.arange(count, device=device), best]
    return torch.stack([first, second], dim=1)


def _sample_placement(motion: Tensor, radius: Tensor, two: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Start and travel, each [B, 2, 2]: inside the frame always, and apart from each other in every frame."""
    device, count = generator.device, motion.shape[0]
    shape = (count, PLACEMENT_CANDIDATES, MAX_OBJECTS)
    ranges = torch.where(
        two[:, None], torch.tensor(TRAVEL_RANGE_TWO, device=device), torch.tensor(TRAVEL_RANGE_ONE, device=device)
    )[:, None, None]
    distance = ranges[..., 0] + (ranges[..., 1] - ranges[..., 0]) * torch.rand(
        shape, generator=generator, device=device
    )
    directions = torch.tensor(MOTION_DIRECTIONS, device=device)[motion]
    travel = directions[:, None] * distance[..., None]
    room = (1.0 - FRAME_MARGIN - BOUNDING_RADIUS * radius)[:, None, :, None]
    low, high = -room - travel.clamp(max=0.0), room - travel.clamp(min=0.0)
    start = low + (high - low) * torch.rand((*shape, 2), generator=generator, device=device)
    clearance = _smallest_distance(start[:, :, 0] - start[:, :, 1], travel[:, :, 0] - travel[:, :, 1])
    clearance = clearance - (BOUNDING_RADIUS * radius.sum(dim=1) + OBJECT_GAP)[:, None]
    first_valid = (clearance > 0).int().argmax(dim=1)
    chosen = torch.where((clearance > 0).any(dim=1), first_valid, clearance.argmax(dim=1))
    rows = torch.arange(count, device=device)
    return start[rows, chosen], travel[rows, chosen]


def _smallest_distance(offset: Tensor, velocity: Tensor) -> Tensor:
    """Return the least length of `offset + t * velocity` over t in [0, 1]; both [..., 2]."""
    time = -(offset * velocity).sum(-1) / (velocity * velocity).sum(-1).clamp(min=1e-6)
    nearest: Tensor = torch.linalg.vector_norm(offset + time.clamp(0.0, 1.0)[..., None] * velocity, dim=-1)
    return nearest


def _sample_tones(count: int, generator: torch.Generator) -> Tensor:
    """Two muted tones per scene, [count, 2, 3], 0 to 1: 0.22 to 0.36 apart in lightness, with a chroma below 0.05."""
    device = generator.device
    contrast = 0.22 + 0.14 * torch.rand(count, generator=generator, device=device)
    dark = 0.22 + (0.66 - contrast) * torch.rand(count, generator=generator, device=device)
    light = dark + contrast
    swap = torch.rand(count, generator=generator, device=device) < 0.5
    lightness = torch.where(swap[:, None], torch.stack([light, dark], 1), torch.stack([dark, light], 1))
    tint = 0.06 * (torch.rand(count, 1, 3, generator=generator, device=device) - 0.5)
    return lightness[..., None] + tint
