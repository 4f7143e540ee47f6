"""Causal autoencoder of videos whose convolutions begin with copies of the first frame (SeedVR2, arXiv:2506.05301),
with its published tensor names: encoder and decoder.

A latent frame is four frames, the first one a single frame. Every convolution over frames reads those before, of the
first frame two copies; group norms are of each frame by itself, and so is the attention in the middle. So a clip is
encoded and decoded piece by piece to what it would be at once: `History` holds the frames that the next piece reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from diffusion_runtime.decoders.clip_encoder import FrameNorm
from diffusion_runtime.decoders.sample_decoder import SampleDecoder, Tiling
from diffusion_runtime.decoders.vit_video_decoder import axes_of_tiles, join_tiles
from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.parallel.collectives import RankGroup

_EPS = 1e-6
# Of the input or output of a convolution: cuDNN's kernels count with 32 bits, and torch's own, which it falls back to,
# unfolds all of its input.
MAX_NUMBERS = 2**31 - 1


@dataclass(frozen=True)
class ReplicatingSizes:
    """Sizes of the network. widths: of every level, the finest first. num_blocks: residual blocks of a level of the
    encoder; the decoder has one more. num_halvings: levels that make frames fewer, the last ones but the coarsest."""

    latent_channels: int
    widths: tuple[int, ...]
    num_blocks: int
    num_groups: int
    num_halvings: int

    @property
    def frames_factor(self) -> int:
        return int(2**self.num_halvings)

    def halves_frames(self, level: int) -> bool:
        """Return whether a level, from the finest, has half of its frames behind it."""
        return len(self.widths) - 1 - self.num_halvings <= level < len(self.widths) - 1


class History:
    """Frames that convolutions have read of the pieces of a clip so far, by convolution. `is_first` until a piece has
    been read."""

    def __init__(self) -> None:
        self.frames: dict[nn.Module, torch.Tensor] = {}
        self.is_first = True

    def before(self, convolution: nn.Module, x: torch.Tensor, count: int, kept: int) -> torch.Tensor:
        """Return x behind the frames that the convolution read before, or `count` copies of its first one; keep the
        last `kept` for the next piece. x: [1, channels, frames, height, width]."""
        found = self.frames.get(convolution)
        if found is None:
            found = x[:, :, :1].expand(-1, -1, count, -1, -1)
        whole = torch.cat([found, x], dim=2)
        # Of its own: the rest of the piece can go.
        self.frames[convolution] = whole[:, :, whole.shape[2] - kept :].clone()
        return whole


class CausalConvolution(nn.Conv3d):
    """Convolution over a frame and the ones before it. side: of the kernel; padding: zeros on every side."""

    def __init__(
        self,
        dim_in: int,
        dim_out: int,
        *,
        num_taps: int = 3,
        side: int = 3,
        stride: tuple[int, int, int] = (1, 1, 1),
        padding: int = 1,
    ) -> None:
        super().__init__(dim_in, dim_out, (num_taps, side, side), stride, (0, padding, padding))

    def forward(self, x: torch.Tensor, history: History) -> torch.Tensor:  # type: ignore[override]
        """[1, dim_in, frames, height, width] to [1, dim_out, ..]."""
        num_taps = self.kernel_size[0]
        if num_taps > 1:
            x = history.before(self, x, num_taps - 1, num_taps - self.stride[0])
        numbers = max(self.in_channels, self.out_channels) * x.shape[2] * x.shape[3] * x.shape[4]
        return super().forward(x) if numbers <= MAX_NUMBERS else self._in_bands(x, -(-numbers // MAX_NUMBERS))

    def _in_bands(self, x: torch.Tensor, number: int) -> torch.Tensor:
        """Compute bands of rows one after the other, each with the rows that it reads of its neighbours."""
        side, step, padding = self.kernel_size[1], self.stride[1], int(self.padding[1])
        x = F.pad(x, (padding,) * 4)
        height = (x.shape[3] - side) // step + 1
        size = -(-height // number)
        bands = [
            F.conv3d(x[:, :, :, start * step : (stop - 1) * step + side], self.weight, self.bias, self.stride)
            for start in range(0, height, size)
            for stop in [min(start + size, height)]
        ]
        return torch.cat(bands, dim=3)


class ResidualBlock(nn.Module):
    """Norm, SiLU and convolution, twice, and a shortcut that changes the channels."""

    def __init__(self, dim_in: int, dim_out: int, num_groups: int) -> None:
        super().__init__()
        self.norm1 = FrameNorm(num_groups, dim_in, _EPS)
        self.conv1 = CausalConvolution(dim_in, dim_out)
        self.norm2 = FrameNorm(num_groups, dim_out, _EPS)
        self.conv2 = CausalConvolution(dim_out, dim_out)
        self.conv_shortcut = nn.Identity() if dim_in == dim_out else nn.Conv3d(dim_in, dim_out, 1)

    def forward(self, x: torch.Tensor, history: History) -> torch.Tensor:
        """[1, dim_in, frames, height, width] to [1, dim_out, ..]."""
        hidden = self.conv1(self.norm1(x), history)
        out: torch.Tensor = self.conv2(self.norm2(hidden), history).add_(self.conv_shortcut(x))
        return out


class FrameAttention(nn.Module):
    """Attention with one head among the pixels of each frame, after a group norm."""

    def __init__(self, dim: int, num_groups: int) -> None:
        super().__init__()
        self.group_norm = nn.GroupNorm(num_groups, dim, _EPS)
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, dim) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(dim, dim)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[1, channels, frames, height, width] to a new tensor like it."""
        frames = x[0].transpose(0, 1)
        pixels = self.group_norm(frames.flatten(2)).transpose(1, 2)
        q, k, v = (layer(pixels)[:, None] for layer in (self.to_q, self.to_k, self.to_v))
        attended = self.to_out[0](F.scaled_dot_product_attention(q, k, v)[:, 0])
        out: torch.Tensor = attended.transpose(1, 2).reshape(frames.shape).transpose(0, 1)[None] + x
        return out


class MiddleBlock(nn.Module):
    """Two residual blocks with attention between them."""

    def __init__(self, dim: int, num_groups: int) -> None:
        super().__init__()
        self.resnets = nn.ModuleList([ResidualBlock(dim, dim, num_groups) for _ in range(2)])
        self.attentions = nn.ModuleList([FrameAttention(dim, num_groups)])

    def forward(self, x: torch.Tensor, history: History) -> torch.Tensor:
        """[1, channels, frames, height, width] to a new tensor like it."""
        out: torch.Tensor = self.resnets[1](self.attentions[0](self.resnets[0](x, history)), history)
        return out


class Level(nn.Module):
    """Residual blocks of one size."""

    def __init__(self, dim_in: int, dim_out: int, num_blocks: int, num_groups: int) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(
            ResidualBlock(dim_in if index == 0 else dim_out, dim_out, num_groups) for index in range(num_blocks)
        )


class Downsampler(nn.Module):
    """Half of the height and width, and of the frames with `halves_frames`."""

    def __init__(self, dim: int, *, halves_frames: bool) -> None:
        super().__init__()
        taps, frames = (3, 2) if halves_frames else (1, 1)
        self.conv = CausalConvolution(dim, dim, num_taps=taps, stride=(frames, 2, 2), padding=0)

    def forward(self, x: torch.Tensor, history: History) -> torch.Tensor:
        """[1, channels, frames, height, width] to [1, channels, ..]."""
        out: torch.Tensor = self.conv(F.pad(x, (0, 1, 0, 1)), history)
        return out


class Upsampler(nn.Module):
    """Twice the height and width, and the frames with `doubles_frames`: a layer makes the channels of all of them, of
    which the first frame of a clip has one."""

    def __init__(self, dim: int, *, doubles_frames: bool) -> None:
        super().__init__()
        self.frames = 2 if doubles_frames else 1
        self.upscale_conv = nn.Conv3d(dim, 4 * self.frames * dim, 1)
        self.conv = CausalConvolution(dim, dim)

    def forward(self, x: torch.Tensor, history: History) -> torch.Tensor:
        """[1, channels, frames, height, width] to [1, channels, ..]."""
        # Rows, columns, frames, channels.
        parts = self.upscale_conv(x)[0].unflatten(0, (2, 2, self.frames, -1))
        x = parts.permute(3, 4, 2, 5, 0, 6, 1).flatten(5, 6).flatten(3, 4).flatten(1, 2)[None]
        if self.frames > 1 and history.is_first:
            x = torch.cat([x[:, :, :1], x[:, :, 2:]], dim=2)
        out: torch.Tensor = self.conv(x, history)
        return out


class EncoderNetwork(nn.Module):
    """From pixels to mean and logarithm of the variance of latents."""

    def __init__(self, sizes: ReplicatingSizes) -> None:
        super().__init__()
        widths, groups = (sizes.widths[0], *sizes.widths), sizes.num_groups
        self.conv_in = CausalConvolution(3, widths[0])
        self.down_blocks = nn.ModuleList()
        for level in range(len(sizes.widths)):
            block = Level(widths[level], widths[level + 1], sizes.num_blocks, groups)
            if level < len(sizes.widths) - 1:
                down = Downsampler(widths[level + 1], halves_frames=sizes.halves_frames(level))
                block.downsamplers = nn.ModuleList([down])
            self.down_blocks.append(block)
        self.mid_block = MiddleBlock(widths[-1], groups)
        self.conv_norm_out = FrameNorm(groups, widths[-1], _EPS)
        self.conv_out = CausalConvolution(widths[-1], 2 * sizes.latent_channels)

    def forward(self, x: torch.Tensor, history: History) -> torch.Tensor:
        """Encode the next frames of a clip: one, then multiples of four. [1, 3, frames, height, width] to [1, 2 *
        latent channels, latent frames, ..]."""
        x = self.conv_in(x, history)
        x = _through(self.down_blocks, x, history)
        out: torch.Tensor = self.conv_out(self.conv_norm_out(self.mid_block(x, history)), history)
        history.is_first = False
        return out


class DecoderNetwork(nn.Module):
    """From latents to pixels."""

    def __init__(self, sizes: ReplicatingSizes) -> None:
        super().__init__()
        order, groups = tuple(reversed(sizes.widths)), sizes.num_groups
        widths = (order[0], *order)
        self.conv_in = CausalConvolution(sizes.latent_channels, widths[0])
        self.mid_block = MiddleBlock(widths[0], groups)
        self.up_blocks = nn.ModuleList()
        for level in range(len(order)):
            block = Level(widths[level], widths[level + 1], sizes.num_blocks + 1, groups)
            if level < len(order) - 1:
                block.upsamplers = nn.ModuleList(
                    [Upsampler(widths[level + 1], doubles_frames=level < sizes.num_halvings)]
                )
            self.up_blocks.append(block)
        self.conv_norm_out = FrameNorm(groups, widths[-1], _EPS)
        self.conv_out = CausalConvolution(widths[-1], 3)

    def forward(self, x: torch.Tensor, history: History) -> torch.Tensor:
        """Decode the next latent frames of a clip, [1, latent channels, frames, height, width], to [1, 3, ..]."""
        x = self.mid_block(self.conv_in(x, history), history)
        x = _through(self.up_blocks, x, history)
        out: torch.Tensor = self.conv_out(self.conv_norm_out(x), history)
        history.is_first = False
        return out


def _through(levels: nn.ModuleList, x: torch.Tensor, history: History) -> torch.Tensor:
    for level in levels:
        parts: Any = level
        for block in parts.resnets:
            x = block(x, history)
        for sampler in (*getattr(parts, "downsamplers", ()), *getattr(parts, "upsamplers", ())):
            x = sampler(x, history)
    return x


class ReplicatingAutoencoder(nn.Module):
    """Both halves. class_name: for the report. spatial_compression_ratio: pixels of a latent, a side;
    temporal_compression_ratio: frames of one but the first."""

    # Whether the decoder takes one latent frame after the other.
    goes_by_frame = True

    def __init__(self, class_name: str, sizes: ReplicatingSizes, *, has_encoder: bool = True) -> None:
        super().__init__()
        self.class_name = class_name
        self.sizes = sizes
        self.spatial_compression_ratio = 2 ** (len(sizes.widths) - 1)
        self.temporal_compression_ratio = sizes.frames_factor
        self.encoder = EncoderNetwork(sizes) if has_encoder else None
        self.decoder = DecoderNetwork(sizes)

    def encode(self, pieces: Iterable[torch.Tensor], tiling: Tiling | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean and deviation of the latents, [1, channels, latent frames, height, width].

        pieces: of the frames in [-1, 1], [1, 3, frames, height, width]: the first frame, then `frames_factor` each.
        tiling: encodes tiles that are blended; None for the whole frame.
        """
        assert self.encoder is not None
        histories: dict[tuple[int, int], History] = {}
        moments = torch.cat([self._moments(piece, tiling, histories) for piece in pieces], dim=2)
        mean, log_variance = moments.chunk(2, dim=1)
        return mean, log_variance.clamp(-30.0, 20.0).mul(0.5).exp()

    def _moments(
        self, piece: torch.Tensor, tiling: Tiling | None, histories: dict[tuple[int, int], History]
    ) -> torch.Tensor:
        """Encode the next frames. histories: of each tile."""
        assert self.encoder is not None
        side = self.spatial_compression_ratio
        rows, columns = axes_of_tiles([each // side for each in piece.shape[-2:]], tiling)
        if len(rows.starts) * len(columns.starts) == 1:
            whole: torch.Tensor = self.encoder(piece, histories.setdefault((0, 0), History()))
            return whole
        of_rows, of_columns = rows.times(side), columns.times(side)
        tiles = [
            self.encoder(
                piece[..., top : top + of_rows.size, left : left + of_columns.size],
                histories.setdefault((top, left), History()),
            )[0]
            for top in of_rows.starts
            for left in of_columns.starts
        ]
        out: torch.Tensor = tiles[0].new_empty(1, *tiles[0].shape[:2], *(each // side for each in piece.shape[-2:]))
        join_tiles(iter(tiles), rows, columns, out)
        return out

    def decode(self, latents: torch.Tensor, return_dict: bool = False) -> tuple[torch.Tensor]:
        """Decode latents at once, [1, channels, frames, height, width], as diffusers' classes do."""
        del return_dict
        return (torch.cat(list(ReplicatingDecoder(self).decode(latents)), dim=2),)


class ReplicatingDecoder(SampleDecoder):
    """Decoder that goes from latent frame to latent frame."""

    def __init__(self, autoencoder: ReplicatingAutoencoder) -> None:
        self._autoencoder = autoencoder
        self.frames_factor = autoencoder.sizes.frames_factor

    def decode(self, raw: torch.Tensor, ranks: RankGroup | None = None) -> Iterator[torch.Tensor]:
        """Yield the frames of one latent frame after the other; the work is never shared."""
        assert ranks is None
        history = History()
        for frame in torch.split(raw, 1, dim=2):
            yield self._autoencoder.decoder(frame, history)


class AutoencoderKLSeedVR2(ReplicatingAutoencoder):
    """The autoencoder by its config.json, as classes of diffusers are built. Raises ModelLoadError for sizes that do
    not fit each other."""

    def __init__(
        self,
        latent_channels: int = 16,
        block_out_channels: tuple[int, ...] = (128, 256, 512, 512),
        layers_per_block: int = 2,
        norm_num_groups: int = 32,
        temporal_scale_num: int = 2,
        *,
        has_encoder: bool = True,
    ) -> None:
        sizes = ReplicatingSizes(
            latent_channels, tuple(block_out_channels), layers_per_block, norm_num_groups, temporal_scale_num
        )
        if temporal_scale_num >= len(sizes.widths) or any(each % norm_num_groups for each in sizes.widths):
            raise ModelLoadError(
                "vae/config.json: expected fewer temporal_scale_num than block_out_channels, and channels that are "
                f"multiples of norm_num_groups, got {temporal_scale_num}, {list(sizes.widths)}, {norm_num_groups}"
            )
        super().__init__("AutoencoderKLSeedVR2", sizes, has_encoder=has_encoder)
