"""Traits of diffusers' autoencoders by class that their configs do not contain: tiled decoding, causal first frame."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class AutoencoderTraits:
    """tiled_only: it raises NotImplementedError when it decodes without tiling, and tiling is off by default. causal:
    the first latent frame is one frame of the video; else every latent frame stands for as many frames as the temporal
    factor."""

    tiled_only: bool = False
    causal: bool = True


_KNOWN: Mapping[str, AutoencoderTraits] = {
    "AutoencoderKLAllegro": AutoencoderTraits(tiled_only=True, causal=False),
}


def traits_of(autoencoder: object) -> AutoencoderTraits:
    """Traits of an autoencoder; the defaults for a class that is not listed."""
    return _KNOWN.get(type(autoencoder).__name__, AutoencoderTraits())
