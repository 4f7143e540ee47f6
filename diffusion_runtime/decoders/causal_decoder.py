"""Causal video decoder on the weights of AutoencoderKLWan and AutoencoderKLQwenImage, with fused kernels.

The decoder turns one latent frame after the other into frames: the first into one, every later one into as many as its
time upsamplers make of it. `ChannelsFirstDecoder` gives the same bits as diffusers' module on the same device: its
convolutions read the same numbers in the same layout, and everything between them rounds where torch's operations
round. `ChannelsLastDecoder` keeps the channels of a pixel contiguous, the layout in which tensor cores convolve: it
rounds at the same operations, but sums a convolution and a norm in another order.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from diffusion_runtime.decoders.causal_decoder_network import CausalVideoAutoencoder
from diffusion_runtime.decoders.sample_decoder import DecodeNext, SampleDecoder
from diffusion_runtime.kernels.causal_conv import api as causal_conv
from diffusion_runtime.kernels.causal_conv import reference as causal_conv_reference
from diffusion_runtime.kernels.causal_conv.api import HISTORY, NormSilu, channels_last_input
from diffusion_runtime.kernels.frame_upsampling import api as frame_upsampling
from diffusion_runtime.kernels.frame_upsampling import reference as frame_upsampling_reference
from diffusion_runtime.kernels.frame_upsampling.api import (
    Duplication,
    add_duplicated_channels_last,
    upsample_channels_last,
)
from diffusion_runtime.layers.spatial_parallel import SpatialParallel
from diffusion_runtime.parallel.collectives import RankGroup
from diffusion_runtime.parallel.halo import with_neighbour_rows

Activation = TypeVar("Activation")


class LatentFrameDecoder(SampleDecoder):
    """Decoder that takes one latent frame after the other. A chunk holds the frames of one latent frame.

    autoencoder: CausalVideoAutoencoder, or diffusers' module of the same structure, in eval mode. `ranks` of `decode`
    are the processes that each decode a band of rows, from the top.
    """

    keeps_history = True

    def __init__(self, autoencoder: Any) -> None:
        self._autoencoder = autoencoder
        self._network = autoencoder.decoder
        is_ours = isinstance(autoencoder, CausalVideoAutoencoder)
        self._patch_size = autoencoder.patch_size if is_ours else autoencoder.config.get("patch_size") or 1
        upsamplers = (_upsampler_of(block)[0] for block in self._network.up_blocks)
        doubled = [upsampler for upsampler in upsamplers if upsampler is not None and upsampler.mode == "upsample3d"]
        self.frames_factor = 1 << len(doubled)

    def decode(self, raw: torch.Tensor, ranks: RankGroup | None = None) -> Iterator[torch.Tensor]:
        with self.clip(ranks) as decode_next:
            yield from decode_next(raw)


class ModuleDecoder(LatentFrameDecoder):
    """The layers of diffusers' module, run as its `decode` runs them: the reference for the other decoders."""

    @contextmanager
    def clip(self, ranks: RankGroup | None = None) -> Iterator[DecodeNext]:
        num_convolutions = sum(isinstance(module, nn.Conv3d) for module in self._network.modules())
        knows_first = "first_chunk" in inspect.signature(self._network.forward).parameters
        yield self._clip(ranks, [None] * num_convolutions, knows_first=knows_first)

    def _clip(self, ranks: RankGroup | None, kept: list[Any], *, knows_first: bool) -> DecodeNext:
        """Return the function that decodes the next latents of a clip.

        kept: what each causal convolution has read, in their order; the module keeps it in this list. knows_first:
        whether the module needs to be told that a first frame comes.
        """

        def decode_next(raw: torch.Tensor) -> Iterator[torch.Tensor]:
            nonlocal knows_first
            with _beyond_bands(ranks):
                latents = self._autoencoder.post_quant_conv(raw)
            for index in range(latents.shape[2]):
                # The module's own default is a later frame.
                first = {"first_chunk": True} if knows_first else {}
                knows_first = False
                with _beyond_bands(ranks):
                    chunk = self._network(latents[:, :, index : index + 1], feat_cache=kept, feat_idx=[0], **first)
                yield _unpatchify(chunk, self._patch_size).clamp(-1.0, 1.0)

        def fork() -> DecodeNext:
            # Some entries are strings of the module.
            read = [each.clone() if isinstance(each, torch.Tensor) else each for each in kept]
            return self._clip(ranks, read, knows_first=knows_first)

        return DecodeNext(decode_next, fork)


class CausalDecoder(LatentFrameDecoder, Generic[Activation]):
    """Decoder with layers of our own on the module's weights."""

    @contextmanager
    def clip(self, ranks: RankGroup | None = None) -> Iterator[DecodeNext]:
        yield self._clip(ranks, {}, is_first=True)

    def _clip(self, ranks: RankGroup | None, histories: dict[nn.Module, torch.Tensor], *, is_first: bool) -> DecodeNext:
        """Return the decoder of the clip's next latents. histories: as of LatentFrame; is_first: of the clip."""

        def decode_next(raw: torch.Tensor) -> Iterator[torch.Tensor]:
            nonlocal is_first
            latents = self.prepare(raw)
            for index in range(latents.shape[2]):
                frame = LatentFrame(is_first, histories, ranks)
                is_first = False
                yield self.decode_frame(latents[:, :, index : index + 1], frame)

        def fork() -> DecodeNext:
            read = {conv: history.clone() for conv, history in histories.items()}
            return self._clip(ranks, read, is_first=is_first)

        return DecodeNext(decode_next, fork)

    def prepare(self, raw: torch.Tensor) -> torch.Tensor:
        """Return raw latents as the network takes them, all at once."""
        latents: torch.Tensor = self._autoencoder.post_quant_conv(raw)
        return latents

    def decode_frame(self, latents: torch.Tensor, frame: LatentFrame) -> torch.Tensor:
        """Decode one prepared latent frame [1, channels, 1, height, width], and advance the frame's histories."""
        chunk = self.begin(latents, frame).frames(self._network)
        return _unpatchify(chunk, self._patch_size).clamp(-1.0, 1.0)

    def parameters(self) -> Iterator[torch.Tensor]:
        """Yield the weights that it reads; a decoder that copied some of them reads its copies."""
        return iter(self._autoencoder.parameters())

    @abstractmethod
    def begin(self, latents: torch.Tensor, frame: LatentFrame) -> DecoderRun[Activation]:
        """Return the run that decodes one latent frame."""


@dataclass(frozen=True)
class LatentFrame:
    """State of one latent frame. histories: what each causal convolution has read, kept from frame to frame. bands: as
    in LatentFrameDecoder."""

    is_first: bool
    histories: dict[nn.Module, torch.Tensor]
    bands: RankGroup | None


class DecoderRun(ABC, Generic[Activation]):
    """One latent frame on its way through the network."""

    def __init__(self, latents: torch.Tensor, frame: LatentFrame) -> None:
        self._latents = latents
        self._histories = frame.histories
        self._is_first = frame.is_first
        self._bands = frame.bands

    def frames(self, network: Any) -> torch.Tensor:
        """Return [1, channels, frames, height, width] as the last convolution gives them."""
        x = self.enter(network.conv_in, self._latents)
        middle = network.mid_block
        x = self.residual_block(middle.resnets[0], x)
        for attention, block in zip(middle.attentions, middle.resnets[1:], strict=True):
            x = self.residual_block(block, self.attend(attention, x))
        for up_block in network.up_blocks:
            x = self._up_block(up_block, x)
        return self.leave(network.norm_out, network.conv_out, x)

    def _up_block(self, block: Any, x: Activation) -> Activation:
        upsampler, shortcut = _upsampler_of(block)
        source = x = x if shortcut is None else self.settled(x)
        for resnet in block.resnets:
            x = self.residual_block(resnet, x)
        if upsampler is not None:
            x = self.upsample(upsampler, x)
        if shortcut is not None:
            dropped = shortcut.factor_t - 1 if self._is_first else 0
            x = self.add_shortcut(x, source, Duplication(shortcut.factor_t, shortcut.repeats, dropped))
        return x

    def _doubles_frames(self, upsampler: Any) -> bool:
        """Return whether the upsampler doubles the frames; the first latent frame stays one frame."""
        return upsampler.mode == "upsample3d" and not self._is_first

    def _history(self, conv: nn.Module, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        if conv not in self._histories:
            self._histories[conv] = like.new_zeros(shape)
        return self._histories[conv]

    def _attend(self, block: Any, x: torch.Tensor) -> torch.Tensor:
        """Apply the module's own attention among the pixels of a frame: small, and the same in every layout."""
        with _beyond_bands(self._bands):
            out: torch.Tensor = block(x)
        return out

    @abstractmethod
    def enter(self, conv: Any, latents: torch.Tensor) -> Activation:
        """Apply the first convolution."""

    @abstractmethod
    def settled(self, x: Activation) -> Activation:
        """Return x with every pending addition done."""

    @abstractmethod
    def residual_block(self, block: Any, x: Activation) -> Activation:
        """Apply norm, SiLU and convolution twice, and add the shortcut."""

    @abstractmethod
    def attend(self, block: Any, x: Activation) -> Activation:
        """Apply attention among the pixels of a frame."""

    @abstractmethod
    def upsample(self, upsampler: Any, x: Activation) -> Activation:
        """Double the height and width, and the frames where the upsampler does that."""

    @abstractmethod
    def add_shortcut(self, x: Activation, source: Activation, duplication: Duplication) -> Activation:
        """Return x + the upsampled input of its block."""

    @abstractmethod
    def leave(self, norm: Any, conv: Any, x: Activation) -> torch.Tensor:
        """Apply norm, SiLU and the last convolution."""


class ChannelsFirstDecoder(CausalDecoder[torch.Tensor]):
    """Decoder that is bit-identical to diffusers' module on the same device. Activations: [1, channels, frames, height,
    width].

    is_eager: torch's operations alone, on every device: the reference for the fused kernels.
    """

    def __init__(self, autoencoder: Any, *, is_eager: bool = False) -> None:
        super().__init__(autoencoder)
        self._is_eager = is_eager

    def begin(self, latents: torch.Tensor, frame: LatentFrame) -> DecoderRun[torch.Tensor]:
        return _ChannelsFirstRun(latents, frame, self._is_eager)


class _ChannelsFirstRun(DecoderRun[torch.Tensor]):
    def __init__(self, latents: torch.Tensor, frame: LatentFrame, is_eager: bool) -> None:
        super().__init__(latents, frame)
        # Modules with the same functions.
        self._inputs: Any = causal_conv_reference if is_eager else causal_conv
        self._upsampling: Any = frame_upsampling_reference if is_eager else frame_upsampling

    def enter(self, conv: Any, latents: torch.Tensor) -> torch.Tensor:
        return self._convolve(conv, latents)

    def settled(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def residual_block(self, block: Any, x: torch.Tensor) -> torch.Tensor:
        residual = block.conv_shortcut(x)
        inner = self._convolve(block.conv1, x, _norm_of(block.norm1))
        return self._convolve(block.conv2, inner, _norm_of(block.norm2), residual)

    def attend(self, block: Any, x: torch.Tensor) -> torch.Tensor:
        return self._attend(block, x)

    def upsample(self, upsampler: Any, x: torch.Tensor) -> torch.Tensor:
        doubles = self._doubles_frames(upsampler)
        if doubles:
            x = self._convolve(upsampler.time_conv, x)
        larger, conv = self._upsampling.upsample_channels_first(x, is_interleaved=doubles), upsampler.resample[1]
        if self._bands is not None:
            larger = with_neighbour_rows(larger, 1, self._bands)
        out = torch.conv2d(larger, conv.weight, conv.bias, padding=(1 if self._bands is None else 0, 1))
        # Frame by frame in memory, as the convolution wrote them.
        return out.transpose(0, 1)[None]

    def add_shortcut(self, x: torch.Tensor, source: torch.Tensor, duplication: Duplication) -> torch.Tensor:
        frames: torch.Tensor = self._upsampling.add_duplicated_channels_first(x[0].transpose(0, 1), source, duplication)
        return frames.transpose(0, 1)[None]

    def leave(self, norm: Any, conv: Any, x: torch.Tensor) -> torch.Tensor:
        return self._convolve(conv, x, _norm_of(norm))

    def _convolve(
        self, conv: Any, x: torch.Tensor, norm: NormSilu | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        _, channels, _, height, width = x.shape
        history = self._history(conv, (1, channels, HISTORY, height, width), x)
        padding = conv.kernel_size[2] // 2
        window = self._inputs.channels_first_input(x, history, norm, padding=padding)
        if self._bands is not None and padding > 0:
            window = with_neighbour_rows(window[..., padding:-padding, :], padding, self._bands)
        # cuDNN convolves without the bias, which torch then adds: one pass with the residual. On a CPU the bias is part
        # of the convolution's sum.
        is_apart = residual is not None and x.is_cuda
        out = torch.conv3d(window, conv.weight, None if is_apart else conv.bias)
        if residual is None:
            return out
        total: torch.Tensor = self._inputs.add_bias_residual(out, conv.bias if is_apart else None, residual)
        return total


@dataclass(frozen=True)
class _Sum:
    """value + bias + residual, not yet added up. value: [frames, height, width, channels], contiguous."""

    value: torch.Tensor
    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None


class ChannelsLastDecoder(CausalDecoder[_Sum]):
    """Decoder that keeps the channels of a pixel contiguous, the layout in which tensor cores convolve: nothing is
    transposed on the way.

    is_exact: only what gives diffusers' bits on a CUDA GPU, as far as cuDNN takes the same kernel for both layouts,
    which it did wherever this was run. Else the first frame is convolved in two dimensions, and convolutions have
    outputs that are computed and not used where their number fits no tile. Holds a copy of the weights.
    """

    def __init__(self, autoencoder: Any, *, is_exact: bool = False) -> None:
        super().__init__(autoencoder)
        self._is_exact = is_exact
        self._weights: dict[nn.Module, torch.Tensor] = {
            conv: _channels_last_weight(conv.weight.detach(), pads_outputs=not is_exact)
            for conv in autoencoder.decoder.modules()
            if isinstance(conv, nn.Conv2d | nn.Conv3d)
        }

    def begin(self, latents: torch.Tensor, frame: LatentFrame) -> DecoderRun[_Sum]:
        return _ChannelsLastRun(latents, frame, self._weights, self._is_exact)


class _ChannelsLastRun(DecoderRun[_Sum]):
    def __init__(
        self, latents: torch.Tensor, frame: LatentFrame, weights: dict[nn.Module, torch.Tensor], is_exact: bool
    ) -> None:
        super().__init__(latents, frame)
        self._weights = weights
        self._is_exact = is_exact
        # The frames before the first are zeros: only one tap of three needs computing.
        self._in_two_dimensions = frame.is_first and not is_exact

    def enter(self, conv: Any, latents: torch.Tensor) -> _Sum:
        return self._convolve(conv, _Sum(latents[0].permute(1, 2, 3, 0).contiguous()))

    def settled(self, x: _Sum) -> _Sum:
        if x.bias is not None:
            x.value.add_(x.bias)
        if x.residual is not None:
            x.value.add_(x.residual)
        return _Sum(x.value)

    def residual_block(self, block: Any, x: _Sum) -> _Sum:
        if x.residual is None:
            x = self.settled(x)
        inner = self._convolve(block.conv1, x, _norm_of(block.norm1))
        # The norm's pass has written the sum to x.value.
        residual = x.value
        if isinstance(block.conv_shortcut, nn.Conv3d):
            residual = self._shortcut(block.conv_shortcut, residual)
        out = self._convolve(block.conv2, inner, _norm_of(block.norm2))
        return _Sum(out.value, out.bias, residual)

    def attend(self, block: Any, x: _Sum) -> _Sum:
        out = self._attend(block, self.settled(x).value.permute(3, 0, 1, 2)[None].contiguous())
        return _Sum(out[0].permute(1, 2, 3, 0).contiguous())

    def upsample(self, upsampler: Any, x: _Sum) -> _Sum:
        doubles = self._doubles_frames(upsampler)
        if doubles:
            x = self._convolve(upsampler.time_conv, self.settled(x))
        larger = upsample_channels_last(x.value, is_interleaved=doubles, bias=x.bias, residual=x.residual)
        conv = upsampler.resample[1]
        larger, rows = self._with_halo(larger, 1)
        out = torch.conv2d(larger.permute(0, 3, 1, 2), self._weights[conv], None, padding=(rows, 1))
        return _Sum(_pixels(out, conv), conv.bias)

    def add_shortcut(self, x: _Sum, source: _Sum, duplication: Duplication) -> _Sum:
        return _Sum(add_duplicated_channels_last(x.value, source.value, duplication, x.bias))

    def leave(self, norm: Any, conv: Any, x: _Sum) -> torch.Tensor:
        out = self._convolve(conv, x, _norm_of(norm))
        return self.settled(out).value.permute(3, 0, 1, 2)[None]

    def _convolve(self, conv: Any, x: _Sum, norm: NormSilu | None = None) -> _Sum:
        _, height, width, channels = x.value.shape
        history = self._history(conv, (HISTORY, height, width, channels), x.value)
        window = channels_last_input(
            x.value,
            history,
            norm,
            bias=x.bias,
            residual=x.residual,
            is_first=self._in_two_dimensions,
            in_torchs_order=self._is_exact,
        )
        weight, padding = self._weights[conv], conv.kernel_size[2] // 2
        window, rows = self._with_halo(window, padding)
        if self._in_two_dimensions:
            last_tap = weight[:, :, -1].contiguous(memory_format=torch.channels_last)
            out = torch.conv2d(window.permute(0, 3, 1, 2), last_tap, None, padding=(rows, padding))
        else:
            out = torch.conv3d(window.permute(3, 0, 1, 2)[None], weight, None, padding=(0, rows, padding))[0]
            out = out.transpose(0, 1)
        return _Sum(_pixels(out, conv), conv.bias)

    def _shortcut(self, conv: Any, x: torch.Tensor) -> torch.Tensor:
        """Apply a convolution over one pixel: a linear map, or cuDNN's convolution where the bits count."""
        if not self._is_exact:
            return F.linear(x, conv.weight.flatten(1), conv.bias)
        out = torch.conv3d(x.permute(3, 0, 1, 2)[None], self._weights[conv], conv.bias)
        return _pixels(out[0].transpose(0, 1), conv)

    def _with_halo(self, window: torch.Tensor, padding: int) -> tuple[torch.Tensor, int]:
        """Return the window with the neighbouring bands' rows, and how many rows of zeros are still missing."""
        if self._bands is None or padding == 0:
            return window, padding
        frames, _, width, channels = window.shape
        with_rows = with_neighbour_rows(window.flatten(2), padding, self._bands)
        return with_rows.view(frames, -1, width, channels), 0


_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
# Outputs that cuDNN's Hopper kernels compute at once: with 96 it falls back to an Ampere kernel, at 243 instead of 570
# TF/s (H200, cuDNN 9, 3 x 3 x 3 on 480 x 832).
_OUTPUT_TILE = 64


def _channels_last_weight(weight: torch.Tensor, *, pads_outputs: bool) -> torch.Tensor:
    """Return the weight of a convolution in channels-last layout. pads_outputs: more than one tile of outputs are
    filled up with zeros to whole tiles."""
    num_outputs = weight.shape[0]
    if pads_outputs and num_outputs > _OUTPUT_TILE:
        missing = -num_outputs % _OUTPUT_TILE
        weight = torch.cat([weight, weight.new_zeros(missing, *weight.shape[1:])]) if missing else weight
    return weight.contiguous(memory_format=_LAST[weight.dim()])


def _pixels(x: torch.Tensor, conv: Any) -> torch.Tensor:
    """Return [frames, channels, height, width] as [frames, height, width, outputs of conv]; a view where the layout was
    kept."""
    return x.permute(0, 2, 3, 1).contiguous()[..., : conv.out_channels]


def _beyond_bands(bands: RankGroup | None) -> AbstractContextManager[Any]:
    """Context manager: modules read the rows beyond the edges of a band."""
    return nullcontext() if bands is None else SpatialParallel(bands)


def _norm_of(norm: Any) -> NormSilu:
    return NormSilu(norm.gamma.flatten(), norm.scale)


def _upsampler_of(block: Any) -> tuple[Any, Any]:
    """Return the upsampler of a block and the shortcut around it; None for either that it lacks."""
    if isinstance(getattr(block, "upsamplers", None), nn.ModuleList):
        return block.upsamplers[0], None
    return getattr(block, "upsampler", None), getattr(block, "avg_shortcut", None)


def _unpatchify(x: torch.Tensor, patch_size: int) -> torch.Tensor:
    """Return [1, channels * patch_size^2, frames, height, width] as [1, channels, frames, patch_size * height, ..]."""
    if patch_size == 1:
        return x
    batch, packed, frames, height, width = x.shape
    channels = packed // patch_size**2
    split = x.reshape(batch, channels, patch_size, patch_size, frames, height, width)
    return split.permute(0, 1, 4, 5, 3, 6, 2).reshape(batch, channels, frames, height * patch_size, width * patch_size)
