"""The FLUX.1 autoencoder: that of many image models."""

from __future__ import annotations

from diffusion_runtime.models.image_decoder import AUTOENCODER, read_normalisation
from diffusion_runtime.models.image_decoder import load_image_decoder as load_decoder

__all__ = ["AUTOENCODER", "load_decoder", "read_normalisation"]
