"""Renders scenes to pixels: anti-aliased, vectorised over the batch, the same code on CPU and CUDA."""

from __future__ import annotations

import torch
from torch import Tensor

from diffusion_runtime.quality.shapes.attributes import BACKGROUND_NAMES, COLOURS
from diffusion_runtime.quality.shapes.scene import MAX_OBJECTS, SceneBatch
from diffusion_runtime.quality.shapes.signed_distance import coverage


def render_float(scenes: SceneBatch, num_frames: int, size: int, centre: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Frames [B, frames, size, size, 3] in 0 to 1 and the objects' coverage [B, frames, size, size] in 0 to 1."""
    frames, covered = render_slots(scenes, num_frames, size, centre)
    return frames, covered.amax(dim=1)


def render_slots(scenes: SceneBatch, num_frames: int, size: int, centre: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Frames [B, frames, size, size, 3] in 0 to 1 and each object's own coverage [B, 2, frames, size, size] in 0 to 1.

    centre: where the objects are in each frame (x, y), [B, frames, 2, 2], half-sides (`trajectories.py`). Without it
    motion is uniform over the clip, and a single frame shows its middle. Frames are square, `size` pixels per side.
    """
    device = scenes.start.device
    pixel = 2.0 / size
    axis = (torch.arange(size, device=device, dtype=torch.float32) + 0.5) * pixel - 1.0
    y, x = axis[:, None], axis[None, :]
    if centre is None:
        centre = _uniform_motion(scenes, num_frames)
    palette = torch.tensor(list(COLOURS.values()), device=device, dtype=torch.float32) / 255.0
    frames = _background(scenes, x, y, pixel)[:, None]
    covered = []
    for slot in range(MAX_OBJECTS):
        alpha = coverage(
            scenes.shape[:, slot, None, None, None],
            x - centre[:, :, slot, 0, None, None],
            y - centre[:, :, slot, 1, None, None],
            scenes.radius[:, slot, None, None, None],
            pixel,
        )
        alpha = alpha * (scenes.num_objects > slot)[:, None, None, None]
        colour = palette[scenes.colour[:, slot]][:, None, None, None]
        frames = frames + alpha[..., None] * (colour - frames)
        covered.append(alpha)
    return frames, torch.stack(covered, dim=1)


def _uniform_motion(scenes: SceneBatch, num_frames: int) -> Tensor:
    """Centres [B, frames, 2, 2] from `start` on, with the whole `travel` at the last frame."""
    device = scenes.start.device
    time = (
        torch.linspace(0.0, 1.0, num_frames, device=device) if num_frames > 1 else torch.full((1,), 0.5, device=device)
    )
    return scenes.start[:, None] + time[None, :, None, None] * scenes.travel[:, None]


def render(scenes: SceneBatch, num_frames: int, size: int, centre: Tensor | None = None) -> Tensor:
    """Frames as uint8 [B, frames, size, size, 3]."""
    frames, _ = render_float(scenes, num_frames, size, centre)
    return (frames * 255.0).round().to(torch.uint8)


def _background(scenes: SceneBatch, x: Tensor, y: Tensor, pixel: float) -> Tensor:
    """[B, size, size, 3] in 0 to 1: the first tone mixed with the second by the share that the pattern gives."""
    kind = scenes.background[:, None, None]
    vertical = scenes.vertical[:, None, None]
    period = scenes.period[:, None, None]
    wave_x = _square_wave(x[None], period, scenes.phase[:, 0, None, None], pixel)
    wave_y = _square_wave(y[None], period, scenes.phase[:, 1, None, None], pixel)
    ramp_x, ramp_y = (x[None] + 1) / 2, (y[None] + 1) / 2
    share = torch.zeros_like(wave_x * wave_y)
    stripes = torch.where(vertical, wave_y, wave_x)
    share = torch.where(kind == BACKGROUND_NAMES.index("stripes"), (stripes + 1) / 2, share)
    share = torch.where(kind == BACKGROUND_NAMES.index("checker"), (wave_x * wave_y + 1) / 2, share)
    share = torch.where(kind == BACKGROUND_NAMES.index("gradient"), torch.where(vertical, ramp_y, ramp_x), share)
    first, second = scenes.tones[:, None, None, 0], scenes.tones[:, None, None, 1]
    return first + share[..., None] * (second - first)


def _square_wave(position: Tensor, period: Tensor, phase: Tensor, pixel: float) -> Tensor:
    """A square wave between -1 and 1 whose edges are one pixel wide; half a period up, half a period down."""
    cycle = torch.remainder(position / period + phase, 1.0)
    to_edge = (0.25 - (cycle - 0.5).abs()) * period
    return (2 * to_edge / pixel).clamp(-1.0, 1.0)
