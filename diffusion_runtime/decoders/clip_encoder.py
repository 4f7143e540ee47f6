"""Encoder of clips to latents: a causal network of 3D convolutions (MiniMax-H3), with its published tensor names.

A clip of a fixed number of frames is encoded by itself, in tiles as the decoder's; a single image as one latent frame.
Before the first frame there are zeros, beyond the sides the reflected image; group norms are of each frame.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from diffusion_runtime.decoders.sample_decoder import Tiling
from diffusion_runtime.decoders.vit_video_decoder import axes_of_tiles, join_tiles

_KERNEL = 3


@dataclass(frozen=True)
class ClipEncoderSizes:
    """Sizes of the network. widths, side_factors, frame_factors: of every level. num_blocks: residual blocks of
    each. clip_length: frames that are encoded at once; num_dropped: latent frames that are dropped at the end."""

    latent_channels: int
    widths: tuple[int, ...]
    num_blocks: int
    side_factors: tuple[int, ...]
    frame_factors: tuple[int, ...]
    num_groups: int
    eps: float
    clip_length: int
    num_dropped: int


class ClipEncoder(nn.Module):
    """The encoding half of an autoencoder: `encoder` and `quant_conv`."""

    def __init__(self, sizes: ClipEncoderSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.encoder = ClipEncoderNetwork(sizes)
        self.quant_conv = nn.Conv3d(2 * sizes.latent_channels, 2 * sizes.latent_channels, 1)

    def encode(self, pixels: torch.Tensor, tiling: Tiling) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean and deviation of the latents, [1, channels, latent frames, height, width].

        pixels: normalised, [1, 3, frames, height, width]; the last frame is repeated to whole clips.
        """
        length, frames = self.sizes.clip_length, pixels.shape[2]
        if frames == 1:
            moments = self._clip(pixels, tiling)
        else:
            lacking = -frames % length
            pixels = torch.cat([pixels, pixels[:, :, -1:].expand(-1, -1, lacking, -1, -1)], dim=2)
            clips = [self._clip(clip, tiling) for clip in torch.split(pixels, length, dim=2)]
            moments = torch.cat(clips, dim=2)
            moments = moments[:, :, : moments.shape[2] - self.sizes.num_dropped]
        mean, log_variance = moments.chunk(2, dim=1)
        return mean, log_variance.clamp(-30.0, 20.0).mul(0.5).exp_()

    def _clip(self, pixels: torch.Tensor, tiling: Tiling) -> torch.Tensor:
        side = tiling.pixels
        rows, columns = axes_of_tiles([each // side for each in pixels.shape[-2:]], tiling)
        of_rows, of_columns = rows.times(side), columns.times(side)

        def tiles() -> Iterator[torch.Tensor]:
            for top in of_rows.starts:
                for left in of_columns.starts:
                    tile = pixels[..., top : top + of_rows.size, left : left + of_columns.size]
                    yield self.quant_conv(self.encoder(tile))[0]

        found = list(tiles())
        channels, frames = found[0].shape[:2]
        out = found[0].new_empty(1, channels, frames, pixels.shape[-2] // side, pixels.shape[-1] // side)
        join_tiles(iter(found), rows, columns, out)
        return out


class ClipEncoderNetwork(nn.Module):
    """Levels of residual blocks that make frames and sides smaller at their end."""

    def __init__(self, sizes: ClipEncoderSizes) -> None:
        super().__init__()
        widths = (sizes.widths[0], *sizes.widths)
        factors = zip(sizes.frame_factors, sizes.side_factors, strict=True)
        self.conv_in = CausalConvolution(3, widths[0], padding=1)
        self.down_blocks = nn.ModuleList(
            DownBlock(widths[level], widths[level + 1], each, sizes) for level, each in enumerate(factors)
        )
        self.norm_out = FrameNorm(sizes.num_groups, widths[-1], sizes.eps)
        self.conv_out = CausalConvolution(widths[-1], 2 * sizes.latent_channels, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[1, 3, frames, height, width] to [1, 2 * latent channels, latent frames, ..]."""
        x = self.conv_in(x)
        for block in self.down_blocks:
            x = block(x)
        out: torch.Tensor = self.conv_out(self.norm_out(x))
        return out


class DownBlock(nn.Module):
    """A level. factors: of frames and of sides, by which it makes them smaller."""

    def __init__(self, dim_in: int, dim_out: int, factors: tuple[int, int], sizes: ClipEncoderSizes) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(
            ResidualBlock(dim_in if index == 0 else dim_out, dim_out, sizes) for index in range(sizes.num_blocks)
        )
        frames, side = factors
        self.halves = side == 2
        self.downsamplers = nn.ModuleList(
            [nn.ModuleDict({"conv": CausalConvolution(dim_out, dim_out, stride=(frames, side, side))})]
            if frames * side > 1
            else []
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[1, dim_in, frames, height, width] to [1, dim_out, ..]."""
        for block in self.resnets:
            x = block(x)
        downsamplers: Any = self.downsamplers
        for each in downsamplers:
            x = each["conv"](F.pad(x, (0, 1, 0, 1, 0, 0), mode="reflect") if self.halves else x)
        return x


class ResidualBlock(nn.Module):
    """Norm, SiLU and convolution, twice, and a shortcut that changes the channels."""

    def __init__(self, dim_in: int, dim_out: int, sizes: ClipEncoderSizes) -> None:
        super().__init__()
        self.norm1 = FrameNorm(sizes.num_groups, dim_in, sizes.eps)
        self.conv1 = CausalConvolution(dim_in, dim_out, padding=1)
        self.norm2 = FrameNorm(sizes.num_groups, dim_out, sizes.eps)
        self.conv2 = CausalConvolution(dim_out, dim_out, padding=1)
        self.conv_shortcut = nn.Identity() if dim_in == dim_out else nn.Conv3d(dim_in, dim_out, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[1, dim_in, frames, height, width] to [1, dim_out, ..]."""
        out: torch.Tensor = self.conv2(self.norm2(self.conv1(self.norm1(x)))).add_(self.conv_shortcut(x))
        return out


class CausalConvolution(nn.Conv3d):
    """Convolution over a frame and the two before it. padding: reflected pixels on every side."""

    def __init__(
        self, dim_in: int, dim_out: int, *, stride: tuple[int, int, int] = (1, 1, 1), padding: int = 0
    ) -> None:
        super().__init__(dim_in, dim_out, _KERNEL, stride=stride)
        self.num_reflected = padding

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[1, dim_in, frames, height, width] to [1, dim_out, ..]."""
        if pad := self.num_reflected:
            x = F.pad(x, (pad, pad, pad, pad, 0, 0), mode="reflect")
        if x.shape[2] == 1:
            # The other taps meet zeros.
            return F.conv2d(x[:, :, 0], self.weight[:, :, -1], self.bias, self.stride[1:])[:, :, None]
        return F.conv3d(F.pad(x, (0, 0, 0, 0, _KERNEL - 1, 0)), self.weight, self.bias, self.stride)


class FrameNorm(nn.GroupNorm):
    """Group norm of every frame by itself (Wu and He, arXiv:1803.08494), then SiLU."""

    def __init__(self, num_groups: int, channels: int, eps: float) -> None:
        super().__init__(num_groups, channels, eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[1, channels, frames, height, width] to a new tensor like it."""
        frames = F.group_norm(x[0].transpose(0, 1), self.num_groups, self.weight, self.bias, self.eps)
        return F.silu(frames, inplace=True).transpose(0, 1)[None]
