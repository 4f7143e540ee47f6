"""The HunyuanVideo autoencoder's decoder, as diffusers computes it, behind LatentDecoder."""

from __future__ import annotations

from pathlib import Path

import torch

from diffusion_runtime.model_folder import read_config
from diffusion_runtime.models.autoencoder import COMPONENT, DiffusersComponent
from diffusion_runtime.models.video_decoder import VideoDecoder, by_factor

AUTOENCODER = DiffusersComponent(
    COMPONENT, "diffusers.models.autoencoders.autoencoder_kl_hunyuan_video", "AutoencoderKLHunyuanVideo"
)


def load_decoder(folder: Path, device: torch.device, dtype: torch.dtype) -> VideoDecoder:
    """The decoder of a diffusers folder's `vae`.

    As its authors run it, it decodes 17 frames of at most 256 x 256 pixels at a time and blends what overlaps.

    Raises ModelLoadError for settings that the installed diffusers does not know and for weights that do not fit.
    """
    autoencoder = AUTOENCODER.load(folder, device, dtype, left_out=("encoder", "quant_conv"))
    autoencoder.enable_tiling()
    return VideoDecoder(autoencoder, by_factor(read_scaling_factor(folder)))


def read_scaling_factor(folder: Path) -> float:
    """What latents are multiplied with. Raises ModelLoadError that names the file and the key."""
    return read_config(folder, COMPONENT).number("scaling_factor", 0.476986)
