"""The Qwen-Image 2.1 autoencoder: of pictures with transparency, whose latents are a sixteenth of their sides."""

from __future__ import annotations

from typing import Any

import torch

from diffusion_runtime.core.model_folder import AnyFolder, read_config
from diffusion_runtime.decoders.autoencoder import COMPONENT, DiffusersComponent
from diffusion_runtime.decoders.sample_decoder import Tiling, WholeDecoder
from diffusion_runtime.decoders.video_decoder import (
    Decoders,
    FusedDecoder,
    Restore,
    VideoDecoder,
    read_statistics,
    restore_by_config,
)

AUTOENCODER = DiffusersComponent(
    COMPONENT,
    "diffusers.models.autoencoders.autoencoder_kl_qwenimage21",
    "AutoencoderKLQwenImage21",
    encoder_parts=("encoder", "quant_conv"),
)
RGB, RGBA = 3, 4


class QwenImage21Decoder(VideoDecoder):
    """AutoencoderKLQwenImage21's decoder. Computes in its weights' dtype. A transparent picture is laid over white, as
    frames have no transparency; `implementation` mentions it."""

    def __init__(self, autoencoder: Any, restore: Restore) -> None:
        whole = WholeDecoder(lambda raw: _decode_over_white(autoencoder, raw), 1)
        super().__init__(autoencoder, restore, Decoders(whole, ()), tiling(autoencoder))

    def _describe(self, fused: FusedDecoder | None) -> None:
        super()._describe(fused)
        if self._autoencoder.config.out_channels == RGBA:
            self.implementation += ", laid over white"


def tiling(autoencoder: Any) -> Tiling:
    """Return the tiles: 512 pixels a side that overlap by 128; diffusers' 256 would be 16 latents."""
    pixels = int(autoencoder.spatial_compression_ratio)
    return Tiling(512 // pixels, 384 // pixels, pixels, keeps_ends=True)


def _decode_over_white(autoencoder: Any, raw: torch.Tensor) -> torch.Tensor:
    """Decode to float32 in [-1, 1], [batch, 3, 1, height, width]."""
    picture: torch.Tensor = autoencoder.decode(raw, return_dict=False)[0]
    return over_white(picture.float().mul_(0.5).add_(0.5).clamp_(0.0, 1.0)).mul_(2.0).sub_(1.0)


def over_white(picture: torch.Tensor) -> torch.Tensor:
    """Return [batch, 3, ...] in [0, 1], of a picture with or without a fourth channel of opacity."""
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
