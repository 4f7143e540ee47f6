"""The Wan autoencoder: its decoder behind LatentDecoder, and its encoder, diffusers' module, for a first image."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.core.model_folder import MAX_SIZE, AnyFolder
from diffusion_runtime.decoders.autoencoder import COMPONENT, DiffusersComponent
from diffusion_runtime.decoders.causal_video_decoder import KNOWN, CausalVideoDecoder, decoding_half, exact_decoder
from diffusion_runtime.decoders.fused_norms import fuse_norms, use_last_taps, with_shared_weights
from diffusion_runtime.decoders.interface import LatentEncoder
from diffusion_runtime.decoders.video_decoder import (
    MIN_DECIBELS,
    differs_by,
    has_kernels,
    read_statistics,
    restore_by_config,
)
from diffusion_runtime.layers.convolution import OneDnnConvolutions
from diffusion_runtime.models.interface import FrameConditioner, ImageCondition
from diffusion_runtime.report.attention_report import LibraryAttention
from diffusion_runtime.startup.importing import raised_line
from diffusion_runtime.untrusted.known_settings import Allows, either, whole

logger = logging.getLogger("diffusion_runtime")

_SIZE = whole(1, MAX_SIZE)

_KNOWN: Mapping[str, Allows] = {
    **KNOWN,
    "decoder_base_dim": lambda value: value is None or _SIZE(value),
    "is_residual": either(True, False),
    "in_channels": _SIZE,
    "out_channels": _SIZE,
    "patch_size": lambda value: value is None or _SIZE(value),
    "scale_factor_temporal": _SIZE,
    "scale_factor_spatial": _SIZE,
}


def _decoding_half(settings: Mapping[str, Any]) -> nn.Module | None:
    return decoding_half(
        "AutoencoderKLWan",
        settings,
        _KNOWN,
        base_dim=settings.get("decoder_base_dim"),
        out_channels=settings.get("out_channels", 3),
        patch_size=settings.get("patch_size") or 1,
        is_residual=settings.get("is_residual", False),
        spatial_compression_ratio=settings.get("scale_factor_spatial", 8),
    )


AUTOENCODER = DiffusersComponent(
    COMPONENT,
    "diffusers.models.autoencoders.autoencoder_kl_wan",
    "AutoencoderKLWan",
    {"clip_output": "no version of the class has read it: what it decodes is always cut to [-1, 1]"},
    # The halves of the autoencoder; the one that is not needed is neither built nor read.
    encoder_parts=("encoder", "quant_conv"),
    decoding_half=_decoding_half,
    reads_quantized=True,
)
_DECODER_PARTS = ("decoder", "post_quant_conv")


@dataclass(frozen=True)
class FusedEncoder:
    """An autoencoder around the module's weights. min_decibels: what its latents must reach against the module's,
    infinity for the same bits. description: for the report."""

    autoencoder: Any
    min_decibels: float
    description: str


# Frames that the first clip of a size is compared on: those of one latent frame without a history, and one with one.
_NUM_COMPARED = 5


class WanImageConditioner(FrameConditioner):
    """AutoencoderKLWan's encoder: an image as the first latent frame of a video.

    The first of the fused encoders whose latents agree with diffusers' module encodes; the module itself where none
    does. The first image of every size, or the beginning of a clip, is encoded by both. fused: by preference.
    `implementation` names the one that runs. one_frame: whether it encodes images, each by itself, and no clips.
    """

    library = "diffusers"

    def __init__(
        self,
        autoencoder: Any,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        fused: Sequence[FusedEncoder] | None = None,
        *,
        one_frame: bool = True,
    ) -> None:
        weight = next(autoencoder.parameters())
        self._autoencoder = autoencoder
        self._statistics = mean, std
        self._mean = torch.tensor(mean, device=weight.device).view(1, -1, 1, 1, 1)
        self._std = torch.tensor(std, device=weight.device).view(1, -1, 1, 1, 1)
        self._one_frame = one_frame
        self._fused = list(_exact_encoders(autoencoder, one_frame=one_frame) if fused is None else fused)
        self._compared: set[tuple[int, ...]] = set()

    @property
    def implementation(self) -> str:
        """Name of the encoder that runs, for the report."""
        name = f"{type(self._autoencoder).__name__}'s encoder"
        return f"{name}, {self._fused[0].description}" if self._fused else name

    def fast(self) -> WanImageConditioner:
        encoder = _fused_encoder(self._autoencoder, is_exact=False, one_tap=self._one_frame)
        description = f"norm and SiLU fused, {'one tap, ' if self._one_frame else ''}fast"
        fused = FusedEncoder(encoder, MIN_DECIBELS, description)
        return WanImageConditioner(self._autoencoder, *self._statistics, [fused], one_frame=self._one_frame)

    @property
    def libraries(self) -> tuple[LibraryAttention, ...]:
        return (LibraryAttention("vae encoder", self.library, self.implementation),)

    def encode(self, image: torch.Tensor, size: ClipSize, last_image: torch.Tensor | None = None) -> ImageCondition:
        return ImageCondition(self.encode_frames(as_pixels(image)[:, None]))

    def encode_frames(self, frames: torch.Tensor) -> torch.Tensor:
        """Return the mode of the encoder's distribution, normalised in float32, [1, channels, latent frames, height,
        width].

        frames: [3, frames, height, width] in [-1, 1].
        """
        weight = next(self._autoencoder.parameters())
        with torch.inference_mode(), OneDnnConvolutions():
            mode = self._encode(frames[None].to(weight.device, weight.dtype))
        return (mode.float() - self._mean) / self._std

    def _encode(self, pixels: torch.Tensor) -> torch.Tensor:
        size = tuple(pixels.shape[-2:])
        if self._fused and size not in self._compared:
            self._compared.add(size)
            beginning = pixels[:, :, :_NUM_COMPARED]
            modes = self._compare(beginning, _mode(self._autoencoder, beginning))
            if beginning.shape == pixels.shape:
                return modes
        return _mode(self._fused[0].autoencoder if self._fused else self._autoencoder, pixels)

    def _compare(self, pixels: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
        """Drop fused encoders up to the first whose latents are as expected. Returns those that count: an image has the
        same ones every time."""
        while self._fused:
            fused = self._fused[0]
            try:
                found = _mode(fused.autoencoder, pixels)
            except torch.OutOfMemoryError:
                raise
            # Any exception: a kernel compiler may raise anything on a machine that it does not know.
            except Exception as error:
                reason: str | None = raised_line(error)
            else:
                # Latents have no range of their own: in units of their deviation.
                scale = expected.float().nan_to_num().std().clamp_min(1e-12)
                one, other = expected.nan_to_num() / scale, found.nan_to_num() / scale
                reason = differs_by(one, other, fused.min_decibels, "latents")
            if reason is None:
                return found
            del self._fused[0]
            self._compared = {tuple(pixels.shape[-2:])}
            logger.warning("encoding the image: %s is left out on this machine: %s", fused.description, reason)
        return expected


def _mode(autoencoder: Any, pixels: torch.Tensor) -> torch.Tensor:
    mode: torch.Tensor = autoencoder.encode(pixels).latent_dist.mode()
    return mode


def as_pixels(image: torch.Tensor) -> torch.Tensor:
    """Convert [..., height, width, 3], uint8, to [3, ..., height, width] in [-1, 1], float32."""
    return image.to(torch.float32).div(127.5).sub(1.0).movedim(-1, 0)


def _exact_encoders(autoencoder: Any, *, one_frame: bool) -> list[FusedEncoder]:
    """Return the exact encoders where the weights are on a CUDA GPU and Triton can be imported. The comparison decides
    whether a convolution of one tap has the bits of one with zeros before it."""
    if not has_kernels(autoencoder):
        return []
    bits = "norm and SiLU fused, bit-identical"
    whole = FusedEncoder(_fused_encoder(autoencoder, is_exact=True, one_tap=False), math.inf, bits)
    if not one_frame:
        return [whole]
    return [
        FusedEncoder(_fused_encoder(autoencoder, is_exact=True, one_tap=True), math.inf, f"{bits}, one tap"),
        whole,
    ]


def _fused_encoder(autoencoder: Any, *, is_exact: bool, one_tap: bool) -> Any:
    """Build a fused encoder. one_tap: convolutions read the one frame that there is, and not the zeros before it."""
    module = with_shared_weights(autoencoder)
    fuse_norms(module.encoder, is_exact=is_exact)
    if one_tap:
        use_last_taps(module.encoder)
    return module


def load_decoder(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> CausalVideoDecoder:
    """Load the decoder of a diffusers folder's `vae`.

    Raises ModelLoadError for settings that the installed diffusers does not know and for weights that do not fit.
    """
    restore = restore_by_config(folder, device)
    return exact_decoder(AUTOENCODER.load_decoder(folder, device, dtype), restore)


def load_clip_encoder(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> LatentEncoder:
    """Load the encoder of `vae` for clips. Raises what load_decoder raises."""
    encoder = load_image_conditioner(folder, device, dtype, one_frame=False)
    return LatentEncoder(lambda frames: encoder.encode_frames(frames[0]), lambda: encoder.libraries)


def load_image_conditioner(
    folder: AnyFolder, device: torch.device, dtype: torch.dtype, *, one_frame: bool = True
) -> WanImageConditioner:
    """Load the encoder of `vae`. one_frame: of WanImageConditioner. Raises what load_decoder raises."""
    mean, std = read_statistics(folder)
    autoencoder = AUTOENCODER.load(folder, device, dtype, left_out=_DECODER_PARTS)
    return WanImageConditioner(autoencoder, mean, std, one_frame=one_frame)
