"""LTX-2's rotary positions: real numbers on the clip's own scales, seconds and pixels, so that both streams share time.

A token is at the middle of what it covers, as a part of the longest and widest clip there is. Every pair of channels of
the whole width turns at a pace of its own, so that no two heads turn alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PositionRules:
    """theta: the quickest pace, as a multiple of the slowest. is_double: whether paces are computed in float64.

    causal_offset: frames that the first latent frame holds. factors: of the video's autoencoder, in frames, height and
    width. extents: what counts as 1: seconds, and pixels of height and width. audio_factor: mel frames a latent;
    mel_rate: mel frames per second; audio_extent: seconds that count as 1.
    """

    theta: float
    is_double: bool
    causal_offset: int
    factors: tuple[int, int, int]
    extents: tuple[int, int, int]
    audio_factor: int
    hop_length: int
    sampling_rate: int
    audio_extent: int

    @property
    def shared_extent(self) -> int:
        """What counts as 1 where the streams attend to each other."""
        return max(self.extents[0], self.audio_extent)


def video_rotations(
    rules: PositionRules, grid: tuple[int, int, int], fps: int, num_heads: int, dim: int, device: torch.device
) -> torch.Tensor:
    """Unit complex numbers [tokens, heads, head_dim / 2], complex64, for a video's tokens in raster order.

    dim: of all heads.
    """
    middles = (_frame_middles(rules, grid[0], fps), *(_middles(grid[axis], rules.factors[axis]) for axis in (1, 2)))
    paces = _paces(rules, dim, num_axes=3)
    tables = [_turned(middle, extent, paces) for middle, extent in zip(middles, rules.extents, strict=True)]
    whole = torch.stack(
        [
            table.view(*(size if place == axis else 1 for place, size in enumerate(grid)), -1).expand(*grid, -1)
            for axis, table in enumerate(tables)
        ],
        dim=-1,
    )
    return _by_head(whole.flatten(3).flatten(0, 2), num_heads, dim).to(device)


def audio_rotations(rules: PositionRules, length: int, num_heads: int, dim: int, device: torch.device) -> torch.Tensor:
    """The same for the sound's tokens."""
    turned = _turned(_audio_middles(rules, length), rules.audio_extent, _paces(rules, dim, num_axes=1))
    return _by_head(turned, num_heads, dim).to(device)


def shared_rotations(
    rules: PositionRules,
    grid: tuple[int, int, int],
    fps: int,
    length: int,
    num_heads: int,
    dim: int,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the video's tokens and of the sound's, in time alone: for attention between the two."""
    paces = _paces(rules, dim, num_axes=1)
    video = _turned(_frame_middles(rules, grid[0], fps), rules.shared_extent, paces)
    audio = _turned(_audio_middles(rules, length), rules.shared_extent, paces)
    video = _by_head(video, num_heads, dim).to(device).repeat_interleave(grid[1] * grid[2], dim=0)
    return video, _by_head(audio, num_heads, dim).to(device)


def _middles(num_latents: int, factor: int) -> torch.Tensor:
    starts = torch.arange(num_latents, dtype=torch.float32)
    return (starts * factor + (starts + 1) * factor) / 2


def _frame_middles(rules: PositionRules, num_frames: int, fps: int) -> torch.Tensor:
    """Seconds. The first latent frame covers causal_offset frames, the others as many as the factor says."""
    starts = torch.arange(num_frames, dtype=torch.float32)
    bounds = torch.stack([starts, starts + 1]) * rules.factors[0]
    bounds = (bounds + rules.causal_offset - rules.factors[0]).clamp(min=0) / fps
    return (bounds[0] + bounds[1]) / 2


def _audio_middles(rules: PositionRules, length: int) -> torch.Tensor:
    """Seconds."""
    starts = torch.arange(length, dtype=torch.float32)
    bounds = torch.stack([starts, starts + 1]) * rules.audio_factor
    bounds = (bounds + rules.causal_offset - rules.audio_factor).clamp(min=0)
    bounds = bounds * rules.hop_length / rules.sampling_rate
    return (bounds[0] + bounds[1]) / 2


def _paces(rules: PositionRules, dim: int, num_axes: int) -> torch.Tensor:
    """Radians from the middle of an extent to its end, from a quarter turn to theta quarter turns; float32."""
    dtype = torch.float64 if rules.is_double else torch.float32
    exponents = torch.linspace(0.0, 1.0, dim // (2 * num_axes), dtype=dtype)
    return (torch.pow(rules.theta, exponents) * torch.pi / 2).float()


def _turned(middles: torch.Tensor, extent: int, paces: torch.Tensor) -> torch.Tensor:
    """Unit complex numbers [positions, paces].

    The angles are rounded to float32, as they were in training: at thousands of radians that moves the quickest
    channels, and the weights know them so.
    """
    angles = (middles / extent * 2 - 1)[:, None] * paces
    return torch.complex(angles.cos(), angles.sin())


def _by_head(turned: torch.Tensor, num_heads: int, dim: int) -> torch.Tensor:
    """[tokens, pairs] to [tokens, heads, head_dim / 2]. Pairs that the paces do not fill come first and do not turn."""
    still = turned.new_ones(turned.shape[0], dim // 2 - turned.shape[1])
    return torch.cat([still, turned], dim=1).view(turned.shape[0], num_heads, -1)
