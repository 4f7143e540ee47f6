"""The image a HunyuanVideo-1.5 video starts from: as its first latent frame, and as tokens of what it shows."""

from __future__ import annotations

from pathlib import Path

import torch

from diffusion_runtime.models.geometry import ClipSize
from diffusion_runtime.models.hunyuan_video_15 import codec
from diffusion_runtime.models.interface import ImageCondition, ImageConditioner
from diffusion_runtime.text_encoders import siglip


class HunyuanVideo15ImageConditioner(ImageConditioner):
    """The autoencoder's encoder and SigLIP."""

    def __init__(self, first_frame: codec.FirstFrameEncoder, encoder: siglip.SiglipImageEncoder) -> None:
        self._first_frame = first_frame
        self._siglip = encoder

    def encode(self, image: torch.Tensor, size: ClipSize) -> ImageCondition:
        """See ImageConditioner.encode."""
        return ImageCondition(self._first_frame.encode(image), self._siglip.encode(image))


def load_image_conditioner(folder: Path, device: torch.device, dtype: torch.dtype) -> HunyuanVideo15ImageConditioner:
    """`vae/`, `image_encoder/` and `feature_extractor/` of a diffusers folder. Raises ModelLoadError."""
    encoder = siglip.load_siglip(folder, device, dtype)
    return HunyuanVideo15ImageConditioner(codec.load_encoder(folder, device, dtype), encoder)


def read_preparation(folder: Path) -> siglip.PicturePreparation:
    """How SigLIP's picture is prepared. Raises ModelLoadError that names the file and the key."""
    return siglip.read_preparation(folder / "feature_extractor" / "preprocessor_config.json")
