"""LTX-2's latents: a video and its sound, which share every noise level."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.core.sound_geometry import SoundGeometry
from diffusion_runtime.errors import RequestError


@dataclass(frozen=True)
class LTX2Geometry(SoundGeometry):
    """Geometry of a clip. min_latents: in height and width, as many as the decoder needs."""

    min_latents: int = 1

    appends_last_image: ClassVar[bool] = True

    def check(self, height: int, width: int, num_frames: int) -> None:
        """Check a size. Raises RequestError for a picture too small to decode, too."""
        super().check(height, width, num_frames)
        smallest = self.min_latents * self.spatial_factor
        for name, value in (("height", height), ("width", width)):
            if value < smallest:
                raise RequestError(
                    f"{name}: expected {smallest} or more, got {value}: this model's decoder mirrors the edges of a "
                    "picture, and there is too little between them"
                )

    def last_keyframe(self, size: ClipSize) -> int:
        """Return the frame of the video that the last latent begins with."""
        return (self.video_shape(size)[1] - 2) * self.temporal_factor + 1
