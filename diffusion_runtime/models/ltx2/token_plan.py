"""TokenPlan: which tokens a forward pass of LTX-2 has, of both streams, and at which timesteps they are."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from diffusion_runtime.core.token_layout import Extent, TokenLayout
from diffusion_runtime.models.interface import DenoiserInputs
from diffusion_runtime.models.ltx2.conditioned_latents import ConditionedLatents
from diffusion_runtime.models.ltx2.geometry import LTX2Geometry

# The model makes keyframes beside videos of up to 30 and of 60 frames per second; quicker ones than 30 are laid out as
# of 60 (diffusers' LTX2DFRPipeline).
_MOST_FPS_WITH_KEYFRAMES, _FPS_WITH_KEYFRAMES = 30, 60


@dataclass(frozen=True)
class TokenPlan:
    """Tokens of one forward pass.

    grid: of the video, frames x height x width. video: its latents [B, channels, frames, height, width], with a first
    image that counts in full; audio: those of the sound [B, channels, length, bins], which is_given says are a
    request's own. clean, noised: latents of keyframes, [B, channels, 1, height, width], whose tokens follow the grid's
    in this order: kept ones, and ones denoised with the clip. places: frame and strength of each. num_generated: how
    many of the last the model makes. first_strength: of a first image, None without one. fps: that positions are in.
    """

    grid: Extent
    video: torch.Tensor
    audio: torch.Tensor
    is_given: bool
    clean: tuple[torch.Tensor, ...]
    noised: tuple[torch.Tensor, ...]
    places: tuple[tuple[int, float], ...]
    num_generated: int
    first_strength: float | None
    fps: int

    @classmethod
    def of(cls, latents: torch.Tensor, inputs: DenoiserInputs, geometry: LTX2Geometry) -> TokenPlan:
        """Return the plan of flat latents, [B, *geometry.sample_shape(inputs.size)] and the keyframes behind the clip.
        Raises RequestError for latents of another clip."""
        conditions, image = ConditionedLatents(geometry, inputs), inputs.image
        clip, noised = conditions.apart(latents)
        parts = geometry.parts(clip, inputs.size)
        assert parts.audio is not None
        audio = conditions.sound(parts.audio)
        keyframes, num_generated = ((), 0) if image is None else (image.further, image.num_generated)
        fps = inputs.size.fps
        return cls(
            grid=geometry.grid(parts.video.shape),
            video=conditions.with_image(parts.video),
            audio=audio,
            is_given=audio is not parts.audio,
            # Keyframes in full come first, and precede the others whether the latents hold them or not.
            clean=keyframes[: len(keyframes) - len(noised)],
            noised=noised,
            places=() if image is None else image.places,
            num_generated=num_generated,
            first_strength=image.first_strength if image is not None and conditions.has_first_image else None,
            fps=_FPS_WITH_KEYFRAMES if num_generated and fps > _MOST_FPS_WITH_KEYFRAMES else fps,
        )

    @property
    def length(self) -> int:
        """Moments of the sound."""
        return self.audio.shape[2]

    @property
    def is_raster(self) -> bool:
        """True where tokens must stay in raster order: those of a first frame, at a timestep of their own, are a range
        in no other, and keyframes follow the grid's."""
        return self.first_strength is not None or bool(self.places)

    def sound_timestep(self, timestep: torch.Tensor) -> torch.Tensor:
        """Return the timestep of the sound, [B]: a given one is clean, and each stream reads the other at the other's
        time."""
        return torch.zeros_like(timestep) if self.is_given else timestep

    def first_timestep(self, timestep: torch.Tensor) -> torch.Tensor | None:
        """Return the timestep of a first image, [B]; None without one."""
        return None if self.first_strength is None else timestep * (1 - self.first_strength)

    def keyframe_ranges(self, start: int, stop: int) -> Iterator[tuple[slice, float]]:
        """Yield the tokens of neighbouring keyframes of one strength, with it. [start, stop): of all keyframes."""
        num_tokens = (stop - start) // max(1, len(self.places))
        for strength, group in itertools.groupby(strength for _, strength in self.places):
            end = start + num_tokens * len(list(group))
            yield slice(start, end), strength
            start = end

    def layout(self, num_keyframe_tokens: int, tile: Extent) -> TokenLayout:
        """Return the layout of the video's tokens. tile: of the grid's order."""
        return TokenLayout(self.grid, num_suffix_tokens=num_keyframe_tokens, tile=tile)
