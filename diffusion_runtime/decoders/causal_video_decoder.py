"""The decoder of AutoencoderKLWan and AutoencoderKLQwenImage: eager, or fused kernels on the same weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from diffusion_runtime.decoders.causal_decoder import ChannelsFirstDecoder, ChannelsLastDecoder, ModuleDecoder
from diffusion_runtime.decoders.causal_decoder_network import CausalVideoAutoencoder
from diffusion_runtime.decoders.sample_decoder import Tiling
from diffusion_runtime.decoders.video_decoder import (
    MIN_DECIBELS,
    Decoders,
    FusedDecoder,
    Restore,
    VideoDecoder,
    has_kernels,
)

_TILE, _TILE_STRIDE = 256, 192


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
            _tiling(autoencoder),
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
    fused = [FusedDecoder(last, math.inf, f"{bits} last"), FusedDecoder(first, math.inf, f"{bits} first")]
    return CausalVideoDecoder(autoencoder, restore, fused)


def _tiling(autoencoder: Any) -> Tiling:
    """Return diffusers' tile sizes, 256 pixels a side with an overlap of 64."""
    pixels = int(autoencoder.spatial_compression_ratio)
    return Tiling(_TILE // pixels, _TILE_STRIDE // pixels, pixels, keeps_ends=True)
