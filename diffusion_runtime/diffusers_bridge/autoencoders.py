"""What sets some autoencoders of diffusers apart, by class: nothing in their configs says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class AutoencoderTraits:
    """tiled_only: it raises NotImplementedError when it decodes without tiling, and is made with it off. causal: the
    first latent frame is one frame of the video; else every latent frame is as many as the temporal factor says."""

    tiled_only: bool = False
    causal: bool = True


_KNOWN: Mapping[str, AutoencoderTraits] = {
    "AutoencoderKLAllegro": AutoencoderTraits(tiled_only=True, causal=False),
}


def traits_of(autoencoder: object) -> AutoencoderTraits:
    """Of an autoencoder; the defaults for a class that is not listed."""
    return _KNOWN.get(type(autoencoder).__name__, AutoencoderTraits())
