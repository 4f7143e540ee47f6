"""Trajectories of objects that never leave the frame: commands that end at the margin, and motions without an end.

Every motion is Markov in (position, heading): what comes next follows from where an object is and which way it went, so
that a new motion may begin at any frame. Lengths are in half-sides, speeds in half-sides per frame.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diffusion_runtime.quality.shapes.attributes import MOTION_DIRECTIONS, STREAM_MOTION_NAMES
from diffusion_runtime.quality.shapes.scene import FRAME_MARGIN, OBJECT_GAP
from diffusion_runtime.quality.shapes.signed_distance import BOUNDING_RADIUS

SPEED_RANGE = (0.027, 0.031)
"""The middle of that of clips of 29 frames, whose travel of 0.64 to 0.96 is 0.023 to 0.034 per frame. A window of six
latent frames shows 8 frames of the past: where an object turns in them they say little about its speed, which wandered
over the whole range (0.024 to 0.034 then, see CAUSAL.md), from 0.026 to 0.033 in one turn."""
SMALLEST_CIRCLE = 0.6
"""Radius of the motion "around", as a share of the room that there is: an object nearer to the middle moves out."""
BACK_AND_FORTH, UP_AND_DOWN, AROUND = (
    STREAM_MOTION_NAMES.index(name) for name in ("back and forth", "up and down", "around")
)


@dataclass(frozen=True)
class Bounds:
    """Where the centres of objects may be: low and high, (x, y), each [B, 2, 2]."""

    low: Tensor
    high: Tensor

    @property
    def middle(self) -> Tensor:
        return (self.low + self.high) / 2

    @property
    def room(self) -> Tensor:
        """Radius of the largest circle about the middle, [B, 2]."""
        return ((self.high - self.low) / 2).amin(dim=-1)


def bounds_of(radius: Tensor, two: Tensor, axis: Tensor, swapped: Tensor) -> Bounds:
    """The whole frame for one object; for two, a half-plane each, so that they can never overlap.

    radius: [B, 2]; two: [B] bool; axis: [B] int64, 0 where the halves are left and right, 1 where they are above each
    other; swapped: [B] bool, whether object 0 has the second half.
    """
    reach = (BOUNDING_RADIUS * radius)[..., None]
    low = (-1.0 + FRAME_MARGIN + reach).expand(-1, -1, 2)
    high = -low
    split = torch.nn.functional.one_hot(axis, 2).bool()[:, None] & two[:, None, None]
    second = torch.stack([swapped, ~swapped], dim=1)[..., None]
    edge = OBJECT_GAP / 2 + reach
    low = torch.where(split & second, edge.expand_as(low), low)
    high = torch.where(split & ~second, -edge.expand_as(high), high)
    return Bounds(low, high)


@dataclass(frozen=True)
class Start:
    """Where objects are in the first frame, and which way they go."""

    position: Tensor
    """[B, 2, 2], (x, y)."""
    heading: Tensor
    """[B, 2, 2], 1 or -1: the direction along x and y of the motions back and forth, and up and down."""


def simulate(motion: Tensor, bounds: Bounds, start: Start, speed: Tensor) -> Tensor:
    """Centres [B, frames, 2, 2] of objects that follow `motion`.

    motion: [B, frames, 2] int64, index into STREAM_MOTION_NAMES: how an object comes to that frame from the one before.
    speed: [B, 2].
    """
    device = speed.device
    commands = torch.zeros(len(STREAM_MOTION_NAMES), 2, device=device)
    commands[: len(MOTION_DIRECTIONS)] = torch.tensor(MOTION_DIRECTIONS, device=device)
    middle, room = bounds.middle, bounds.room
    position, heading = start.position, start.heading
    centres = [position]
    for frame in range(1, motion.shape[1]):
        now = motion[:, frame]
        command = commands[now]
        bouncing = torch.stack([now == BACK_AND_FORTH, now == UP_AND_DOWN], dim=-1)
        moved = position + speed[..., None] * torch.where(bouncing, heading, command)
        over, under = moved - bounds.high, bounds.low - moved
        bounced = torch.where(over > 0, bounds.high - over, torch.where(under > 0, bounds.low + under, moved))
        turned = torch.where((over > 0) | (under > 0), -heading, heading)
        straight = torch.where(bouncing, bounced, moved)
        circled = _on_circle(position - middle, speed, room) + middle
        around = (now == AROUND)[..., None]
        # On the way from a corner to the circle the bounds are in the way.
        following = torch.where(around, circled, straight).clamp(bounds.low, bounds.high)
        # The next motion goes on the way that this one went.
        step = following - position
        went = step.abs() > 0.25 * speed[..., None]
        heading = torch.where(bouncing, turned, torch.where(went, step.sign(), heading))
        position = following
        centres.append(position)
    return torch.stack(centres, dim=1)


def _on_circle(offset: Tensor, speed: Tensor, room: Tensor) -> Tensor:
    """The next place on a circle about the origin, clockwise as seen; an object too far in or out spirals towards it at
    its own speed. Clockwise always: which way to go follows from the place alone, whatever came before."""
    distance = torch.linalg.vector_norm(offset, dim=-1)
    wanted = distance.clamp(min=SMALLEST_CIRCLE * room)
    wanted = torch.minimum(wanted, room)
    radius = distance + (wanted - distance).clamp(-speed, speed)
    angle = torch.atan2(offset[..., 1], offset[..., 0]) + speed / wanted
    return radius[..., None] * torch.stack([angle.cos(), angle.sin()], dim=-1)
