"""What sets some autoencoders of diffusers apart, by class: nothing in their configs says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class AutoencoderTraits:
    """tiles_alone: it raises NotImplementedError when it decodes a whole video, and is made with tiling off.
    first_frame_alone: the first latent frame holds one frame and the others as many as the temporal factor says; else
    all hold as many."""

    tiles_alone: bool = False
    first_frame_alone: bool = True


_KNOWN: Mapping[str, AutoencoderTraits] = {
    "AutoencoderKLAllegro": AutoencoderTraits(tiles_alone=True, first_frame_alone=False),
}


def traits_of(autoencoder: object) -> AutoencoderTraits:
    """Of an instance; those of most autoencoders for every class that is not known."""
    return _KNOWN.get(type(autoencoder).__name__, AutoencoderTraits())
