"""MiniMax-H3's latents: a video, 17 frames of which are 5 latent frames, and its sound on two sides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.core.sound_geometry import SoundGeometry
from diffusion_runtime.errors import RequestError

# The only frame rate of the training, of which the sound's 40 latents a second are five thirds.
FPS = 24
_CHUNK_FRAMES, _CHUNK_LATENTS = 17, 5
# A clip ends with a part of a chunk, behind one chunk or more.
_LAST_FRAMES, _LAST_LATENTS = 5, 2
# Of the published model, 5 to 15 seconds: its authors' pipeline refuses others.
FRAME_LIMITS = 124, 345


@dataclass(frozen=True)
class MiniMaxH3Geometry(SoundGeometry):
    """Geometry of a clip. temporal_factor: of most latents; the first of five is a frame alone. frame_limits: fewest
    and most frames that the model was made for."""

    appends_last_image: ClassVar[bool] = True
    frame_limits: tuple[int, int] = FRAME_LIMITS

    @property
    def frame_rule(self) -> tuple[int, int]:
        return _CHUNK_FRAMES, _LAST_FRAMES

    def check(self, height: int, width: int, num_frames: int) -> None:
        """Check a size. Raises RequestError for a shorter or longer clip than the model was made for, too."""
        fewest, most = self.frame_limits
        if not fewest <= num_frames <= most:
            seconds = f"{num_frames / FPS:.1f} s; the model makes {fewest / FPS:.1f} to {most / FPS:.1f} s"
            nearest = fewest if num_frames < fewest else most
            raise RequestError(f"num_frames: expected {fewest} to {most}, got {num_frames}, {seconds}: use {nearest}")
        super().check(height, width, num_frames)

    def latent_shape(self, height: int, width: int, num_frames: int) -> tuple[int, int, int, int]:
        self.check(height, width, num_frames)
        num_latents = (num_frames - _LAST_FRAMES) // _CHUNK_FRAMES * _CHUNK_LATENTS + _LAST_LATENTS
        return self.num_channels, num_latents, height // self.spatial_factor, width // self.spatial_factor

    def audio_shape(self, size: ClipSize) -> tuple[int, int, int]:
        """Return (channels, length, sides). Raises RequestError for another frame rate than the model's."""
        if size.fps != FPS:
            raise RequestError(
                f"fps: this model makes {FPS} frames a second with their sound, got {size.fps}; leave it out"
            )
        return super().audio_shape(size)
