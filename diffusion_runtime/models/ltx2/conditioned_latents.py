"""Flat latents of an LTX-2 clip with its conditions: images at frames of their own behind it, a first image, a sound.

An image of strength 1 is put back wherever clean latents are asked for. One of strength s below 1 is denoised: the
model sees s parts of it and 1 - s parts of the latents, at timestep t * (1 - s), and so does the decoder at the end. A
sampler steps the latents themselves, which are at its noise level everywhere, whatever noise it adds. For Euler's steps
this is what diffusers' LTX2ConditionPipeline computes, which mixes before the first step, and every prediction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from diffusion_runtime.models.interface import DenoiserInputs
from diffusion_runtime.models.ltx2.geometry import LTX2Geometry


@dataclass(frozen=True)
class ConditionedLatents:
    """The conditions of a request, and the places that they have in flat latents, [B, length]."""

    geometry: LTX2Geometry
    inputs: DenoiserInputs

    @property
    def length(self) -> int:
        """Numbers of the clip: its pictures, then its sound."""
        return math.prod(self.geometry.sample_shape(self.inputs.size))

    @property
    def has_first_image(self) -> bool:
        image = self.inputs.image
        return image is not None and image.latents.shape[2] > 0

    @property
    def noises_first(self) -> bool:
        """True where the first frame is an image that does not count in full."""
        image = self.inputs.image
        return image is not None and self.has_first_image and image.first_strength < 1

    @property
    def keyframes(self) -> list[tuple[torch.Tensor, tuple[int, float]]]:
        """Latents of each keyframe with its frame and strength; those of strength 1 come first."""
        image = self.inputs.image
        return [] if image is None else list(zip(image.further, image.places, strict=True))

    def apart(self, latents: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Return views of the clip's flat latents, and of the keyframes after it, [B, channels, 1, height, width]:
        those that are denoised with it, or all (`complete`)."""
        image, length = self.inputs.image, self.length
        if image is None or not image.further or latents.shape[1] == length:
            return latents, ()
        frames = torch.unflatten(latents[:, length:], 1, (-1, *image.further[0].shape[1:]))
        return latents[:, :length], frames.unbind(1)

    def mixed(self, latents: torch.Tensor) -> torch.Tensor:
        """Return the latents; where an image counts in part, s parts of it and 1 - s parts of them."""
        images = self._noised_images()
        mixed = latents.clone() if images else latents
        for place, (clean, strength) in zip(self._noised_places(mixed), images, strict=True):
            place.mul_(1 - strength).add_(clean.to(place.device, place.dtype), alpha=strength)
        return mixed

    def at_own_levels(self, velocity: torch.Tensor) -> torch.Tensor:
        """Return the velocity with which data is predicted, as x - sigma * v. Beside keyframes that the model makes, an
        image of strength s has (1 - s) of it, of a noise level of its own: as the pipeline of diffusers' that makes
        them, and unlike that for images alone."""
        images = self._noised_images()
        if not images or not (self.inputs.image and self.inputs.image.num_generated):
            return velocity
        scaled = velocity.clone()
        for place, (_, strength) in zip(self._noised_places(scaled), images, strict=True):
            place.mul_(1 - strength)
        return scaled

    def with_noised_images(self, clean: torch.Tensor) -> torch.Tensor:
        """Return clean latents of the clip, [B, length], with what is denoised with it: images that count in part, the
        first frame's in its place, keyframes behind the clip, and behind those keyframes that the model makes. clean:
        of another stage, [B, length + ...], of which the last are made keyframes."""
        images = self._noised_images()
        if not images:
            return clean[:, : self.length]
        clean = clean.expand(len(images[0][0]), -1)
        clip = clean[:, : self.length]
        image = self.inputs.image
        assert image is not None
        given = [latents.flatten(1) for latents, (_, s) in self.keyframes if s < 1]
        given = [each.to(clip.device, clip.dtype) for each in given[: len(given) - image.num_generated]]
        num_made = image.num_generated * math.prod(image.further[0].shape[1:]) if image.further else 0
        whole = torch.cat([clip, *given, clean[:, clean.shape[1] - num_made :]], dim=1)
        if self.noises_first:
            place = self._noised_places(whole)[0]
            place.copy_(images[0][0])
        return whole

    def complete(self, latents: torch.Tensor) -> torch.Tensor:
        """Return the latents with keyframes in full after the clip, before those that are denoised."""
        clip, _ = self.apart(latents)
        kept = [latents for latents, (_, strength) in self.keyframes if strength == 1]
        behind = [latents.flatten(1).to(clip.device, clip.dtype) for latents in kept]
        return self.settled(torch.cat([clip, *behind, latents[:, clip.shape[1] :]], dim=1))

    def settled(self, latents: torch.Tensor) -> torch.Tensor:
        """Return the latents with a first image and a sound that count in full put back."""
        if self.inputs.image is None:
            return latents
        clip, _ = self.apart(latents)
        parts = self.geometry.parts(clip, self.inputs.size)
        assert parts.audio is not None
        settled = self.geometry.join(self.with_image(parts.video), self.sound(parts.audio))
        return torch.cat([settled, latents[:, clip.shape[1] :]], dim=1)

    def with_image(self, video: torch.Tensor) -> torch.Tensor:
        """Return latents [B, channels, frames, height, width] with the image as first frame, if it counts in full."""
        image = self.inputs.image
        if image is None or not self.has_first_image or self.noises_first:
            return video
        return torch.cat([image.latents.to(video.device, video.dtype), video[:, :, 1:]], dim=2)

    def sound(self, audio: torch.Tensor) -> torch.Tensor:
        """Return latents [B, channels, length, bins]: the given sound's, where there is one."""
        image = self.inputs.image
        if image is None or image.sound is None:
            return audio
        return image.sound.to(audio.device, audio.dtype)

    def _noised_images(self) -> list[tuple[torch.Tensor, float]]:
        """Return the images that do not count in full, each with its strength: the first frame's, then keyframes."""
        image = self.inputs.image
        if image is None:
            return []
        first = [(image.latents, image.first_strength)] if self.noises_first else []
        return [*first, *((latents, strength) for latents, (_, strength) in self.keyframes if strength < 1)]

    def _noised_places(self, latents: torch.Tensor) -> list[torch.Tensor]:
        """Return views of the frames of `_noised_images`, in its order."""
        clip, noised = self.apart(latents)
        first = [self.geometry.parts(clip, self.inputs.size).video[:, :, :1]] if self.noises_first else []
        return [*first, *noised]
