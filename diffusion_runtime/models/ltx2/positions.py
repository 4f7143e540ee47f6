"""LTX-2's rotary positions: real numbers on the clip's own scales, seconds and pixels, so that both streams share time.

A token is at the middle of its extent, as a fraction of the longest and widest clip (layers/rope.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from diffusion_runtime.core import config_fields
from diffusion_runtime.layers.rope import by_head, extent_paces, grid_extent_rotations, turned

# The audio autoencoder's steps in time and in mel bins; a constant of its architecture.
AUDIO_FACTOR = 4


@config_fields.config
class PositionRules:
    """Rules of rotary positions. theta: the quickest pace, as a multiple of the slowest. is_double: whether paces are
    computed in float64.

    causal_offset: frames that the first latent frame holds. factors: of the video's autoencoder, in frames, height and
    width. extents: seconds, and pixels of height and width, that count as 1. audio_factor: mel frames a latent;
    mel_rate: mel frames per second; audio_extent: seconds that count as 1.
    """

    theta: float = config_fields.number("rope_theta", 10000.0)
    is_double: bool = config_fields.flag("rope_double_precision", True)
    causal_offset: int = config_fields.whole_number("causal_offset", 1, minimum=0)
    factors: tuple[int, int, int]
    extents: tuple[int, int, int]
    audio_factor: int = config_fields.whole_number("audio_scale_factor", AUDIO_FACTOR)
    hop_length: int = config_fields.whole_number("audio_hop_length", 160)
    sampling_rate: int = config_fields.whole_number("audio_sampling_rate", 16000)
    audio_extent: int = config_fields.whole_number("audio_pos_embed_max_pos", 20)

    @property
    def shared_extent(self) -> int:
        """Seconds that count as 1 where the streams attend to each other."""
        return max(self.extents[0], self.audio_extent)


def video_rotations(
    rules: PositionRules, grid: tuple[int, int, int], fps: int, num_heads: int, dim: int, device: torch.device
) -> torch.Tensor:
    """Return unit complex numbers [tokens, heads, head_dim / 2], complex64, for a video's tokens in raster order.

    dim: of all heads.
    """
    middles = (_frame_middles(rules, grid[0], fps), *(_middles(grid[axis], rules.factors[axis]) for axis in (1, 2)))
    paces = extent_paces(rules.theta, dim, 3, is_double=rules.is_double)
    return grid_extent_rotations(middles, rules.extents, paces, num_heads, dim, device)


def audio_rotations(rules: PositionRules, length: int, num_heads: int, dim: int, device: torch.device) -> torch.Tensor:
    """Return the same for the sound's tokens."""
    paces = extent_paces(rules.theta, dim, 1, is_double=rules.is_double)
    return by_head(turned(_audio_middles(rules, length), rules.audio_extent, paces), num_heads, dim).to(device)


def shared_rotations(
    rules: PositionRules,
    grid: tuple[int, int, int],
    fps: int,
    length: int,
    num_heads: int,
    dim: int,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rotations of the video's tokens and of the sound's, in time alone: for attention between the two."""
    paces = extent_paces(rules.theta, dim, 1, is_double=rules.is_double)
    video = turned(_frame_middles(rules, grid[0], fps), rules.shared_extent, paces)
    audio = turned(_audio_middles(rules, length), rules.shared_extent, paces)
    video = by_head(video, num_heads, dim).to(device).repeat_interleave(grid[1] * grid[2], dim=0)
    return video, by_head(audio, num_heads, dim).to(device)


def keyframe_rotations(
    rules: PositionRules,
    grid: tuple[int, int, int],
    frames: Sequence[int],
    fps: int,
    heads: tuple[int, int],
    shared_heads: tuple[int, int],
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rotations of the tokens of pictures that are a frame of the video each, and not a latent of several.
    heads, shared_heads: (number, width of all) within the video, and where the streams attend to each other."""
    moments = torch.tensor([frame + 0.5 for frame in frames]) / fps
    middles = (moments, *(_middles(grid[axis], rules.factors[axis]) for axis in (1, 2)))
    paces = extent_paces(rules.theta, heads[1], 3, is_double=rules.is_double)
    within = grid_extent_rotations(middles, rules.extents, paces, *heads, device)
    paces = extent_paces(rules.theta, shared_heads[1], 1, is_double=rules.is_double)
    between = by_head(turned(moments, rules.shared_extent, paces), *shared_heads).to(device)
    return within, between.repeat_interleave(grid[1] * grid[2], dim=0)


def _middles(num_latents: int, factor: int) -> torch.Tensor:
    starts = torch.arange(num_latents, dtype=torch.float32)
    return (starts * factor + (starts + 1) * factor) / 2


def _frame_middles(rules: PositionRules, num_frames: int, fps: int) -> torch.Tensor:
    """Return the middle of each latent frame, in seconds. The first one covers causal_offset frames, the others the
    factor's number."""
    starts = torch.arange(num_frames, dtype=torch.float32)
    bounds = torch.stack([starts, starts + 1]) * rules.factors[0]
    bounds = (bounds + rules.causal_offset - rules.factors[0]).clamp(min=0) / fps
    return (bounds[0] + bounds[1]) / 2


def _audio_middles(rules: PositionRules, length: int) -> torch.Tensor:
    """Return the middle of each moment of the sound, in seconds."""
    starts = torch.arange(length, dtype=torch.float32)
    bounds = torch.stack([starts, starts + 1]) * rules.audio_factor
    bounds = (bounds + rules.causal_offset - rules.audio_factor).clamp(min=0)
    bounds = bounds * rules.hop_length / rules.sampling_rate
    return (bounds[0] + bounds[1]) / 2
