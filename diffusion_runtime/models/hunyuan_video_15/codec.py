"""The HunyuanVideo-1.5 autoencoder as diffusers computes it: its decoder behind LatentDecoder; its encoder, with
SigLIP, for image to video."""

from __future__ import annotations

from typing import Any

import torch

from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.core.model_folder import AnyFolder, read_config
from diffusion_runtime.decoders.autoencoder import COMPONENT, DiffusersComponent
from diffusion_runtime.decoders.interface import LatentEncoder
from diffusion_runtime.decoders.sample_decoder import Tiling
from diffusion_runtime.decoders.video_decoder import VideoDecoder, by_factor, norm_fused
from diffusion_runtime.layers.convolution import OneDnnConvolutions
from diffusion_runtime.models.interface import FrameConditioner, ImageCondition
from diffusion_runtime.report.attention_report import LibraryAttention
from diffusion_runtime.text_encoders import siglip
from diffusion_runtime.text_encoders.image_preparation import PicturePreparation
from diffusion_runtime.text_encoders.image_preparation import read_preparation as read_preparation_file

AUTOENCODER = DiffusersComponent(
    COMPONENT, "diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15", "AutoencoderKLHunyuanVideo15"
)


class FirstFrameEncoder:
    """AutoencoderKLHunyuanVideo15's encoder: an image as the first latent frame of a video, or a clip."""

    def __init__(self, autoencoder: Any, scaling_factor: float) -> None:
        self._autoencoder = autoencoder
        self._scaling_factor = scaling_factor

    def encode(self, image: torch.Tensor) -> torch.Tensor:
        """Return the most likely latents of an image, [1, channels, 1, height, width], float32. image: [height, width,
        3], uint8."""
        weight = next(self._autoencoder.parameters())
        pixels = image.to(weight.device, torch.float32).div(255).mul(2).sub(1).permute(2, 0, 1)[None, :, None]
        return self.encode_frames(pixels)

    def encode_frames(self, frames: torch.Tensor) -> torch.Tensor:
        """Return the latents of a clip, float32, [1, channels, latent frames, height, width]. frames: [1, 3, frames,
        height, width] in [-1, 1]."""
        weight = next(self._autoencoder.parameters())
        pixels = frames.to(weight.device)
        with torch.inference_mode(), OneDnnConvolutions():
            mode: torch.Tensor = self._autoencoder.encode(pixels.to(weight.dtype)).latent_dist.mode()
        return mode.float() * self._scaling_factor


def load_decoder(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> VideoDecoder:
    """Load the decoder of a diffusers folder's `vae`.

    As its authors run it, it decodes at most 256 x 256 pixels at a time and blends the overlaps.

    Raises ModelLoadError for settings that the installed diffusers does not know and for weights that do not fit.
    """
    autoencoder = AUTOENCODER.load(folder, device, dtype, left_out=("encoder",))
    decoders = norm_fused(
        autoencoder, lambda module, raw: module.decoder(raw), int(autoencoder.temporal_compression_ratio)
    )
    return VideoDecoder(autoencoder, by_factor(read_scaling_factor(folder)), decoders, tiling(autoencoder))


def tiling(autoencoder: Any) -> Tiling:
    """Return diffusers' tile sizes: 256 pixels a side that overlap by a quarter."""
    pixels, size = int(autoencoder.spatial_compression_ratio), int(autoencoder.tile_latent_min_height)
    return Tiling(size, int(size * (1 - autoencoder.tile_overlap_factor)), pixels, is_default=True)


def load_encoder(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> FirstFrameEncoder:
    """Load the encoder of a diffusers folder's `vae`. Raises what load_decoder raises."""
    return FirstFrameEncoder(
        AUTOENCODER.load(folder, device, dtype, left_out=("decoder",)), read_scaling_factor(folder)
    )


def load_clip_encoder(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> LatentEncoder:
    """Load the encoder of a diffusers folder's `vae` for clips. Raises what load_decoder raises."""
    library = LibraryAttention("vae encoder", "diffusers", f"{AUTOENCODER.class_name}'s encoder")
    return LatentEncoder(load_encoder(folder, device, dtype).encode_frames, lambda: (library,))


def read_scaling_factor(folder: AnyFolder) -> float:
    """Read the factor of latents. Raises ModelLoadError that names the file and the key."""
    return read_config(folder, COMPONENT).number("scaling_factor", 1.03682)


class HunyuanVideo15ImageConditioner(FrameConditioner):
    """The autoencoder's encoder and SigLIP."""

    def __init__(self, first_frame: FirstFrameEncoder, encoder: siglip.SiglipImageEncoder) -> None:
        self._first_frame = first_frame
        self._siglip = encoder

    @property
    def libraries(self) -> tuple[LibraryAttention, ...]:
        return (LibraryAttention("image_encoder", self._siglip.library, self._siglip.implementation),)

    def encode(self, image: torch.Tensor, size: ClipSize, last_image: torch.Tensor | None = None) -> ImageCondition:
        return ImageCondition(self._first_frame.encode(image), self._siglip.encode(image))


def load_image_conditioner(
    folder: AnyFolder, device: torch.device, dtype: torch.dtype
) -> HunyuanVideo15ImageConditioner:
    """Load `vae/`, `image_encoder/` and `feature_extractor/` of a diffusers folder. Raises ModelLoadError."""
    encoder = siglip.load_siglip(folder, device, dtype)
    return HunyuanVideo15ImageConditioner(load_encoder(folder, device, dtype), encoder)


def read_preparation(folder: AnyFolder) -> PicturePreparation:
    """Read how SigLIP's picture is prepared. Raises ModelLoadError that names the file and the key."""
    return read_preparation_file(folder / "feature_extractor" / "preprocessor_config.json")
