"""Memory that the activations of a video decoder take, for the message of a decode that did not fit."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from diffusion_runtime.decoders.causal_decoder import ChannelsFirstDecoder
from diffusion_runtime.decoders.causal_decoder_network import CausalVideoAutoencoder
from diffusion_runtime.decoders.sample_decoder import Tiling
from diffusion_runtime.memory.live_bytes import peak_bytes

# Tensors held at once around the widest convolution: the residual, the normalised input, its padded copy, and the
# output.
NUM_HELD = 4
# Latents of the dry run that finds the widest convolution: few, with one frame that is not the first.
_PROBE = (2, 2, 2)


def widest_activation(autoencoder: Any) -> float:
    """Return the numbers per latent (frame, row and column) in the largest input or output of the decoder's
    convolutions.

    Found by a dry run on the meta device. A decoder that goes from frame to frame holds those of one frame at a time.
    """
    tensors = [*autoencoder.parameters(), *autoencoder.buffers()]
    module = copy.deepcopy(autoencoder, {id(tensor): tensor.to("meta") for tensor in tensors})
    if isinstance(module, CausalVideoAutoencoder):
        return _widest_of_frame(module)
    module.use_tiling = module.use_framewise_decoding = False
    largest = 0

    def look(_: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        nonlocal largest
        largest = max(largest, inputs[0].numel(), output.numel())

    convolutions = [each for each in module.decoder.modules() if isinstance(each, nn.Conv2d | nn.Conv3d)]
    first = next(each for each in convolutions if isinstance(each, nn.Conv3d))
    for convolution in convolutions:
        convolution.register_forward_hook(look)
    latents = torch.empty(1, first.in_channels, *_PROBE, dtype=first.weight.dtype, device="meta")
    with torch.inference_mode():
        decode_latents(module, latents)
    frames, height, width = _PROBE
    return largest / ((1 if _goes_by_frame(module) else frames) * height * width)


def _widest_of_frame(module: CausalVideoAutoencoder) -> float:
    """Return `widest_activation` of a module on the meta device whose convolutions are called by their weights."""
    weight = module.post_quant_conv.weight
    latents = torch.empty(1, weight.shape[1], *_PROBE, dtype=weight.dtype, device="meta")
    widest = _WidestConvolution()
    with torch.inference_mode(), widest:
        for _ in ChannelsFirstDecoder(module, is_eager=True).decode(latents):
            pass
    return widest.numbers / (_PROBE[1] * _PROBE[2])


class _WidestConvolution(TorchFunctionMode):
    """Torch function mode that records the largest input, without its padding, or output of the convolutions inside."""

    numbers: int = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.conv2d, torch.conv3d):
            channels = max(args[0].shape[1], out.shape[1])
            self.numbers = max(self.numbers, channels * (out.numel() // out.shape[1]))
        return out


def memory_advice(autoencoder: Any, shape: Sequence[int], dtype: torch.dtype, tiling: Tiling | None) -> str:
    """Return a sentence on the memory that decoding [frames, height, width] latents takes, whole and in tiles."""
    numbers = widest_activation(autoencoder)

    def formula(frames: int, height: int, width: int) -> str:
        gib = NUM_HELD * numbers * frames * height * width * dtype.itemsize / 2**30
        return (
            f"{NUM_HELD} x {numbers:.0f} numbers x {frames} x {height} x {width} latents x {dtype.itemsize} bytes = "
            f"{gib:.2f} GiB"
        )

    frames, height, width = shape
    text = f"Decoding at once takes about {formula(frames, height, width)} beside the weights"
    if tiling is None:
        return f"{text}. A smaller height, width or num_frames needs less"
    return f"{text}; --vae-tiling on takes about {formula(*tiling.largest((frames, height, width)))} and the frames"


# Of a decoder that goes from latent frame to latent frame: one without a history, two with one.
_FRAMES_IN_TURN = 3


def decoding_bytes(
    autoencoder: Any, height: int, width: int, latent_frames: int, *, in_tiles: bool, copies_layout: bool = False
) -> int:
    """Return the bytes that decoding a clip has alive at once in addition to the weights, counted on the meta device.

    autoencoder: a module on the meta device, in the dtype it computes in. height, width: in pixels. in_tiles: tiles of
    diffusers' size, of a module of diffusers'. copies_layout: as in LiveBytes.
    """
    if isinstance(autoencoder, CausalVideoAutoencoder):
        return _streaming_bytes(autoencoder, height, width, latent_frames)
    convolutions = [each for each in autoencoder.decoder.modules() if isinstance(each, nn.Conv2d | nn.Conv3d)]
    factor = getattr(autoencoder, "spatial_compression_ratio", None)
    if factor is None:
        factor = 2 ** (len(autoencoder.config.block_out_channels) - 1)
    sizes, frames = [height // int(factor), width // int(factor)], latent_frames
    if in_tiles:
        tile = int(autoencoder.tile_sample_min_height) // int(factor)
        sizes = [min(size, tile) for size in sizes]
        if getattr(autoencoder, "use_framewise_decoding", False) or hasattr(autoencoder, "tile_sample_min_num_frames"):
            tile_frames = autoencoder.tile_sample_min_num_frames // autoencoder.temporal_compression_ratio
            frames = min(frames, int(tile_frames) + 1)
    autoencoder.use_tiling = autoencoder.use_framewise_decoding = False
    if _goes_by_frame(autoencoder):
        frames = min(frames, _FRAMES_IN_TURN)
    shape = [1, convolutions[0].in_channels, *([frames] if has_frames(autoencoder) else []), *sizes]
    latents = torch.empty(shape, dtype=convolutions[0].weight.dtype, device="meta")
    return peak_bytes(lambda: decode_latents(autoencoder, latents), latents.device, copies_layout=copies_layout)


def has_frames(autoencoder: Any) -> bool:
    """Return whether the module's latents have frames; also true for an image model made from a video model."""
    convolutions = (each for each in autoencoder.decoder.modules() if isinstance(each, nn.Conv3d))
    return _goes_by_frame(autoencoder) or any(True for _ in convolutions)


def _goes_by_frame(autoencoder: Any) -> bool:
    return "feat_cache" in inspect.signature(autoencoder.decoder.forward).parameters


def decode_latents(autoencoder: Any, latents: torch.Tensor) -> object:
    """Call diffusers' decoder once; some take the noise level of their latents."""
    takes_timestep = getattr(getattr(autoencoder, "config", None), "timestep_conditioning", False)
    times = (latents.new_zeros(latents.shape[0]),) if takes_timestep else ()
    return autoencoder.decode(latents, *times, return_dict=False)


def _streaming_bytes(autoencoder: CausalVideoAutoencoder, height: int, width: int, latent_frames: int) -> int:
    """Return `decoding_bytes` of a module that goes from latent frame to latent frame."""
    weight, factor = autoencoder.post_quant_conv.weight, autoencoder.spatial_compression_ratio
    frames = min(latent_frames, _FRAMES_IN_TURN)
    latents = torch.empty(
        1, weight.shape[1], frames, height // factor, width // factor, dtype=weight.dtype, device="meta"
    )

    def decode() -> None:
        for _ in ChannelsFirstDecoder(autoencoder, is_eager=True).decode(latents):
            pass

    return peak_bytes(decode, latents.device)
