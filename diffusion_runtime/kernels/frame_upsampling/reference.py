"""The specification of upsampling, in torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Duplication:
    """Layout by which a shortcut without weights fills a larger video (DupUp3D of the Wan 2.2 autoencoder).

    Each channel is repeated `repeats` times; the copies are then dealt out to frames_factor frames, 2 rows and 2
    columns. num_dropped: leading frames to leave out, those before the first frame of a video.
    """

    frames_factor: int
    repeats: int
    num_dropped: int = 0


def upsample_channels_first(x: torch.Tensor, is_interleaved: bool) -> torch.Tensor:
    """Implement api.upsample_channels_first in torch."""
    _, channels, frames, height, width = x.shape
    by_frame = x[0].transpose(0, 1)
    if is_interleaved:
        by_frame = by_frame.reshape(2 * frames, channels // 2, height, width)
    return by_frame.repeat_interleave(2, dim=3).repeat_interleave(2, dim=2)


def upsample_channels_last(
    x: torch.Tensor, is_interleaved: bool, bias: torch.Tensor | None, residual: torch.Tensor | None
) -> torch.Tensor:
    """Implement api.upsample_channels_last in torch."""
    value = x if bias is None else x + bias
    if residual is not None:
        value = value + residual
    if is_interleaved:
        frames, height, width, channels = x.shape
        value = value.view(frames, height, width, 2, channels // 2).permute(0, 3, 1, 2, 4).flatten(0, 1)
    return value.repeat_interleave(2, dim=2).repeat_interleave(2, dim=1)


def duplicate(source: torch.Tensor, channels: int, duplication: Duplication) -> torch.Tensor:
    """source: [channels', frames', height, width]. Returns [frames, channels, 2 * height, 2 * width]."""
    factor = duplication.frames_factor
    _, frames, height, width = source.shape
    copies = source.repeat_interleave(duplication.repeats, dim=0).view(channels, factor, 2, 2, frames, height, width)
    dealt = copies.permute(4, 1, 0, 5, 2, 6, 3).reshape(frames * factor, channels, 2 * height, 2 * width)
    return dealt[duplication.num_dropped :]


def add_duplicated_channels_first(x: torch.Tensor, source: torch.Tensor, duplication: Duplication) -> torch.Tensor:
    """Implement api.add_duplicated_channels_first in torch."""
    return x.add_(duplicate(source[0], x.shape[1], duplication))


def add_duplicated_channels_last(
    x: torch.Tensor, source: torch.Tensor, duplication: Duplication, bias: torch.Tensor | None
) -> torch.Tensor:
    """Implement api.add_duplicated_channels_last in torch."""
    value = x if bias is None else x + bias
    added = duplicate(source.permute(3, 0, 1, 2), x.shape[3], duplication).permute(0, 2, 3, 1)
    return x.copy_(value + added)
