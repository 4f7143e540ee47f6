"""Geometry of a video and its sound, denoised as one flat tensor.

Samplers integrate one tensor element by element. So a sample is the video's numbers in the order (channels, frames,
height, width), then the sound's in the order (channels, length, bins).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from diffusion_runtime.core.latent_geometry import ClipSize, LatentGeometry, LatentParts
from diffusion_runtime.errors import RequestError


@dataclass(frozen=True)
class SoundGeometry(LatentGeometry):
    """Geometry of a video and its sound. num_audio_channels, num_audio_bins: of one moment of the sound. audio_rate:
    moments per second."""

    num_audio_channels: int
    num_audio_bins: int
    audio_rate: float

    makes_sound: ClassVar[bool] = True

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

    def audio_shape(self, size: ClipSize) -> tuple[int, int, int]:
        """Return (channels, length, bins). Raises RequestError for a clip too short for any sound."""
        length = round(size.num_frames / size.fps * self.audio_rate)
        if length < 1:
            raise RequestError(
                f"num_frames, fps: {size.num_frames} frames at {size.fps} a second are too short for any sound, of "
                f"which {self.audio_rate:g} moments make a second; use more frames or a smaller fps"
            )
        return self.num_audio_channels, length, self.num_audio_bins
