"""AutoencoderKLWan over a whole clip at once: the same modules and numbers as its chunked, cached forward, a few large
kernels instead of many small ones.

Why they are equal: the cached convolutions are causal convolutions with zeros before the clip. The two exceptions are
the temporal resamplings: downsampling passes the first frame untouched and convolves windows (0, 1, 2), (2, 3, 4), ...;
upsampling passes the first frame untouched and convolves the others with zeros in front, never seeing the first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import (
    WanAttentionBlock,
    WanCausalConv3d,
    WanMidBlock,
    WanResample,
    WanResidualBlock,
    patchify,
    unpatchify,
)
from torch import Tensor, nn

Activate = Callable[[Tensor, Tensor], Tensor]


def normalise_and_activate(x: Tensor, gamma: Tensor) -> Tensor:
    """SiLU of the channel-wise RMS norm: x [B, C, T, H, W], gamma [C, 1, 1, 1]; normalised in float32."""
    wide = x.float()
    length = torch.linalg.vector_norm(wide, dim=1, keepdim=True).clamp(min=1e-12)
    return F.silu(wide / length * (x.shape[1] ** 0.5) * gamma.float()).to(x.dtype)


def row_by_row(compiled: Activate) -> Activate:
    """Give the function pixels as rows [B T H W, C]: one shape to compile for, images and clips alike."""

    def activate(x: Tensor, gamma: Tensor) -> Tensor:
        batch, channels, frames, height, width = x.shape
        rows = x.permute(0, 2, 3, 4, 1).reshape(-1, channels)
        out = compiled(rows, gamma.flatten())
        return out.view(batch, frames, height, width, channels).permute(0, 4, 1, 2, 3)

    return activate


class WholeClipVae:
    """Encoding and decoding of clips [B, 3, T, H, W] in -1 to 1, T = 1 + 4 k, with the modules of one AutoencoderKLWan.

    `activate` replaces `normalise_and_activate`, for example by its compiled form. Whatever autocast is on applies.
    """

    def __init__(self, vae: AutoencoderKLWan, activate: Activate = normalise_and_activate) -> None:
        self.vae = vae
        self._activate = activate

    def encode(self, clip: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log-variance of the latents, each [B, 16, 1 + (T - 1) / 4, H / 8, W / 8]."""
        encoder = self.vae.encoder
        x = self._conv(encoder.conv_in, _fast_layout(patchify(clip, self.vae.config.patch_size)))
        for layer in encoder.down_blocks:
            x = self._layer(layer, x)
        x = self._middle(encoder.mid_block, x)
        x = self._conv(encoder.conv_out, self._activate(x, encoder.norm_out.gamma))
        mean, log_variance = self._conv(self.vae.quant_conv, x).chunk(2, dim=1)
        return mean, log_variance

    def decode(self, latents: Tensor) -> Tensor:
        """Clip [B, 3, 1 + 4 (T - 1), 8 H, 8 W] of latents [B, 16, T, H, W]; not clamped."""
        decoder = self.vae.decoder
        x = self._conv(self.vae.post_quant_conv, _fast_layout(latents))
        x = self._middle(decoder.mid_block, self._conv(decoder.conv_in, x))
        for block in decoder.up_blocks:
            for resnet in block.resnets:
                x = self._residual(resnet, x)
            if block.upsamplers is not None:
                x = self._resample(block.upsamplers[0], x)
        x = self._conv(decoder.conv_out, self._activate(x, decoder.norm_out.gamma))
        return unpatchify(x, self.vae.config.patch_size)

    def _layer(self, layer: nn.Module, x: Tensor) -> Tensor:
        if isinstance(layer, WanResidualBlock):
            return self._residual(layer, x)
        if isinstance(layer, WanResample):
            return self._resample(layer, x)
        raise TypeError(f"unexpected layer {type(layer).__name__}")

    def _middle(self, block: WanMidBlock, x: Tensor) -> Tensor:
        x = self._residual(block.resnets[0], x)
        for attention, resnet in zip(block.attentions, block.resnets[1:], strict=True):
            assert isinstance(attention, WanAttentionBlock)
            x = self._residual(resnet, _fast_layout(attention(x)))
        return x

    def _residual(self, block: WanResidualBlock, x: Tensor) -> Tensor:
        shortcut = x if isinstance(block.conv_shortcut, nn.Identity) else self._conv(block.conv_shortcut, x)
        x = self._conv(block.conv1, self._activate(x, block.norm1.gamma))
        return self._conv(block.conv2, self._activate(x, block.norm2.gamma)) + shortcut

    @staticmethod
    def _conv(conv: WanCausalConv3d, x: Tensor) -> Tensor:
        """A causal convolution of stride 1: zeros before the first frame, symmetric zeros in space."""
        side_w, _, side_h, _, before, _ = conv._padding
        if before:
            x = F.pad(x, (0, 0, 0, 0, before, 0))
        return F.conv3d(x, conv.weight, conv.bias, padding=(0, side_h, side_w))

    def _resample(self, layer: WanResample, x: Tensor) -> Tensor:
        if layer.mode == "upsample3d" and x.shape[2] > 1:
            first, rest = x[:, :, :1], x[:, :, 1:]
            doubled = self._conv(layer.time_conv, rest)
            even, odd = doubled.chunk(2, dim=1)
            rest = torch.stack([even, odd], dim=3).flatten(2, 3)
            x = torch.cat([first, rest], dim=2)
        x = self._spatial(layer, x)
        if layer.mode == "downsample3d" and x.shape[2] > 1:
            time_conv = layer.time_conv
            rest = F.conv3d(x, time_conv.weight, time_conv.bias, stride=time_conv.stride)
            x = torch.cat([x[:, :, :1], rest], dim=2)
        return _fast_layout(x)

    @staticmethod
    def _spatial(layer: WanResample, x: Tensor) -> Tensor:
        """The per-frame part: [B, C, T, H, W] folded to [B T, C, H, W] in channels-last order and back."""
        batch, channels, frames, height, width = x.shape
        folded = x.permute(0, 2, 3, 4, 1).reshape(batch * frames, height, width, channels).permute(0, 3, 1, 2)
        if layer.mode.startswith("upsample"):
            out = layer.resample[1](F.interpolate(folded, scale_factor=2.0, mode="nearest-exact"))
        else:
            out = layer.resample(folded)
        out = out.permute(0, 2, 3, 1).reshape(batch, frames, out.shape[2], out.shape[3], out.shape[1])
        return out.permute(0, 4, 1, 2, 3)


def _fast_layout(x: Tensor) -> Tensor:
    """Channels-last memory order on CUDA, where convolutions of few channels are fastest so; unchanged on a CPU."""
    return x.contiguous(memory_format=torch.channels_last_3d) if x.is_cuda else x


def channels_last(vae: AutoencoderKLWan) -> AutoencoderKLWan:
    """Store convolution weights in the order that CUDA's convolutions want; returns the same module."""
    for parameter in vae.parameters():
        if parameter.ndim == 5:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last_3d)
    return vae
