"""Seeded sampling of scenes: which things, where they start and end, and the place and time behind them.

Lengths are in half-sides: the frame spans -1 to 1 in x and in y, so a radius of 0.25 is an eighth of the width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from diffusion_runtime.quality.emoji.attributes import (
    GROUNDED,
    MOTION_DIRECTIONS,
    MOTION_NAMES,
    PLACE_NAMES,
    SCENE_NAMES,
    SIZE_NAMES,
    TIME_NAMES,
    ObjectAttributes,
    SceneAttributes,
    held_out_motion,
)
from diffusion_runtime.quality.emoji.things import THING_NAMES, THINGS
from diffusion_runtime.quality.tensor_rows import TensorRows

MAX_OBJECTS = 2
GRID = 0.125
"""The centres of things lie on a grid of 16 pixels of 256, which is one token, and their sides are whole multiples of
it. What moves does so by 4 pixels a frame of 29, one token a latent (half of that where there are two): a model sees
each thing in one or two positions within its tokens, not in all, but for what bounces."""
RADIUS_ONE = (0.25, 0.375, 0.5)
RADIUS_TWO = (0.25, 0.375, 0.4375)
"""Half the side of the square that a picture fills, per SIZE_NAMES."""
SIZE_WEIGHTS = (0.22, 0.54, 0.24)
TIME_WEIGHTS = (0.5, 0.22, 0.28)
TRAVEL_ONE, TRAVEL_TWO = 0.875, 0.4375
HOP = 0.3125
SMALLEST_GROWTH = 0.4
"""Of the final radius, in the first frame of `growing`."""
FRAME_MARGIN = 0.03
GROUND_RANGE = (0.5, 0.94)
"""Where the lower side of a standing thing may be."""
SEA_TOP = -0.2
"""Highest centre of a thing in the sea that does not move up or down."""
PLACE_FROM = 0.25
"""Distance of the mean centre from the middle from which on it has a place."""
NUM_CANDIDATES = 48
SPARE = 1.6
"""Scenes drawn for each that is kept: those whose things would meet are thrown away."""
STILL, LEFT, RIGHT, UP, DOWN, BOUNCING, SPINNING, GROWING = range(len(MOTION_NAMES))


_FACING = tuple(each.faces for each in THINGS)


@cache
def _constant(values: tuple[Any, ...], device: str) -> Tensor:
    """A table on a device, sent there once: sending waits for all that the device has still to do."""
    return torch.tensor(values, device=device)


@dataclass(frozen=True)
class SceneBatch(TensorRows):
    """A batch of B scenes as tensors on one device; slot 1 of a scene with one thing is drawn but never shown."""

    num_objects: Tensor
    """[B] int64, 1 or 2."""
    thing: Tensor
    """[B, 2] int64, index into THINGS."""
    motion: Tensor
    """[B, 2] int64, index into MOTION_NAMES."""
    size: Tensor
    """[B, 2] int64, index into SIZE_NAMES."""
    place: Tensor
    """[B, 2] int64, index into PLACE_NAMES; of two things, the place relative to the other."""
    scene: Tensor
    """[B] int64, index into SCENE_NAMES."""
    time: Tensor
    """[B] int64, index into TIME_NAMES."""
    radius: Tensor
    """[B, 2] float32, half-sides."""
    start: Tensor
    """[B, 2, 2] float32, (x, y) of the centre in the first frame at full size."""
    travel: Tensor
    """[B, 2, 2] float32, (x, y) from the first frame to the last; of a bouncing thing (0, minus its height)."""
    mirrored: Tensor
    """[B, 2] bool, whether the picture is mirrored."""
    window: Tensor
    """[B] float32, 0 to 1: where the panorama's window begins."""
    light: Tensor
    """[B] float32 near 1: brightness of the panorama."""

    def attributes(self) -> list[SceneAttributes]:
        """Describe the scenes in names, every attribute filled in."""
        counts, scenes, times = self.num_objects.tolist(), self.scene.tolist(), self.time.tolist()
        # One read from the device.
        table = torch.stack([self.thing, self.motion, self.size, self.place], dim=2).tolist()
        described = []
        for count, scene, time, slots in zip(counts, scenes, times, table, strict=True):
            objects = tuple(
                ObjectAttributes(THING_NAMES[thing], MOTION_NAMES[motion], SIZE_NAMES[size], PLACE_NAMES[place])
                for thing, motion, size, place in slots[:count]
            )
            name = SCENE_NAMES[scene]
            described.append(SceneAttributes(objects, name, None if name == "space" else TIME_NAMES[time]))
        return described


@dataclass(frozen=True)
class SceneSettings:
    """Settings by which scenes are sampled."""

    two_object_fraction: float = 0.5
    """Share of scenes with two things, 0 to 1."""
    held_out: bool = False
    """False: combinations held out of training never appear. True: thing 0 of every scene is such a combination."""
    same_thing_fraction: float = 0.12
    """Share of two-thing scenes whose things are equal and move alike."""
    same_motion_fraction: float = 0.12
    """Share of two-thing scenes, besides, whose motions are made equal."""


def sample_scenes(count: int, generator: torch.Generator, settings: SceneSettings = SceneSettings()) -> SceneBatch:
    """`count` scenes on the generator's device; the same seed, device type and settings give the same scenes."""
    device = generator.device
    drawn = max(count + 8, round(SPARE * count))

    def uniform(*size: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        return low + (high - low) * torch.rand(*size, generator=generator, device=device)

    def whole(high: int, *size: int) -> Tensor:
        return torch.randint(high, size, generator=generator, device=device)

    # A fixed share has two things, however many of those are thrown away.
    two = uniform(drawn) < settings.two_object_fraction
    scene = whole(len(SCENE_NAMES), drawn)
    weights = _constant(TIME_WEIGHTS, str(device))
    time = torch.multinomial(weights, drawn, replacement=True, generator=generator)
    thing, motion = _sample_pairs(scene, generator, settings)
    sizes = _constant(SIZE_WEIGHTS, str(device))
    size = torch.multinomial(sizes, 2 * drawn, replacement=True, generator=generator).view(drawn, 2)
    radius = torch.where(
        two[:, None], _constant(RADIUS_TWO, str(device))[size], _constant(RADIUS_ONE, str(device))[size]
    )
    start, travel, valid = _sample_placement(motion, radius, scene, two, generator)
    facing = _constant(_FACING, str(device))[thing]
    mirrored = ((motion == RIGHT) & (facing == -1)) | ((motion == LEFT) & (facing == 1))
    batch = SceneBatch(
        num_objects=1 + two.long(),
        thing=thing,
        motion=motion,
        size=size,
        place=_places(start, travel, scene, motion, two),
        scene=scene,
        time=time,
        radius=radius,
        start=start,
        travel=travel,
        mirrored=mirrored,
        # A panorama is two frames wide, so the window also begins at a token.
        window=(uniform(drawn) * (4 / GRID)).floor() * (GRID / 4),
        light=uniform(drawn, low=0.95, high=1.05),
    )
    return batch.select(_keep(valid, two, count, settings.two_object_fraction))


def _keep(valid: Tensor, two: Tensor, count: int, fraction: float) -> Tensor:
    """Rows of `count` scenes: valid ones first; invalid ones with two things leave no fewer of two."""
    rank = (~valid).int()
    if 0.0 < fraction < 1.0:
        # Of one thing, as many stand at the front as there should be; the rest wait behind.
        ones = torch.cumsum((~two).int(), dim=0)
        wanted = round((1 - fraction) * count)
        rank = rank + 2 * ((~two) & (ones > wanted)).int()
    return torch.argsort(rank, stable=True)[:count].sort().values


def _sample_pairs(scene: Tensor, generator: torch.Generator, settings: SceneSettings) -> tuple[Tensor, Tensor]:
    """Thing and motion of both slots, each [B, 2]: never the same thing by chance, held-out triples as asked."""
    device, count = scene.device, scene.shape[0]

    def whole(high: int) -> Tensor:
        return torch.randint(high, (count,), generator=generator, device=device)

    def share() -> Tensor:
        return torch.rand(count, generator=generator, device=device)

    num_things, num_motions = len(THINGS), len(MOTION_NAMES)
    first = whole(num_things)
    same = share() < settings.same_thing_fraction
    other = (first + 1 + whole(num_things - 1)) % num_things
    second = torch.where(same, first, other)
    never_first, never_second = (held_out_motion_of(thing, scene) for thing in (first, second))
    known = (never_first + 1 + whole(num_motions - 1)) % num_motions
    moves = never_first if settings.held_out else known
    own = (never_second + 1 + whole(num_motions - 1)) % num_motions
    alike = same | (share() < settings.same_motion_fraction)
    # An equal motion must be one that the second thing may have.
    alike = alike & ((moves != never_second) | settings.held_out)
    return torch.stack([first, second], dim=1), torch.stack([moves, torch.where(alike, moves, own)], dim=1)


def is_grounded(scene: Tensor) -> Tensor:
    """Return whether things stand on a ground there, bool of the same shape."""
    return _constant(GROUNDED, str(scene.device))[scene]


def held_out_motion_of(thing: Tensor, scene: Tensor) -> Tensor:
    """`held_out_motion` of tensors of indices."""
    return torch.as_tensor(held_out_motion(thing, scene))  # type: ignore[arg-type]


def _sample_placement(
    motion: Tensor, radius: Tensor, scene: Tensor, two: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Start and travel, each [B, 2, 2], and whether things stay apart [B]: inside the frame always."""
    device, count = motion.device, motion.shape[0]
    shape = (count, NUM_CANDIDATES, MAX_OBJECTS)

    motion, radius, scene = motion[:, None], radius[:, None], scene[:, None, None]
    room = 1.0 - FRAME_MARGIN - radius
    directions = _constant(MOTION_DIRECTIONS, str(device)).float()[motion]
    distance = torch.where(two, TRAVEL_TWO, TRAVEL_ONE)[:, None, None, None]
    travel = (directions * distance).expand(*shape, 2)
    hop = torch.full(shape, HOP, device=device)
    bouncing = (motion == BOUNCING).expand(shape)
    travel = torch.where(bouncing[..., None], torch.stack([torch.zeros_like(hop), -hop], dim=-1), travel)
    low = -room[..., None] - travel.clamp(max=0.0)
    high = room[..., None] - travel.clamp(min=0.0)
    grounded = is_grounded(scene)
    # The lowest point of the motion stands on the ground.
    lowest = travel[..., 1].clamp(min=0.0)
    feet_low, feet_high = (bound - radius - lowest for bound in GROUND_RANGE)
    vertical_low = torch.where(grounded, torch.maximum(low[..., 1], feet_low), low[..., 1])
    vertical_high = torch.where(grounded, torch.minimum(high[..., 1], feet_high), high[..., 1])
    swims = (scene == SCENE_NAMES.index("sea")) & (motion != UP) & (motion != DOWN)
    vertical_low = torch.where(swims, torch.maximum(vertical_low, torch.full_like(vertical_low, SEA_TOP)), vertical_low)
    low = torch.stack([low[..., 0], torch.minimum(vertical_low, high[..., 1])], dim=-1)
    high = torch.stack([high[..., 0], torch.maximum(vertical_high, low[..., 1])], dim=-1)
    place = torch.rand((*shape, 2), generator=generator, device=device)
    first, last = (low / GRID - 1e-4).ceil(), (high / GRID + 1e-4).floor()
    start = GRID * (first + ((last - first + 1).clamp(min=1.0) * place).floor())
    clear = _clearance(start, travel, motion.expand(shape), radius)
    rows = torch.arange(count, device=device)
    # The first candidate is used for one thing: a preference for distance would move it to the sides.
    chosen = torch.where(two, (clear > 0).int().argmax(dim=1), 0)
    valid = ~two | (clear[rows, chosen] > 0)
    return start[rows, chosen], travel[rows, chosen], valid


def _clearance(start: Tensor, travel: Tensor, motion: Tensor, radius: Tensor) -> Tensor:
    """[B, candidates]: the least gap between the two squares over the clip, negative where they meet.

    A picture fills its square but for corners, so squares may touch; 6 % of the sides must be free.
    """
    times = torch.linspace(0, 1, 9, device=start.device)[:, None, None, None]
    path = torch.where((motion == BOUNCING)[..., None], hop_height(times)[..., None], times[..., None])
    centre = start + path * travel
    offset = (centre[..., 0, :] - centre[..., 1, :]).abs().amax(dim=-1)
    return (offset - 1.06 * radius.sum(dim=-1)).amin(dim=0)


def hop_height(time: Tensor) -> Tensor:
    """Height of two hops over the clip, 0 to 1, parabolas; time is 0 to 1."""
    within = torch.remainder(2 * time, 1.0)
    return 4 * within * (1 - within)


def _places(start: Tensor, travel: Tensor, scene: Tensor, motion: Tensor, two: Tensor) -> Tensor:
    """[B, 2] index into PLACE_NAMES: where a thing is in the frame or, of two, beside or above the other."""
    middle = start + travel / 2
    grounded = is_grounded(scene)[:, None]
    across = (motion == LEFT) | (motion == RIGHT)
    along = (motion == UP) | (motion == DOWN) | (motion == BOUNCING)
    x, y = middle[..., 0], middle[..., 1]
    none, left, right, top, bottom = (torch.full_like(motion, index) for index in range(len(PLACE_NAMES)))
    sideways = torch.where(x < -PLACE_FROM, left, torch.where(x > PLACE_FROM, right, none))
    vertical = torch.where(y < -PLACE_FROM, top, torch.where(y > PLACE_FROM, bottom, none))
    place = torch.where((sideways != none) & ~across, sideways, none)
    free = ~grounded & (scene != SCENE_NAMES.index("sea"))[:, None] & ~along
    place = torch.where((place == none) & free, vertical, place)
    # Of two: apart at both ends of their ways, along the axis on which they are further apart.
    ends = torch.stack([start, start + travel], dim=1)
    gap = ends[:, :, 0] - ends[:, :, 1]
    left_first = (gap[..., 0] < -PLACE_FROM).all(dim=1, keepdim=True)
    right_first = (gap[..., 0] > PLACE_FROM).all(dim=1, keepdim=True)
    top_first = (gap[..., 1] < -PLACE_FROM).all(dim=1, keepdim=True)
    bottom_first = (gap[..., 1] > PLACE_FROM).all(dim=1, keepdim=True)
    pairs = [(left_first, 1, 2), (right_first, 2, 1), (top_first, 3, 4), (bottom_first, 4, 3)]
    relative = none
    for found, first, second in reversed(pairs):
        relative = torch.where(found, _constant(((first, second),), str(start.device)), relative)
    return torch.where(two[:, None], relative, place)
