"""The decoder of AutoencoderKLWan and AutoencoderKLQwenImage: eager, or fused kernels on the same weights; its module
is built from a config.json whose settings are all known."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from diffusion_runtime.core.empty_modules import empty_modules
from diffusion_runtime.core.model_folder import MAX_SIZE
from diffusion_runtime.decoders.causal_decoder import ChannelsFirstDecoder, ChannelsLastDecoder, ModuleDecoder
from diffusion_runtime.decoders.causal_decoder_network import CausalVideoAutoencoder, DecoderSizes
from diffusion_runtime.decoders.sample_decoder import Tiling
from diffusion_runtime.decoders.video_decoder import (
    MIN_DECIBELS,
    Decoders,
    FusedDecoder,
    Restore,
    VideoDecoder,
    has_kernels,
)
from diffusion_runtime.untrusted.component_sizes import MAX_LAYERS
from diffusion_runtime.untrusted.known_settings import Allows, are_known, either, is_number, several, whole

_SIZE = whole(1, MAX_SIZE)
# The deepest published model has 4.
_MAX_LEVELS = 16
# Settings that every class has; a family adds its own.
KNOWN: Mapping[str, Allows] = {
    "base_dim": _SIZE,
    "z_dim": _SIZE,
    "dim_mult": several(_SIZE),
    "num_res_blocks": whole(1, MAX_LAYERS),
    # Where the encoder attends, in addition to its middle block.
    "attn_scales": lambda value: value in ([], ()),
    "temperal_downsample": several(either(True, False)),
    # For training.
    "dropout": is_number,
    "latents_mean": several(is_number),
    "latents_std": several(is_number),
}
_DEFAULTS: Mapping[str, Any] = {
    "base_dim": 96,
    "z_dim": 16,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "temperal_downsample": [False, True, True],
}


def decoding_half(
    class_name: str,
    settings: Mapping[str, Any],
    known: Mapping[str, Allows],
    *,
    base_dim: int | None = None,
    out_channels: int = 3,
    patch_size: int = 1,
    is_residual: bool = False,
    spatial_compression_ratio: int | None = None,
) -> nn.Module | None:
    """Build the module without weights, on the meta device; None for settings that are not among `known` or do not fit
    each other: diffusers' class then reports what is wrong with them.

    The keywords are what a class has in addition to the settings in KNOWN. base_dim: of the decoder, None for the
    encoder's. spatial_compression_ratio: None for twice per upsampling.
    """
    if not are_known(settings, known):
        return None
    values = {**_DEFAULTS, **settings}
    doubles, dim_mult = values["temperal_downsample"], values["dim_mult"]
    if not len(doubles) + 1 == len(dim_mult) <= _MAX_LEVELS or out_channels % patch_size**2:
        return None
    sizes = DecoderSizes(
        base_dim=values["base_dim"] if base_dim is None else base_dim,
        z_dim=values["z_dim"],
        dim_mult=tuple(dim_mult),
        num_res_blocks=values["num_res_blocks"],
        doubles_frames=tuple(reversed(doubles)),
        out_channels=out_channels,
        patch_size=patch_size,
        is_residual=is_residual,
    )
    try:
        with empty_modules():
            return CausalVideoAutoencoder(class_name, sizes, spatial_compression_ratio or 2 ** len(doubles))
    except (RuntimeError, ValueError, OverflowError):  # sizes that no tensor has, or that do not divide each other
        return None


_TILE, _TILE_STRIDE = 256, 192
# Places of latents from which fused kernels are used. They halve the time of 131,040 places, 1.8 s on an H200
# (benchmarks/results/decode_gpu.json), so that fewer win 0.12 s at most; compiling them takes 12 s, once per machine
# (benchmarks/results/start_gpu.json).
MIN_FUSED = 16384


class CausalVideoDecoder(VideoDecoder):
    """Video decoder that takes one latent frame after the other, in bands of rows where several processes share it.

    Tiles hold all frames of their part, so that a tile is decoded as the whole would be. autoencoder: ours, whose eager
    decoder has the bits of diffusers' module, or that module.
    """

    def __init__(self, autoencoder: Any, restore: Restore, fused: Sequence[FusedDecoder] = ()) -> None:
        is_ours = isinstance(autoencoder, CausalVideoAutoencoder)
        super().__init__(
            autoencoder,
            restore,
            Decoders(
                ChannelsFirstDecoder(autoencoder, is_eager=True) if is_ours else ModuleDecoder(autoencoder),
                fused,
                lambda: FusedDecoder(ChannelsLastDecoder(autoencoder), MIN_DECIBELS, "fused kernels, fast"),
            ),
            causal_tiling(autoencoder),
            takes_bands=True,
        )
        if is_ours:
            self.library = "torch"


def exact_decoder(autoencoder: Any, restore: Restore) -> CausalVideoDecoder:
    """Return the decoder with diffusers' bits; with fused kernels on a CUDA GPU where Triton can be imported."""
    if not has_kernels(autoencoder):
        return CausalVideoDecoder(autoencoder, restore)
    last = ChannelsLastDecoder(autoencoder, is_exact=True)
    first = ChannelsFirstDecoder(autoencoder)
    bits = "fused kernels, bit-identical, channels"
    fused = [
        FusedDecoder(each, math.inf, f"{bits} {name}", MIN_FUSED) for each, name in ((last, "last"), (first, "first"))
    ]
    return CausalVideoDecoder(autoencoder, restore, fused)


def causal_tiling(autoencoder: Any) -> Tiling:
    """Return diffusers' tile sizes, 256 pixels a side with an overlap of 64."""
    pixels = int(autoencoder.spatial_compression_ratio)
    return Tiling(_TILE // pixels, _TILE_STRIDE // pixels, pixels, keeps_ends=True)
