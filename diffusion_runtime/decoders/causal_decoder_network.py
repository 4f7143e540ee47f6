"""The modules of a causal video decoder (Wan, arXiv:2503.20314) with its published tensor names: they hold the weights.

decoders/causal_decoder.py runs them, one latent frame after the other. The autoencoders of Wan 2.1 and 2.2 and of
Qwen-Image have this decoder; their config.json has the names of `DecoderSizes`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class DecoderSizes:
    """Sizes of a causal decoder. base_dim: channels before the multipliers. dim_mult: of every level, the finest first.
    doubles_frames: for every upsampling, the coarsest first, whether it doubles the frames as well. is_residual: the
    levels have a shortcut without weights around them (Wan 2.2). out_channels: of a patch of patch_size x patch_size
    pixels."""

    base_dim: int
    z_dim: int
    dim_mult: tuple[int, ...]
    num_res_blocks: int
    doubles_frames: tuple[bool, ...]
    out_channels: int = 3
    patch_size: int = 1
    is_residual: bool = False


class CausalVideoAutoencoder(nn.Module):
    """The decoding half of an autoencoder: `post_quant_conv` and `decoder`.

    class_name: of the published autoencoder, for the report. spatial_compression_ratio: pixels of a latent, a side.
    """

    def __init__(self, class_name: str, sizes: DecoderSizes, spatial_compression_ratio: int) -> None:
        super().__init__()
        self.class_name = class_name
        self.patch_size = sizes.patch_size
        self.spatial_compression_ratio = spatial_compression_ratio
        self.post_quant_conv = nn.Conv3d(sizes.z_dim, sizes.z_dim, 1)
        self.decoder = CausalDecoderNetwork(sizes)


class CausalDecoderNetwork(nn.Module):
    """From latents to patches of pixels: a middle block, then levels of residual blocks that upsample at their end."""

    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        widths = [sizes.base_dim * factor for factor in (sizes.dim_mult[-1], *reversed(sizes.dim_mult))]
        self.conv_in = nn.Conv3d(sizes.z_dim, widths[0], 3)
        self.mid_block = MiddleBlock(widths[0])
        self.up_blocks = nn.ModuleList()
        for level, (dim_in, dim_out) in enumerate(itertools.pairwise(widths)):
            doubles = sizes.doubles_frames[level] if level < len(sizes.dim_mult) - 1 else None
            if sizes.is_residual:
                self.up_blocks.append(ShortcutUpBlock(dim_in, dim_out, sizes.num_res_blocks, doubles))
            else:
                # The upsampler of the level before has halved the channels.
                self.up_blocks.append(
                    UpBlock(dim_in if level == 0 else dim_in // 2, dim_out, sizes.num_res_blocks, doubles)
                )
        self.norm_out = ChannelNorm(widths[-1], (1, 1, 1))
        self.conv_out = nn.Conv3d(widths[-1], sizes.out_channels, 3)


class ChannelNorm(nn.Module):
    """RMSNorm over the channels. gamma: [channels, 1, ..]."""

    def __init__(self, dim: int, positions: Sequence[int]) -> None:
        super().__init__()
        self.scale = dim**0.5
        self.gamma = nn.Parameter(torch.ones(dim, *positions))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise x [batch, channels, ..]. A pixel's length is summed in float32; the rest rounds to x's dtype."""
        normalized = F.normalize(x if x.dtype == torch.float32 else x.float(), dim=1).to(x.dtype)
        # The sum turns -0 into 0, as the norm's absent bias does in diffusers.
        out: torch.Tensor = normalized * self.scale * self.gamma + 0.0
        return out


class ResidualBlock(nn.Module):
    """Norm, SiLU and causal convolution, twice, and a shortcut that changes the channels."""

    def __init__(self, dim_in: int, dim_out: int) -> None:
        super().__init__()
        self.norm1 = ChannelNorm(dim_in, (1, 1, 1))
        self.conv1 = nn.Conv3d(dim_in, dim_out, 3)
        self.norm2 = ChannelNorm(dim_out, (1, 1, 1))
        self.conv2 = nn.Conv3d(dim_out, dim_out, 3)
        self.conv_shortcut = nn.Identity() if dim_in == dim_out else nn.Conv3d(dim_in, dim_out, 1)


class PixelAttention(nn.Module):
    """Attention with one head among the pixels of each frame."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = ChannelNorm(dim, (1, 1))
        self.to_qkv = nn.Conv2d(dim, 3 * dim, 1)
        self.proj = nn.Conv2d(dim, dim, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply attention to x [1, channels, frames, height, width]."""
        frames = x[0].transpose(0, 1).contiguous()
        qkv = self.to_qkv(self.norm(frames)).flatten(2).transpose(1, 2).contiguous()
        q, k, v = qkv[:, None].chunk(3, dim=-1)
        attended = F.scaled_dot_product_attention(q, k, v)
        projected = self.proj(attended[:, 0].transpose(1, 2).reshape(frames.shape))
        out: torch.Tensor = projected.transpose(0, 1)[None] + x
        return out


class MiddleBlock(nn.Module):
    """Two residual blocks with attention between them."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.resnets = nn.ModuleList([ResidualBlock(dim, dim), ResidualBlock(dim, dim)])
        self.attentions = nn.ModuleList([PixelAttention(dim)])


class Upsampler(nn.Module):
    """Upsampling to twice the height and width, then a convolution. mode: `upsample3d` doubles the frames first, by a
    convolution over frames whose outputs are two frames; `upsample2d` does not."""

    def __init__(self, dim: int, dim_out: int, *, doubles_frames: bool) -> None:
        super().__init__()
        self.mode = "upsample3d" if doubles_frames else "upsample2d"
        # Index 0 is the upsampling, which has no weights.
        self.resample = nn.Sequential(nn.Identity(), nn.Conv2d(dim, dim_out, 3))
        if doubles_frames:
            self.time_conv = nn.Conv3d(dim, 2 * dim, (3, 1, 1))


class UpBlock(nn.Module):
    """A level of Wan 2.1. doubles_frames: None for the last level, which does not upsample."""

    def __init__(self, dim_in: int, dim_out: int, num_res_blocks: int, doubles_frames: bool | None) -> None:
        super().__init__()
        self.resnets = _resnets(dim_in, dim_out, num_res_blocks)
        if doubles_frames is not None:
            upsampler = Upsampler(dim_out, dim_out // 2, doubles_frames=doubles_frames)
            self.upsamplers = nn.ModuleList([upsampler])


class ShortcutUpBlock(nn.Module):
    """A level of Wan 2.2. doubles_frames: as in UpBlock."""

    def __init__(self, dim_in: int, dim_out: int, num_res_blocks: int, doubles_frames: bool | None) -> None:
        super().__init__()
        self.resnets = _resnets(dim_in, dim_out, num_res_blocks)
        self.upsampler: Upsampler | None = None
        self.avg_shortcut: RepeatedChannels | None = None
        if doubles_frames is not None:
            self.upsampler = Upsampler(dim_out, dim_out, doubles_frames=doubles_frames)
            self.avg_shortcut = RepeatedChannels(dim_in, dim_out, frames_factor=2 if doubles_frames else 1)


class RepeatedChannels(nn.Module):
    """A shortcut without weights, of Duplication's shape (kernels/frame_upsampling)."""

    def __init__(self, dim_in: int, dim_out: int, *, frames_factor: int) -> None:
        super().__init__()
        self.factor_t = frames_factor
        self.repeats, left = divmod(dim_out * frames_factor * 4, dim_in)
        if left:
            raise ValueError(f"{dim_in} channels cannot be repeated to {dim_out * frames_factor * 4}")


def _resnets(dim_in: int, dim_out: int, num_res_blocks: int) -> nn.ModuleList:
    return nn.ModuleList(
        ResidualBlock(dim_in if index == 0 else dim_out, dim_out) for index in range(num_res_blocks + 1)
    )
