"""LTX-2's latents: a video and its sound, denoised as one flat tensor.

Samplers integrate one tensor element by element, and both parts share every noise level. So a sample is the video's
numbers in the order (channels, frames, height, width), then the sound's in the order (channels, length, bins).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from diffusion_runtime.core.latent_geometry import ClipSize, LatentGeometry, LatentParts
from diffusion_runtime.errors import RequestError


@dataclass(frozen=True)
class LTX2Geometry(LatentGeometry):
    """Geometry of a video and its sound. num_audio_channels, num_audio_bins: of one moment of the sound. audio_rate:
    moments per second. min_latents: in height and width, as many as the decoder needs; min_frames: of the
    video, likewise."""

    num_audio_channels: int
    num_audio_bins: int
    audio_rate: float
    min_latents: int = 1
    min_frames: int = 1

    makes_sound: ClassVar[bool] = True
    appends_last_image: ClassVar[bool] = True

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

    def sample_shape(self, size: ClipSize) -> tuple[int, ...]:
        return (math.prod(self.video_shape(size)) + math.prod(self.audio_shape(size)),)

    def clip_of(self, latents: torch.Tensor, size: ClipSize) -> torch.Tensor:
        return latents[:, : math.prod(self.sample_shape(size))]

    def parts(self, latents: torch.Tensor, size: ClipSize) -> LatentParts:
        """Return both parts as views. Raises RequestError for latents of another clip."""
        video_shape, audio_shape = self.video_shape(size), self.audio_shape(size)
        lengths = [math.prod(video_shape), math.prod(audio_shape)]
        if latents.shape[1:] != (sum(lengths),):
            raise RequestError(
                f"latents: expected [batch, {sum(lengths)}] for {size.num_frames} frames of {size.height} x "
                f"{size.width} at {size.fps} a second with their sound, got {list(latents.shape)}"
            )
        video, audio = torch.split(latents, lengths, dim=1)
        return LatentParts(torch.unflatten(video, 1, video_shape), torch.unflatten(audio, 1, audio_shape))

    def join(self, video: torch.Tensor, audio: torch.Tensor | None = None) -> torch.Tensor:
        assert audio is not None
        return torch.cat([video.flatten(1), audio.flatten(1)], dim=1)

    def video_shape(self, size: ClipSize) -> tuple[int, int, int, int]:
        """Return (channels, frames, height, width). Raises RequestError for sizes that do not divide."""
        return self.latent_shape(size.height, size.width, size.num_frames)

    def last_keyframe(self, size: ClipSize) -> int:
        """Return the frame of the video that the last latent begins with."""
        return (self.video_shape(size)[1] - 2) * self.temporal_factor + 1

    def audio_shape(self, size: ClipSize) -> tuple[int, int, int]:
        """Return (channels, length, bins). Raises RequestError for a clip too short for any sound."""
        length = round(size.num_frames / size.fps * self.audio_rate)
        if length < 1:
            raise RequestError(
                f"num_frames, fps: {size.num_frames} frames at {size.fps} a second are too short for any sound, of "
                f"which {self.audio_rate:g} moments make a second; use more frames or a smaller fps"
            )
        return self.num_audio_channels, length, self.num_audio_bins
