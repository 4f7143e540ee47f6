"""Latent geometry: how pixels become latents and latents become tokens, of videos and of single images."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from diffusion_runtime.core.model_folder import ConfigFile
from diffusion_runtime.errors import RequestError


@dataclass(frozen=True)
class ClipSize:
    """Size of a clip: height and width in pixels, num_frames (1 is an image), fps in frames per second."""

    height: int
    width: int
    num_frames: int
    fps: int


@dataclass(frozen=True)
class LatentParts:
    """Parts of a sample. video: [batch, channels, frames, height, width]. audio: [batch, channels, length, bins], None
    in a model that makes pictures alone."""

    video: torch.Tensor
    audio: torch.Tensor | None = None


@dataclass(frozen=True)
class LatentGeometry:
    """Sizes by which pixels become latents, and latents become tokens.

    num_channels: of a latent. spatial_factor: pixels a latent in height and width. temporal_factor: frames a latent
    after the first one, which holds a single frame. patch: latents per token in (frames, height, width).
    token_multiple: heights and widths are a multiple of so many tokens.
    num_latents_before: latent frames before those of a clip, which are denoised and decoded with them and whose frames
    are left out, in models that were trained so.
    """

    num_channels: int
    spatial_factor: int
    temporal_factor: int
    patch: tuple[int, int, int]
    num_latents_before: int = field(default=0, kw_only=True)
    token_multiple: int = field(default=1, kw_only=True)

    # Whether a sample holds sound as well.
    makes_sound: ClassVar[bool] = False
    # Whether an image to end with is a frame of tokens behind the grid's, which the flow shift counts.
    appends_last_image: ClassVar[bool] = False

    @property
    def keyframe_intervals(self) -> tuple[int, ...]:
        """Numbers of frames from one keyframe to the next, of models that make keyframes beside a video."""
        return ()

    @property
    def num_frames_before(self) -> int:
        """Decoded frames before those of a clip, which are left out."""
        return self.temporal_factor * self.num_latents_before

    @property
    def frame_rule(self) -> tuple[int, int]:
        """(step, remainder): numbers of frames are a multiple of step plus remainder."""
        step = self.temporal_factor * self.patch[0]
        return step, (1 - self.temporal_factor) % step

    def frames_of_latents(self, num_frames: int) -> tuple[int, ...]:
        """Return the frames that each latent frame of a clip stands for."""
        return 1, *[self.temporal_factor] * ((num_frames - 1) // self.temporal_factor)

    def sample_shape(self, size: ClipSize) -> tuple[int, ...]:
        """Return the shape of one sample as samplers and transformers see it: `latent_shape`, for a model that makes
        pictures alone.

        Raises RequestError for sizes that do not divide.
        """
        return self.latent_shape(size.height, size.width, size.num_frames)

    def clip_of(self, latents: torch.Tensor, size: ClipSize) -> torch.Tensor:
        """Return samples as they are denoised without what is behind the clip, [batch, *sample_shape]."""
        return latents

    def parts(self, latents: torch.Tensor, size: ClipSize) -> LatentParts:
        """Samples [batch, *sample_shape] taken apart, as decoders take them."""
        return LatentParts(latents)

    def join(self, video: torch.Tensor, audio: torch.Tensor | None = None) -> torch.Tensor:
        """Samples [batch, *sample_shape] of their parts: what `parts` takes apart."""
        assert audio is None
        return video

    def latent_shape(self, height: int, width: int, num_frames: int) -> tuple[int, int, int, int]:
        """(channels, frames, height, width) of the latents of a clip of height x width pixels.

        Raises RequestError for sizes that do not divide.
        """
        self.check(height, width, num_frames)
        num_latent_frames = (num_frames - 1) // self.temporal_factor + 1 + self.num_latents_before
        return self.num_channels, num_latent_frames, height // self.spatial_factor, width // self.spatial_factor

    def num_tokens(self, height: int, width: int, num_frames: int) -> int:
        """Grid tokens of such a clip, after patchify. Raises RequestError for sizes that do not divide."""
        return math.prod(self.grid(self.latent_shape(height, width, num_frames)))

    def tokens_of_frame(self, height: int, width: int) -> int:
        """Return the tokens of one latent frame of such a clip, of a size that divides."""
        rows, columns = (self.spatial_factor * patch for patch in self.patch[1:])
        return (height // rows) * (width // columns)

    def check(self, height: int, width: int, num_frames: int) -> None:
        """Raises RequestError for sizes that do not divide; it names the nearest ones that do, below and above."""
        rules = (
            ("height", height, self.token_multiple * self.spatial_factor * self.patch[1], 0),
            ("width", width, self.token_multiple * self.spatial_factor * self.patch[2], 0),
            ("num_frames", num_frames, *self.frame_rule),
        )
        wrong = [misfit(*rule) for rule in rules if rule[1] < 1 or rule[1] % rule[2] != rule[3] % rule[2]]
        if wrong:
            raise RequestError("; ".join(wrong))

    def check_halving(self, height: int, width: int, levels: int, field: str = "progressive_resolution") -> None:
        """Raises RequestError for a height and a width that are no whole tokens once halved `levels` times; it names
        the nearest ones that are, and the field that halves them."""
        sizes = (("height", height, self.patch[1]), ("width", width, self.patch[2]))
        pixels = self.token_multiple * self.spatial_factor
        rules = [(name, size, pixels * patch << levels, 0) for name, size, patch in sizes]
        wrong = [misfit(*rule) for rule in rules if rule[1] % rule[2]]
        if wrong:
            raise RequestError(f"{'; '.join(wrong)}, or leave out {field}, which halves them")

    def grid(self, latent_shape: tuple[int, ...]) -> tuple[int, int, int]:
        """(frames, height, width) in tokens of latents whose shape ends in frames, height, width.

        Raises RequestError when the latents are not a whole number of patches.
        """
        sizes = latent_shape[-3:]
        if any(size < 1 or size % patch for size, patch in zip(sizes, self.patch, strict=True)):
            raise RequestError(
                f"latents of {sizes[0]} x {sizes[1]} x {sizes[2]} (frames x height x width) are not a whole number of "
                f"{self.patch[0]} x {self.patch[1]} x {self.patch[2]} patches"
            )
        frames, height, width = (size // patch for size, patch in zip(sizes, self.patch, strict=True))
        return frames, height, width


def misfit(name: str, value: int, step: int, remainder: int) -> str:
    """Return why `value` does not fit "a multiple of step, plus remainder", with the nearest values that do."""
    below = value - (value - remainder) % step
    fitting = [str(size) for size in (below, below + step) if size >= 1]
    rule = f"a multiple of {step}" if remainder == 0 else f"a multiple of {step} plus {remainder}"
    return f"{name}: expected {rule}, got {value}; use {' or '.join(fitting)}"


@dataclass(frozen=True)
class ImageGeometry(LatentGeometry):
    """A LatentGeometry of one frame."""

    def check(self, height: int, width: int, num_frames: int) -> None:
        """Check as LatentGeometry.check does, and raise RequestError for more than one frame."""
        super().check(height, width, num_frames)
        if num_frames != 1:
            raise RequestError(f"num_frames: this model makes images, expected 1, got {num_frames}; leave it out")


def read_num_channels(file: ConfigFile, key: str, expected: int, source: str, default: int | None = None) -> int:
    """Read the channels of latents from an autoencoder's config. Raises ModelLoadError where they are not `expected`,
    the number that `source` holds."""
    found = file.whole_number(key, default)
    if found != expected:
        raise file.error(key, f"{expected}, {source}", found)
    return found


def read_image_factor(file: ConfigFile) -> int:
    """Read how many pixels a latent of AutoencoderKL covers in height and width. Raises ModelLoadError."""
    widths = file.values.get("block_out_channels")
    if not isinstance(widths, list) or not widths:
        raise file.error("block_out_channels", "a list with the width of every level", widths)
    return int(2 ** (len(widths) - 1))


def read_frame_factor(file: ConfigFile, default: list[bool]) -> int:
    """Read how many pixels a latent of AutoencoderKLQwenImage covers in height and width. Raises ModelLoadError."""
    halvings = file.values.get("temperal_downsample", default)
    if not isinstance(halvings, list) or not halvings:
        raise file.error("temperal_downsample", "a list with true or false for every level", halvings)
    return int(2 ** len(halvings))
