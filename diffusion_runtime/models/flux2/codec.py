"""The FLUX.2 autoencoder: its latents are folded 2 x 2 into channels, each normalised by statistics that a batch norm
kept in training."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from diffusion_runtime.core.model_folder import AnyFolder, read_config
from diffusion_runtime.decoders.autoencoder import COMPONENT, DiffusersComponent
from diffusion_runtime.decoders.image_decoder import ImageDecoder
from diffusion_runtime.models.flux2.config import FOLD
from diffusion_runtime.models.reference_images import Encode, encode_with

AUTOENCODER = DiffusersComponent(
    COMPONENT,
    "diffusers.models.autoencoders.autoencoder_kl_flux2",
    "AutoencoderKLFlux2",
    {"force_upcast": "for pipelines that turn half-precision decoders into float32; no FLUX.2 pipeline asks for it"},
)


def load_decoder(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> ImageDecoder:
    """Load the decoder of a diffusers folder's `vae`.

    Raises ModelLoadError for settings that the installed diffusers does not know and for weights that do not fit.
    """
    autoencoder = _load(folder, device, dtype, ("encoder", "quant_conv"))
    mean, deviation = _statistics(autoencoder, _read_eps(folder))

    def restore(latents: torch.Tensor) -> torch.Tensor:
        return F.pixel_shuffle(latents.squeeze(2) * deviation + mean, FOLD)[:, :, None]

    return ImageDecoder(autoencoder, restore)


def load_encoder(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> tuple[Encode, str]:
    """Load the encoder of a diffusers folder's `vae`, and its name for the report. Raises ModelLoadError."""
    autoencoder = _load(folder, device, dtype, ("decoder", "post_quant_conv"))
    mean, deviation = _statistics(autoencoder, _read_eps(folder))

    def normalised(mode: torch.Tensor) -> torch.Tensor:
        folded = F.pixel_unshuffle(mode.squeeze(2), FOLD)
        return ((folded - mean) / deviation)[:, :, None]

    return encode_with(autoencoder, normalised, is_video=False), f"{type(autoencoder).__name__}'s encoder"


def _load(folder: AnyFolder, device: torch.device, dtype: torch.dtype, left_out: tuple[str, ...]) -> Any:
    """Load the autoencoder. The statistics stay in float32, whatever dtype the rest computes in."""
    return AUTOENCODER.load(folder, device, dtype, left_out=left_out, stays_float32=lambda name: name.startswith("bn."))


def _read_eps(folder: AnyFolder) -> float:
    return read_config(folder, COMPONENT).number("batch_norm_eps", 1e-4)


def _statistics(autoencoder: Any, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and standard deviation of every folded channel, [1, channels, 1, 1]."""
    mean, variance = (of.view(1, -1, 1, 1) for of in (autoencoder.bn.running_mean, autoencoder.bn.running_var))
    return mean, (variance + eps).sqrt()
