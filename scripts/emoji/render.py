"""Renders scenes to pixels: pictures placed by affine sampling over a window of a panorama, on CPU and CUDA alike."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from diffusion_runtime.quality.emoji.scene import (
    BOUNCING,
    DOWN,
    GROWING,
    MAX_OBJECTS,
    SMALLEST_GROWTH,
    SPINNING,
    UP,
    SceneBatch,
    hop_height,
    is_grounded,
)
from diffusion_runtime.quality.emoji.things import THINGS
from scripts.emoji.atlas import SPRITE, read_atlas
from scripts.emoji.panoramas import panoramas

NARROWEST = 0.1
"""Of its width, a spinning picture seen from its side."""
SQUASH = 0.14
"""Share of its height that a hopping thing loses on the ground."""
SHADOW = 0.30
"""Darkness of the shadow under a thing that stands on a ground."""
NUM_LEVELS = 3


@dataclass(frozen=True)
class Poses:
    """Places and sizes of things in every frame."""

    centre: Tensor
    """[B, frames, 2, 2], half-sides."""
    half: Tensor
    """[B, frames, 2, 2]: half the width and half the height, half-sides; the width is negative when mirrored."""
    grounded: Tensor
    """[B] bool, whether they stand on a ground."""


def poses(scenes: SceneBatch, num_frames: int) -> Poses:
    """The motion of both things; a single frame shows each at full size, half way, at rest."""
    device = scenes.start.device
    motion = scenes.motion[:, None]
    if num_frames == 1:
        time = torch.full((1, 1, 1), 0.5, device=device)
        turn, growth = torch.ones_like(time), torch.ones_like(time)
        hop = torch.zeros_like(time)
    else:
        time = torch.linspace(0.0, 1.0, num_frames, device=device)[None, :, None]
        turn = torch.cos(2 * math.pi * time)
        turn = torch.where(turn.abs() < NARROWEST, NARROWEST * torch.where(turn < 0, -1.0, 1.0), turn)
        growth = SMALLEST_GROWTH ** (1 - time)
        hop = hop_height(time)
    width = torch.where(motion == SPINNING, turn, 1.0)
    scale = torch.where(motion == GROWING, growth, 1.0)
    share = torch.where(motion == BOUNCING, hop, time)
    centre = scenes.start[:, None] + share[..., None] * scenes.travel[:, None]
    radius = scenes.radius[:, None]
    squash = torch.where(motion == BOUNCING, SQUASH * (1 - 4 * hop).clamp(min=0.0), 0.0)
    squash = squash if num_frames > 1 else torch.zeros_like(squash)
    half_width = radius * scale * width * (1 + 0.6 * squash)
    half_height = radius * scale * (1 - squash)
    # On a ground, the lower side stays where it is.
    grounded = is_grounded(scenes.scene)
    sunk = torch.where(grounded[:, None, None] | (motion == BOUNCING), radius - half_height, 0.0)
    centre = torch.stack([centre[..., 0].expand_as(sunk), centre[..., 1] + sunk], dim=-1)
    half_width = half_width * torch.where(scenes.mirrored[:, None], -1.0, 1.0)
    return Poses(centre, torch.stack([half_width, half_height], dim=-1), grounded)


@cache
def picture_levels(device: str) -> Tensor:
    """Pictures at three sharpnesses [levels, things, 4, SPRITE, SPRITE]: for full, half and quarter size."""
    full = read_atlas()[: len(THINGS)].to(device)
    levels = [full]
    for level in range(1, NUM_LEVELS):
        small = F.interpolate(full, size=SPRITE // 2**level, mode="area")
        levels.append(F.interpolate(small, size=SPRITE, mode="bilinear", align_corners=False))
    return torch.stack(levels)


def background(scenes: SceneBatch, size: int) -> Tensor:
    """[B, 3, size, size] in 0 to 1: a window of each scene's panorama."""
    pictures = panoramas(size, str(scenes.start.device))
    first = (scenes.window * 2 * size).long()
    columns = (first[:, None] + torch.arange(size, device=first.device)) % (2 * size)
    whole = pictures[scenes.scene, scenes.time]
    window = whole.gather(3, columns[:, None, None].expand(-1, 3, size, -1))
    return (window * scenes.light[:, None, None, None]).clamp(0, 1)


def pick_pictures(scenes: SceneBatch, placed: Poses, size: int) -> Tensor:
    """[B, 2, 4, SPRITE, SPRITE], of the sharpness that the size on screen needs."""
    levels = picture_levels(str(scenes.start.device))
    drawn = placed.half.abs().amax(dim=-1).mean(dim=1) * size
    level = torch.log2(SPRITE / drawn.clamp(min=1.0)).floor().clamp(0, NUM_LEVELS - 1).long()
    return levels[level, scenes.thing]


def compose(scenes: SceneBatch, placed: Poses, pictures: Tensor, behind: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Shadows first, then the things one over the other."""
    device, num_frames = behind.device, placed.centre.shape[1]
    axis = (torch.arange(size, device=device, dtype=torch.float32) + 0.5) * (2.0 / size) - 1.0
    y, x = axis[:, None], axis[None, :]
    frames = behind[:, None].expand(-1, num_frames, -1, -1, -1)
    for slot in range(MAX_OBJECTS):
        stands = placed.grounded & (scenes.num_objects > slot)
        stands = stands & (scenes.motion[:, slot] != UP) & (scenes.motion[:, slot] != DOWN)
        ground = (scenes.start[:, slot, 1] + scenes.radius[:, slot])[:, None]
        height = (ground - placed.centre[:, :, slot, 1] - placed.half[:, :, slot, 1]).clamp(min=0.0)
        wide = placed.half[:, :, slot, 0].abs() * (0.85 - 0.5 * height)
        across = (x - placed.centre[:, :, slot, 0, None, None]) / wide[..., None, None].clamp(min=0.02)
        down = (y - ground[..., None, None]) / (0.22 * scenes.radius[:, slot, None, None, None])
        dark = SHADOW * (1 - height)[..., None, None] * (1.35 - across**2 - down**2).clamp(0, 1)
        frames = frames * (1 - dark * stands[:, None, None, None])[:, :, None]
    covered = []
    for slot in range(MAX_OBJECTS):
        half = placed.half[:, :, slot, None, None]
        across = (x - placed.centre[:, :, slot, 0, None, None]) / half[..., 0]
        down = (y - placed.centre[:, :, slot, 1, None, None]) / half[..., 1]
        across, down = torch.broadcast_tensors(across, down)
        grid = torch.stack([across, down], dim=-1).flatten(1, 2)
        sampled = F.grid_sample(pictures[:, slot], grid, mode="bilinear", padding_mode="zeros", align_corners=False)
        sampled = sampled.unflatten(2, (num_frames, size)) * (scenes.num_objects > slot)[:, None, None, None, None]
        sampled = sampled.transpose(1, 2)
        alpha = sampled[:, :, 3]
        frames = sampled[:, :, :3] + (1 - alpha)[:, :, None] * frames
        covered.append(alpha)
    return frames.clamp(0, 1).permute(0, 1, 3, 4, 2), torch.stack(covered, dim=1)


def render_slots(scenes: SceneBatch, num_frames: int, size: int) -> tuple[Tensor, Tensor]:
    """Frames [B, frames, size, size, 3] and coverage of each thing [B, 2, frames, size, size], both in 0 to 1."""
    placed = poses(scenes, num_frames)
    pictures = pick_pictures(scenes, placed, size)
    return compose(scenes, placed, pictures, background(scenes, size), size)


def render_float(scenes: SceneBatch, num_frames: int, size: int) -> tuple[Tensor, Tensor]:
    """Frames [B, frames, size, size, 3] in 0 to 1 and the things' coverage [B, frames, size, size] in 0 to 1."""
    frames, covered = render_slots(scenes, num_frames, size)
    return frames, covered.amax(dim=1)


def render(scenes: SceneBatch, num_frames: int, size: int) -> Tensor:
    """Frames as uint8 [B, frames, size, size, 3]."""
    return (render_float(scenes, num_frames, size)[0] * 255.0).round().to(torch.uint8)
