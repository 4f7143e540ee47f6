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
from diffusion_runtime.decoders.exact_tiles import ExactTiles
from diffusion_runtime.decoders.sample_decoder import Tiling
from diffusion_runtime.decoders.vit_decoder_network import VitVideoAutoencoder
from diffusion_runtime.decoders.vit_video_decoder import decoding_bytes as vit_decoding_bytes
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
    for convolution in convolutions:
        convolution.register_forward_hook(look)
    frames, height, width = _PROBE if has_frames(module) else (1, *_PROBE[1:])
    latents = _empty_latents(module, frames, height, width)
    with torch.inference_mode():
        decode_latents(module, latents)
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
    autoencoder: Any,
    height: int,
    width: int,
    latent_frames: int,
    *,
    tiling: Tiling | None = None,
    copies_layout: bool = False,
) -> int:
    """Return the bytes that decoding a clip has alive at once in addition to the weights, counted on the meta device.

    autoencoder: a module on the meta device, in the dtype it computes in. height, width: in pixels. tiling: None to
    decode at once. copies_layout: as in LiveBytes.
    """
    pixels = pixels_per_latent(autoencoder)
    whole = latent_frames, height // pixels, width // pixels
    if isinstance(autoencoder, VitVideoAutoencoder):
        return vit_decoding_bytes(autoencoder, whole, tiling)
    if tiling is None:
        return _peak_of(autoencoder, *whole, copies_layout=copies_layout)
    if tiling.is_exact:
        latents = _empty_latents(autoencoder, *whole).unsqueeze(2)
        exact = ExactTiles(autoencoder, tiling.size * pixels, at_most=1)
        tile = peak_bytes(lambda: list(exact.decode(latents)), latents.device, copies_layout=copies_layout)
        return max(tile, _as_frames(autoencoder, height * width))
    frames, rows, columns = tiling.largest(whole)
    tile = _peak_of(autoencoder, frames, rows, columns, copies_layout=copies_layout)
    if (rows, columns) == whole[1:]:
        return tile
    # Beside a tile there are the rows of tiles before it, with what they overlap by.
    num_frames = 1 + int(getattr(autoencoder, "temporal_compression_ratio", 1)) * (frames - 1)
    numbers: int = 3 * num_frames * height * width
    itemsize: int = next(autoencoder.parameters()).dtype.itemsize
    rows_of_tiles = 2 * 3 * num_frames * tiling.size * pixels * width * tiling.size // tiling.stride
    held: int = numbers + rows_of_tiles
    return max(tile + held * itemsize, _as_frames(autoencoder, num_frames * height * width))


def _as_frames(autoencoder: Any, num_pixels: int) -> int:
    """Return the bytes of decoded pixels and of the same twice in float32: before and after their colours are moved to
    the end."""
    itemsize: int = next(autoencoder.parameters()).dtype.itemsize
    return 3 * num_pixels * (itemsize + 2 * 4)


def _peak_of(autoencoder: Any, frames: int, rows: int, columns: int, *, copies_layout: bool) -> int:
    """Return `decoding_bytes` of latents of that size at once."""
    if isinstance(autoencoder, CausalVideoAutoencoder):
        return _streaming_bytes(autoencoder, rows, columns, frames)
    autoencoder.use_tiling = autoencoder.use_framewise_decoding = False
    if _goes_by_frame(autoencoder):
        frames = min(frames, _FRAMES_IN_TURN)
    latents = _empty_latents(autoencoder, frames, rows, columns)
    return peak_bytes(lambda: decode_latents(autoencoder, latents), latents.device, copies_layout=copies_layout)


def _empty_latents(autoencoder: Any, frames: int, rows: int, columns: int) -> torch.Tensor:
    """Return latents on the meta device, as the module of diffusers takes them."""
    first = next(each for each in autoencoder.decoder.modules() if isinstance(each, nn.Conv2d | nn.Conv3d))
    shape = [1, first.in_channels, *([frames] if has_frames(autoencoder) else []), rows, columns]
    return torch.empty(shape, dtype=first.weight.dtype, device="meta")


def pixels_per_latent(autoencoder: Any) -> int:
    """Return the pixels of a latent of the module, a side."""
    factor = getattr(autoencoder, "spatial_compression_ratio", None)
    return int(2 ** (len(autoencoder.config.block_out_channels) - 1) if factor is None else factor)


def has_frames(autoencoder: Any) -> bool:
    """Return whether the module's latents have frames; also true for an image model made from a video model."""
    convolutions = (each for each in autoencoder.decoder.modules() if isinstance(each, nn.Conv3d))
    return _goes_by_frame(autoencoder) or any(True for _ in convolutions)


def _goes_by_frame(autoencoder: Any) -> bool:
    if getattr(autoencoder, "goes_by_frame", False):
        return True
    return "feat_cache" in inspect.signature(autoencoder.decoder.forward).parameters


def decode_latents(autoencoder: Any, latents: torch.Tensor) -> object:
    """Call diffusers' decoder once; some take the noise level of their latents."""
    takes_timestep = getattr(getattr(autoencoder, "config", None), "timestep_conditioning", False)
    times = (latents.new_zeros(latents.shape[0]),) if takes_timestep else ()
    return autoencoder.decode(latents, *times, return_dict=False)


def _streaming_bytes(autoencoder: CausalVideoAutoencoder, rows: int, columns: int, latent_frames: int) -> int:
    """Return `decoding_bytes` of a module that goes from latent frame to latent frame. rows, columns: of latents."""
    weight, frames = autoencoder.post_quant_conv.weight, min(latent_frames, _FRAMES_IN_TURN)
    latents = torch.empty(1, weight.shape[1], frames, rows, columns, dtype=weight.dtype, device="meta")

    def decode() -> None:
        for _ in ChannelsFirstDecoder(autoencoder, is_eager=True).decode(latents):
            pass

    return peak_bytes(decode, latents.device)
