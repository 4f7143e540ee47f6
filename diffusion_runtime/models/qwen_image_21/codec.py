"""The Qwen-Image 2.1 autoencoder: of pictures with transparency, whose latents are a sixteenth of their sides."""

from __future__ import annotations

from typing import Any

import torch

from diffusion_runtime.core.model_folder import AnyFolder, read_config
from diffusion_runtime.decoders.autoencoder import COMPONENT, DiffusersComponent
from diffusion_runtime.decoders.interface import LatentDecoder
from diffusion_runtime.decoders.video_decoder import Restore, read_statistics, restore_by_config

AUTOENCODER = DiffusersComponent(
    COMPONENT,
    "diffusers.models.autoencoders.autoencoder_kl_qwenimage21",
    "AutoencoderKLQwenImage21",
    encoder_parts=("encoder", "quant_conv"),
)
RGB, RGBA = 3, 4


class QwenImage21Decoder(LatentDecoder):
    """AutoencoderKLQwenImage21's decoder. Computes in its weights' dtype. A transparent picture is laid over white, as
    frames have no transparency; `implementation` mentions it."""

    library = "diffusers"

    def __init__(self, autoencoder: Any, restore: Restore) -> None:
        self._autoencoder = autoencoder
        self._restore = restore
        has_alpha = autoencoder.config.out_channels == RGBA
        self.implementation = type(autoencoder).__name__ + (", laid over white" if has_alpha else "")

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Decode; the normalisation is undone in float32, whatever dtype the decoder computes in."""
        weight = next(self._autoencoder.parameters())
        raw = self._restore(latents.to(weight.device, torch.float32)).to(weight.dtype)
        with torch.inference_mode():
            picture = self._autoencoder.decode(raw, return_dict=False)[0][:, :, 0]
            return over_white(picture.float().mul_(0.5).add_(0.5).clamp_(0.0, 1.0)).permute(0, 2, 3, 1)[:, None]


def over_white(picture: torch.Tensor) -> torch.Tensor:
    """Return [batch, 3, height, width] in [0, 1], of a picture with or without a fourth channel of opacity."""
    colours, opacity = picture[:, :RGB], picture[:, RGB:]
    return colours * opacity + (1 - opacity) if opacity.shape[1] else colours


def load_decoder(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> QwenImage21Decoder:
    """Load the decoder of a diffusers folder's `vae`.

    Raises ModelLoadError for settings that the installed diffusers does not know and for weights that do not fit.
    """
    restore = restore_by_config(folder, device)
    return QwenImage21Decoder(AUTOENCODER.load_decoder(folder, device, dtype), restore)


def check_autoencoder(folder: AnyFolder) -> None:
    """Check that the statistics fit the latents, and that pictures are RGB or RGBA. Raises ModelLoadError."""
    read_statistics(folder)
    file = read_config(folder, COMPONENT)
    if file.whole_number("out_channels", RGBA) not in (RGB, RGBA):
        raise file.error("out_channels", f"{RGBA}, red, green, blue and opacity, or {RGB}", file.values["out_channels"])
