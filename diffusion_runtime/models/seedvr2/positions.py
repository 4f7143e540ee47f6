"""Rotary positions within a window (RoPE): neighbouring channels (2i, 2i + 1) turn together; a third of those that turn
for each of frames, rows and columns, and what a third leaves over does not turn.

The positions of the 3B model are whole numbers that begin behind those of the text along frames, and the text has the
same position on every axis (MM-RoPE). Those of the 7B model are parts of the window, from -1 to 1, and the text has
none.
"""

from __future__ import annotations

import math

import torch

from diffusion_runtime.core.token_layout import Extent
from diffusion_runtime.models.seedvr2.windows import WindowGroup

_NUM_AXES = 3
_THETA = 10000.0
# Turns of a window's half that the quickest channel makes, times 2.
_MAX_FREQUENCY = 256.0


def joint_paces(head_dim: int) -> torch.Tensor:
    """Return the radians of a position of each pair of channels of an axis, float64."""
    dim = head_dim // _NUM_AXES
    return _THETA ** -(torch.arange(dim // 2, dtype=torch.float64) * 2 / dim)


def window_paces(head_dim: int) -> torch.Tensor:
    """Return the radians from the middle of a window to its end of each pair of channels of an axis, float64."""
    dim = head_dim // 2 // _NUM_AXES
    return torch.linspace(1.0, _MAX_FREQUENCY / 2, dim // 2, dtype=torch.float64) * math.pi


def text_rotations(num_tokens: int, head_dim: int, device: torch.device) -> torch.Tensor:
    """Return the rotations of the text of the 3B model, complex64 [tokens, head_dim / 2]."""
    if device.type == "meta":
        return torch.empty(num_tokens, head_dim // 2, dtype=torch.complex64, device=device)
    angles = torch.outer(torch.arange(num_tokens, dtype=torch.float64), joint_paces(head_dim))
    return _as_numbers(angles.repeat(1, _NUM_AXES), head_dim).to(device)


def rotations_of_window(shape: Extent, head_dim: int, num_text_tokens: int | None) -> torch.Tensor:
    """Return the rotations of the tokens of a window in raster order, complex64 [tokens, head_dim / 2], on the CPU.
    num_text_tokens: before the first frame, of the 3B model; None for parts of the window, of the 7B model."""
    if num_text_tokens is None:
        paces = window_paces(head_dim)
        axes = [torch.linspace(-1.0, 1.0, length, dtype=torch.float64) for length in shape]
    else:
        paces = joint_paces(head_dim)
        axes = [torch.arange(length, dtype=torch.float64) for length in shape]
        axes[0] += num_text_tokens
    angles = [
        torch.outer(axis, paces).view(*(length if place == index else 1 for index, length in enumerate(shape)), -1)
        for place, (axis, length) in enumerate(zip(axes, shape, strict=True))
    ]
    whole = torch.cat([each.expand(*shape, -1) for each in angles], dim=-1)
    return _as_numbers(whole.flatten(0, 2), head_dim)


def rotations_of_groups(groups: list[WindowGroup], head_dim: int, num_text_tokens: int | None) -> torch.Tensor:
    """Return the rotations of the tokens of all windows, group after group."""
    return torch.cat(
        [rotations_of_window(group.shape, head_dim, num_text_tokens).repeat(group.number, 1) for group in groups]
    )


def _as_numbers(angles: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return unit numbers of angles [tokens, pairs] for the pairs of a head; those that are left over do not turn."""
    left = head_dim // 2 - angles.shape[1]
    whole = torch.cat([angles, angles.new_zeros(angles.shape[0], left)], dim=1)
    return torch.polar(torch.ones_like(whole), whole).to(torch.complex64)
