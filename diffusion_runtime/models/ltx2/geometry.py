"""LTX-2's latents: a video and its sound, which share every noise level."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.core.sound_geometry import SoundGeometry
from diffusion_runtime.errors import RequestError


@dataclass(frozen=True)
class LTX2Geometry(SoundGeometry):
    """Geometry of a clip. min_latents: in height and width, as many as the decoder needs; min_frames: of the video,
    likewise."""

    min_latents: int = 1
    min_frames: int = 1

    appends_last_image: ClassVar[bool] = True

    @property
    def keyframe_intervals(self) -> tuple[int, ...]:
        # Those of diffusers' LTX2DFRPipeline: three or four latents.
        return 3 * self.temporal_factor, 4 * self.temporal_factor

    def check(self, height: int, width: int, num_frames: int) -> None:
        """Check a size. Raises RequestError for a clip too small to decode, too."""
        super().check(height, width, num_frames)
        side = self.min_latents * self.spatial_factor
        given = (("height", height, side), ("width", width, side), ("num_frames", num_frames, self.min_frames))
        for name, value, least in given:
            if value < least:
                raise RequestError(
                    f"{name}: expected {least} or more, got {value}: this decoder reads further around each place of a "
                    "clip, and there is too little of this one"
                )

    def last_keyframe(self, size: ClipSize) -> int:
        """Return the frame of the video that the last latent begins with."""
        return (self.video_shape(size)[1] - 2) * self.temporal_factor + 1
