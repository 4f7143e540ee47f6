"""The Qwen-Image autoencoder, as diffusers computes it: that of a video model, fine-tuned on images."""

from __future__ import annotations

from pathlib import Path

import torch

from diffusion_runtime.models.autoencoder import COMPONENT, DiffusersComponent
from diffusion_runtime.models.video_decoder import VideoDecoder, restore_by_config

AUTOENCODER = DiffusersComponent(
    COMPONENT, "diffusers.models.autoencoders.autoencoder_kl_qwenimage", "AutoencoderKLQwenImage"
)


def load_decoder(folder: Path, device: torch.device, dtype: torch.dtype) -> VideoDecoder:
    """The decoder of a diffusers folder's `vae`.

    Raises ModelLoadError for settings that the installed diffusers does not know and for weights that do not fit.
    """
    restore = restore_by_config(folder, device)
    autoencoder = AUTOENCODER.load(folder, device, dtype, left_out=("encoder", "quant_conv"))
    # Its class counts the encoder's convolutions at every decode.
    autoencoder.encoder = torch.nn.Identity()
    return VideoDecoder(autoencoder, restore)
