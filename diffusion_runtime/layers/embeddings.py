"""What goes into and comes out of a transformer: patches, timesteps, text."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from diffusion_runtime.layers.feed_forward import FeedForward
from diffusion_runtime.layers.linear import Linear

MAX_PERIOD = 10000.0


def patchify(latents: torch.Tensor, patch: tuple[int, int, int]) -> torch.Tensor:
    """[batch, channels, frames, height, width] to tokens in raster order,
    [batch, tokens, channels * patch frames * patch height * patch width]."""
    batch, channels = latents.shape[:2]
    frames, height, width = (size // side for size, side in zip(latents.shape[2:], patch, strict=True))
    blocks = latents.reshape(batch, channels, frames, patch[0], height, patch[1], width, patch[2])
    return blocks.permute(0, 2, 4, 6, 1, 3, 5, 7).reshape(batch, frames * height * width, -1)


def unpatchify(tokens: torch.Tensor, grid: tuple[int, int, int], patch: tuple[int, int, int]) -> torch.Tensor:
    """Tokens [batch, tokens, patch frames * patch height * patch width * channels] of a grid, in raster order, to
    [batch, channels, frames, height, width]. Channels come last in a token here, and first in `patchify`."""
    blocks = tokens.reshape(tokens.shape[0], *grid, *patch, -1)
    return blocks.permute(0, 7, 1, 4, 2, 5, 3, 6).flatten(6, 7).flatten(4, 5).flatten(2, 3)


class PatchEmbedding(nn.Module):
    """A linear map of every patch of latents; what a convolution with stride equal to its kernel computes."""

    def __init__(self, num_channels: int, dim: int, patch: tuple[int, int, int]) -> None:
        super().__init__()
        self.patch = patch
        self.projection = Linear(num_channels * math.prod(patch), dim)

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        """[batch, channels, frames, height, width] to [batch, tokens, dim]."""
        tokens: torch.Tensor = self.projection(patchify(latents, self.patch))
        return tokens


def timestep_waves(timestep: torch.Tensor, num_channels: int) -> torch.Tensor:
    """[batch] to float32 [batch, channels]: cosines, then sines, of the timestep at periods from 2 pi to
    2 pi * MAX_PERIOD (Vaswani et al., arXiv:1706.03762)."""
    half = num_channels // 2
    exponents = torch.arange(half, dtype=torch.float32, device=timestep.device) / half
    angles = timestep[:, None].float() * torch.exp(-math.log(MAX_PERIOD) * exponents)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class TimestepEmbedding(nn.Module):
    """Waves of the timestep through a two-layer network, in the dtype of its weights."""

    def __init__(self, num_waves: int, dim: int) -> None:
        super().__init__()
        self.num_waves = num_waves
        self.up = Linear(num_waves, dim)
        self.down = Linear(dim, dim)

    def forward(self, timestep: torch.Tensor) -> torch.Tensor:
        """[batch] to [batch, dim]."""
        waves = timestep_waves(timestep, self.num_waves).to(self.up.weight.dtype)
        embedded: torch.Tensor = self.down(F.silu(self.up(waves)))
        return embedded


class TextEmbedding(FeedForward):
    """The text encoder's tokens, taken to the transformer's width by a two-layer network."""

    def __init__(self, text_dim: int, dim: int) -> None:
        super().__init__(text_dim, dim, dim)
