"""Latents of models that make single images."""

from __future__ import annotations

from dataclasses import dataclass

from diffusion_runtime.errors import RequestError
from diffusion_runtime.models.geometry import LatentGeometry


@dataclass(frozen=True)
class ImageGeometry(LatentGeometry):
    """A LatentGeometry of one frame."""

    def check(self, height: int, width: int, num_frames: int) -> None:
        """See LatentGeometry.check. Raises RequestError for more than one frame, too."""
        super().check(height, width, num_frames)
        if num_frames != 1:
            raise RequestError(f"num_frames: this model makes images, expected 1, got {num_frames}; leave it out")
