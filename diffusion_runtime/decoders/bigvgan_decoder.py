"""Decoder of a sound's latents to its waveform, BigVGAN (Lee et al., arXiv:2206.04658), with its published names.

It decodes in pieces with the latents on both sides that the piece's samples depend on, so that pieces are the whole: a
level upsamples by a transposed convolution, then takes the mean of residual blocks. An activation is computed at twice
the rate, between an upsampling and a low-pass filter, so that it makes no frequencies that the rate does not have.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

# Latents of a piece, 10 s of MiniMax-H3's: activations of its two channels take about 0.3 GiB.
PIECE = 400
_RATIO, _TAPS = 2, 12
# Samples on each side that an activation reads.
_ACTIVATION_RADIUS = (_TAPS - 1) // 2


@dataclass(frozen=True)
class BigVganSizes:
    """Sizes of the network. latent_channels, latent_dim: before and after the first projection; dim: of the first
    convolution, halved at every level. rates, kernels: of each level; block_kernels, block_dilations: of the residual
    blocks of a level."""

    latent_channels: int
    latent_dim: int
    dim: int
    rates: tuple[int, ...]
    kernels: tuple[int, ...]
    block_kernels: tuple[int, ...]
    block_dilations: tuple[tuple[int, ...], ...]

    @property
    def hop(self) -> int:
        """Samples of a latent."""
        return math.prod(self.rates)

    @property
    def radius(self) -> int:
        """Latents on each side that the samples of a latent depend on."""
        blocks = zip(self.block_kernels, self.block_dilations, strict=True)
        of_blocks = max(
            sum((kernel - 1) // 2 * (dilation + 1) + 2 * _ACTIVATION_RADIUS for dilation in dilations)
            for kernel, dilations in blocks
        )
        # The last convolution and the activation before it.
        radius = _ENDS // 2 + _ACTIVATION_RADIUS
        for rate, kernel in zip(reversed(self.rates), reversed(self.kernels), strict=True):
            radius = (radius + of_blocks + (kernel + rate) // 2 - 1) // rate
        return radius + _ENDS // 2


# Taps of the first and the last convolution.
_ENDS = 7


class BigVganAutoencoder(nn.Module):
    """The decoding half of an autoencoder of one channel of sound: `dec_in_proj` and `decoder`."""

    def __init__(self, sizes: BigVganSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.dec_in_proj = nn.Conv1d(sizes.latent_channels, sizes.latent_dim, 1)
        self.decoder = BigVganDecoder(sizes)

    def decode(self, latents: torch.Tensor, piece: int = PIECE) -> torch.Tensor:
        """Decode [batch, channels, length] to samples in [-1, 1], [batch, length * hop], at most `piece` latents at
        once."""
        length, radius, hop = latents.shape[2], self.sizes.radius, self.sizes.hop
        found = []
        for start in range(0, length, piece):
            first, stop = max(0, start - radius), min(length, start + piece)
            samples = self.decoder(self.dec_in_proj(latents[:, :, first : min(length, stop + radius)]))
            found.append(samples[:, (start - first) * hop : (stop - first) * hop])
        return torch.cat(found, dim=1)


class BigVganDecoder(nn.Module):
    """The vocoder."""

    def __init__(self, sizes: BigVganSizes) -> None:
        super().__init__()
        widths = [sizes.dim // 2**level for level in range(len(sizes.rates) + 1)]
        self.conv_pre = NormedConvolution(sizes.latent_dim, widths[0], _ENDS)
        self.ups = nn.ModuleList(
            nn.ModuleList([NormedUpsampling(widths[level], widths[level + 1], kernel, rate)])
            for level, (kernel, rate) in enumerate(zip(sizes.kernels, sizes.rates, strict=True))
        )
        self.resblocks = nn.ModuleList(
            PeriodicBlock(width, kernel, dilations)
            for width in widths[1:]
            for kernel, dilations in zip(sizes.block_kernels, sizes.block_dilations, strict=True)
        )
        self.activation_post = FilteredSnake(widths[-1])
        self.conv_post = NormedConvolution(widths[-1], 1, _ENDS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, latent_dim, length] to [batch, length * hop]."""
        x = self.conv_pre(x)
        of_level = len(self.resblocks) // len(self.ups)
        ups: Any = self.ups
        for level, up in enumerate(ups):
            x = up[0](x)
            blocks = self.resblocks[level * of_level : (level + 1) * of_level]
            total = blocks[0](x)
            for block in blocks[1:]:
                total += block(x)
            x = total.div_(of_level)
        samples: torch.Tensor = self.conv_post(self.activation_post(x))[:, 0].clamp_(-1.0, 1.0)
        return samples


class PeriodicBlock(nn.Module):
    """Residual pairs of convolutions, the first of each dilated, with an activation before every one."""

    def __init__(self, channels: int, kernel: int, dilations: tuple[int, ...]) -> None:
        super().__init__()
        self.convs1 = nn.ModuleList(NormedConvolution(channels, channels, kernel, each) for each in dilations)
        self.convs2 = nn.ModuleList(NormedConvolution(channels, channels, kernel) for _ in dilations)
        self.activations = nn.ModuleList(FilteredSnake(channels) for _ in range(2 * len(dilations)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, channels, length] to a new tensor like it."""
        pairs = zip(self.convs1, self.convs2, self.activations[::2], self.activations[1::2], strict=True)
        for first, second, before_first, before_second in pairs:
            x = x + second(before_second(first(before_first(x))))
        return x


class _NormedWeight(nn.Module):
    """Weight normalisation (Salimans and Kingma, arXiv:1602.07868): a direction and its length by row."""

    def __init__(self, shape: tuple[int, int, int], num_biases: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(num_biases)) if num_biases else None
        self.weight_g = nn.Parameter(torch.ones(shape[0], 1, 1))
        self.weight_v = nn.Parameter(torch.ones(shape))

    @property
    def weight(self) -> torch.Tensor:
        weight: torch.Tensor = torch._weight_norm(self.weight_v, self.weight_g, 0)
        return weight


class NormedConvolution(_NormedWeight):
    """Convolution that keeps the length, beyond which there are zeros."""

    def __init__(self, dim_in: int, dim_out: int, kernel: int, dilation: int = 1, *, bias: bool = True) -> None:
        super().__init__((dim_out, dim_in, kernel), dim_out if bias else 0)
        self.dilation = dilation
        self.padding = (kernel - 1) * dilation // 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, dim_in, length] to [batch, dim_out, length]."""
        return F.conv1d(x, self.weight, self.bias, padding=self.padding, dilation=self.dilation)


class NormedUpsampling(_NormedWeight):
    """Transposed convolution that makes `rate` samples of one."""

    def __init__(self, dim_in: int, dim_out: int, kernel: int, rate: int) -> None:
        super().__init__((dim_in, dim_out, kernel), dim_out)
        self.rate = rate
        self.padding = (kernel - rate) // 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, dim_in, length] to [batch, dim_out, length * rate]."""
        return F.conv_transpose1d(x, self.weight, self.bias, stride=self.rate, padding=self.padding)


class FilteredSnake(nn.Module):
    """x + sin(a x)^2 / b by channel (Ziyin et al., arXiv:2006.08195), a and b as logarithms, at twice the rate."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.act = _Snake(channels)
        self.upsample = _Filter()
        self.downsample = nn.ModuleDict({"lowpass": _Filter()})

    @property
    def lowpass(self) -> Any:
        return self.downsample["lowpass"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, channels, length] to a new tensor like it; beyond the ends, x is as at them."""
        channels, pad = x.shape[1], _TAPS // _RATIO - 1
        cut = pad * _RATIO + (_TAPS - _RATIO) // 2
        up, down = (each.filter.expand(channels, -1, -1) for each in (self.upsample, self.lowpass))
        padded = F.pad(x, (pad, pad), mode="replicate")
        x = F.conv_transpose1d(padded, up, stride=_RATIO, groups=channels)[..., cut:-cut].mul(_RATIO)
        x = F.pad(self.act(x), ((_TAPS - 1) // 2, _TAPS // 2), mode="replicate")
        return F.conv1d(x, down, stride=_RATIO, groups=channels)


class _Snake(nn.Module):
    """The activation at twice the rate."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(channels))
        self.beta = nn.Parameter(torch.zeros(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        alpha, beta = (each.exp()[:, None] for each in (self.alpha, self.beta))
        return torch.addcmul(x, (beta + 1e-9).reciprocal(), (alpha * x).sin_().square_())


class _Filter(nn.Module):
    """Taps of a low-pass filter, which files hold."""

    filter: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("filter", torch.zeros(1, 1, _TAPS))
