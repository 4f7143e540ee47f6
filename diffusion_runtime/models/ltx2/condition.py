"""Conditions of an LTX-2 video in addition to the text: images at its first frame, its end and any other, and a sound.

An image at another frame than the first is a keyframe: its tokens follow the grid's, at the position of the frame. With
strength s they, or those of the first frame, are at timestep t * (1 - s): at strength 1 clean in every forward pass,
below it latents and image mixed, and denoised with the clip. A keyframe that the model makes (`keyframe_interval`, the
slots of diffusers' LTX2DFRPipeline) is one of strength 0 without an image.

The sound's latents stay clean: its stream is at timestep 0 in every forward pass, and the pictures attend to it.
diffusers' pipelines call this frozen audio, and the authors audio to video.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.layers.log_mel import log_mel_spectrogram
from diffusion_runtime.media.audio import read_sound
from diffusion_runtime.media.images import read_image
from diffusion_runtime.models.first_frame_encoder import FirstFrameConditioner
from diffusion_runtime.models.interface import ImageCondition, ImageConditioner
from diffusion_runtime.models.ltx2.geometry import LTX2Geometry
from diffusion_runtime.report.attention_report import LibraryAttention
from diffusion_runtime.request.frame_conditions import FrameCondition
from diffusion_runtime.request.generation_request import GenerationRequest, image_paths


def conditions_of(request: GenerationRequest, geometry: LTX2Geometry, size: ClipSize) -> list[FrameCondition]:
    """Return the images of a request by their frames. The one to end with is at the first frame of the last latent."""
    found = [(0, path, 1.0) for path in image_paths(request, "image_path")]
    found += request.frame_conditions or ()
    last = geometry.last_keyframe(size)
    return found + [(last, path, 1.0) for path in image_paths(request, "last_image_path")]


class SoundEncoder:
    """Encoder of sound to normalised latents, the most likely ones of AutoencoderKLLTX2Audio.

    sample_rate, hop_length, num_bins: of the spectrograms that it encodes; factor: their frames per latent.
    """

    def __init__(self, autoencoder: Any, *, sample_rate: int, hop_length: int, num_bins: int, factor: int) -> None:
        self.autoencoder = autoencoder
        self.sample_rate = sample_rate
        self._hop_length = hop_length
        self._num_bins = num_bins
        self._factor = factor

    @property
    def library(self) -> LibraryAttention:
        """The code that encodes, for the report."""
        implementation = f"{type(self.autoencoder).__name__}'s encoder"
        return LibraryAttention("audio vae encoder", "diffusers", implementation)

    def num_samples(self, length: int) -> int:
        """Return the samples that so many latents stand for."""
        # As many frames of the spectrogram as the latents have: one more than there are hops.
        return (length * self._factor - 1) * self._hop_length

    def encode(self, samples: torch.Tensor) -> torch.Tensor:
        """Encode [2, number] to [1, channels, length, bins], float32. samples: as many as whole latents stand for."""
        weight = next(self.autoencoder.parameters())
        length = (samples.shape[1] // self._hop_length + 1) // self._factor
        mel = log_mel_spectrogram(samples, self.sample_rate, num_bins=self._num_bins, hop_length=self._hop_length)
        with torch.inference_mode():
            spectrogram = mel[None].to(weight.device, weight.dtype)
            raw: torch.Tensor = self.autoencoder.encode(spectrogram).latent_dist.mode().float()
        raw = raw[:, :, :length]
        assert raw.shape[2] == length, f"{raw.shape[2]} latents of {length}"
        mean, std = (
            statistic.to(raw.device, torch.float32).view(1, raw.shape[1], 1, raw.shape[3])
            for statistic in (self.autoencoder.latents_mean, self.autoencoder.latents_std)
        )
        normal: torch.Tensor = (raw - mean) / std
        return normal


class LTX2Conditioner(ImageConditioner):
    """Conditioner of an image, of a sound, or of both; each encoder is loaded when the first request needs it."""

    def __init__(
        self,
        geometry: LTX2Geometry,
        load_image_encoder: Callable[[], FirstFrameConditioner],
        load_sound_encoder: Callable[[], SoundEncoder],
    ) -> None:
        self._geometry = geometry
        self._load_image_encoder = load_image_encoder
        self._load_sound_encoder = load_sound_encoder
        self._image_encoder: FirstFrameConditioner | None = None
        self._sound_encoder: SoundEncoder | None = None

    @property
    def libraries(self) -> tuple[LibraryAttention, ...]:
        of_image = () if self._image_encoder is None else self._image_encoder.libraries
        if self._sound_encoder is None:
            return of_image
        return (*of_image, self._sound_encoder.library)

    def condition(self, request: GenerationRequest, size: ClipSize) -> ImageCondition:
        """Return the condition. Without a first image the latents have no frame."""
        channels, _, height, width = self._geometry.video_shape(size)
        first, first_strength = torch.empty(1, channels, 0, height, width), 1.0
        keyframes = []
        for frame, path, strength in conditions_of(request, self._geometry, size):
            latents = self._encoded(path, size, request.image_crf or 0)
            if frame == 0:
                first, first_strength = latents, strength
            else:
                keyframes.append((latents, (frame, strength)))
        keyframes.sort(key=lambda each: each[1][1] < 1)
        made = [(torch.zeros(1, channels, 1, height, width), (frame, 0.0)) for frame in request.generated_keyframes]
        further, places = zip(*keyframes, *made, strict=True) if keyframes or made else ((), ())
        return ImageCondition(
            first,
            further=further,
            sound=self._sound(request, size),
            places=places,
            first_strength=first_strength,
            num_generated=len(made),
        )

    def _encoded(self, path: str, size: ClipSize, crf: int) -> torch.Tensor:
        """Encode an image to one latent frame."""
        if self._image_encoder is None:
            self._image_encoder = self._load_image_encoder()
        pixels = torch.from_numpy(read_image(path, size.height, size.width, crf=crf))
        return self._image_encoder.encode(pixels, size).latents

    def _sound(self, request: GenerationRequest, size: ClipSize) -> torch.Tensor | None:
        if request.audio_path is None:
            return None
        if self._sound_encoder is None:
            self._sound_encoder = self._load_sound_encoder()
        encoder, (_, length, _) = self._sound_encoder, self._geometry.audio_shape(size)
        seconds = encoder.num_samples(length) / encoder.sample_rate
        samples = read_sound(request.audio_path, "audio_path", seconds, encoder.sample_rate).samples
        return encoder.encode(torch.from_numpy(samples))
