"""The decoder of an image autoencoder with group norms: a clip of one frame, at once or in exact tiles."""

from __future__ import annotations

from typing import Any

import torch

from diffusion_runtime.core.model_folder import AnyFolder, read_config
from diffusion_runtime.decoders.autoencoder import COMPONENT, DiffusersComponent
from diffusion_runtime.decoders.decoder_memory import pixels_per_latent
from diffusion_runtime.decoders.exact_tiles import ExactTiles, decode_frame
from diffusion_runtime.decoders.sample_decoder import SampleDecoder, Tiling, WholeDecoder
from diffusion_runtime.decoders.video_decoder import Decoders, Restore, VideoDecoder

AUTOENCODER = DiffusersComponent(COMPONENT, "diffusers.models.autoencoders.autoencoder_kl", "AutoencoderKL")
# In pixels. Of FLUX.1 in bfloat16, a picture of 2048 x 2048 then has 0.9 GiB alive at once, and 6.0 GiB without tiles.
_TILE = 512


class ImageDecoder(VideoDecoder):
    """Decoder of AutoencoderKL or AutoencoderKLFlux2 by diffusers' module. Computes in its weights' dtype."""

    def __init__(self, autoencoder: Any, restore: Restore) -> None:
        whole = WholeDecoder(lambda raw: decode_frame(autoencoder, raw), 1)
        super().__init__(autoencoder, restore, Decoders(whole, ()), image_tiling(autoencoder))

    def _as_tiled(self, decoder: SampleDecoder) -> SampleDecoder:
        tiles = self._tiles
        return decoder if tiles is None else ExactTiles(self._autoencoder, tiles.size * tiles.pixels)


def image_tiling(autoencoder: Any) -> Tiling:
    """Return the tiles of an image autoencoder: 512 pixels a side."""
    pixels = pixels_per_latent(autoencoder)
    return Tiling(_TILE // pixels, _TILE // pixels, pixels, is_exact=True)


def load_image_decoder(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> ImageDecoder:
    """Load the decoder of a diffusers folder's `vae`, whose latents are scaled and shifted by one number each.

    Raises ModelLoadError for settings that the installed diffusers does not know and for weights that do not fit.
    """
    scale, shift = read_normalisation(folder)
    autoencoder = AUTOENCODER.load(folder, device, dtype, left_out=("encoder", "quant_conv"))
    return ImageDecoder(autoencoder, lambda latents: latents / scale + shift)


def read_normalisation(folder: AnyFolder) -> tuple[float, float]:
    """Read (scale, shift): latents are (raw - shift) * scale. Raises ModelLoadError that names the file and the
    key."""
    file = read_config(folder, COMPONENT)
    return file.number("scaling_factor"), file.number("shift_factor")
