"""Sizes of a batch: the clip, what is denoised of it, and the sizes that its steps run at."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch

from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.denoising.interface import Sampler
from diffusion_runtime.denoising.progressive_resolution import Stage, growth_level, plan_stages
from diffusion_runtime.denoising.registry import sampler_of
from diffusion_runtime.errors import RequestError
from diffusion_runtime.models.sampling import Sampling
from diffusion_runtime.request.frame_conditions import keyframes_between
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.request.progressive_options import ProgressiveSettings
from diffusion_runtime.rules.draft import Draft, filled


@dataclass(frozen=True)
class Sizes:
    """The sizes of the requests of a batch. shared: their values, resolved."""

    shared: GenerationRequest
    sampling: Sampling

    @property
    def clip(self) -> ClipSize:
        """The size of what is made."""
        shared = self.shared
        return ClipSize(filled(shared.height), filled(shared.width), filled(shared.num_frames), filled(shared.fps))

    @property
    def first(self) -> ClipSize:
        """The first stage's: half the height and width where there is a second one."""
        return self.halved(1) if self.shared.second_stage_sigmas else self.clip

    def halved(self, level: int) -> ClipSize:
        """Return the clip's size with height and width halved `level` times."""
        clip = self.clip
        return dataclasses.replace(clip, height=clip.height >> level, width=clip.width >> level)

    def sample_shape(self, size: ClipSize) -> tuple[int, ...]:
        """Return the shape of one sample as it is denoised: that of a clip of this size, with the reference images
        before it. Raises RequestError for sizes that do not divide."""
        geometry, control = self.sampling.geometry, self.sampling.control
        num_before = 0 if control is None else control.num_references(self.shared)
        num_frames = size.num_frames + num_before * geometry.temporal_factor
        shape = geometry.sample_shape(dataclasses.replace(size, num_frames=num_frames))
        if not self.num_noised_frames:
            return shape
        # Behind a flat sample: geometries that take images at any frame have no other.
        (length,) = shape
        return (length + self.num_noised_frames * math.prod(geometry.latent_shape(size.height, size.width, 1)),)

    @property
    def num_noised_frames(self) -> int:
        """Frames that are denoised with the clip, behind it: images at frames of their own, but for the first, that do
        not count in full, and generated keyframes."""
        in_part = sum(frame > 0 and strength < 1 for frame, _, strength in self.shared.frame_conditions or ())
        return in_part + len(self.shared.generated_keyframes)

    @property
    def note(self) -> str | None:
        """The sentence of the report about keyframes that are generated; None without any."""
        frames = self.shared.generated_keyframes
        if not frames:
            return None
        return (
            f"keyframe_interval: {len(frames)} keyframes are denoised with the video and left out of the file, at "
            f"frames {', '.join(map(str, frames))}"
        )

    def stages(self) -> tuple[Stage, ...]:
        """Plan the steps by size; none for a request whose steps are all at full size. Raises RequestError where the
        steps end before the full size."""
        text = self.shared.progressive_resolution
        progressive = None if text is None else ProgressiveSettings.parse(text)
        if progressive is None:
            return ()
        sampler = sampler_of(self.shared, self.sampling.scheduler, self.sampling.schedule)
        return self.stages_of(progressive, sampler)

    def stages_of(self, progressive: ProgressiveSettings, sampler: Sampler) -> tuple[Stage, ...]:
        """Plan the steps of `sampler` by size. progressive: with a spectrum."""
        options = progressive.options
        assert options.spectrum is not None
        sizes = [self.halved(level) for level in range(options.levels, 0, -1)]
        shapes = [self.sampling.geometry.sample_shape(size)[-2:] for size in sizes]
        growth_levels = [growth_level(options.spectrum, options.delta, *shape) for shape in shapes]
        return plan_stages([filled(step.sigma) for step in sampler.steps(torch.device("cpu"))], growth_levels)


def frame_rule_of(request: GenerationRequest | Draft, sampling: Sampling) -> tuple[int, int]:
    """Return the rule of the geometry for numbers of frames; with generated keyframes, whole intervals behind the first
    frame."""
    interval = request.keyframe_interval
    return sampling.geometry.frame_rule if interval is None else (interval, 1)


def check_keyframes(sizes: Sizes) -> None:
    """Raises RequestError for keyframes at intervals that the model does not make, and for a video of no whole number
    of them, whose last keyframe would be no frame of it."""
    interval, made = sizes.shared.keyframe_interval, sizes.sampling.geometry.keyframe_intervals
    if interval is None:
        return
    if interval not in made:
        use = " or ".join(map(str, made))
        raise RequestError(f"keyframe_interval: expected {use} frames, got {interval}; use --keyframe-interval {use}")
    num_frames = sizes.clip.num_frames
    if num_frames <= interval or num_frames % interval != 1:
        below = (num_frames - 1) // interval * interval + 1
        fitting = [str(number) for number in (below, below + interval) if number > interval]
        raise RequestError(
            f"num_frames: expected a multiple of keyframe_interval, {interval}, plus 1, got {num_frames}; use "
            f"{' or '.join(fitting)}"
        )


def check_second_stage(sizes: Sizes) -> None:
    """Raises RequestError for a clip of two stages whose size cannot be halved."""
    if not sizes.shared.second_stage_sigmas:
        return
    clip = sizes.clip
    sizes.sampling.geometry.check_halving(clip.height, clip.width, 1, "--upsampler-path")
    sizes.sampling.geometry.sample_shape(sizes.first)


def shift_of_size(request: GenerationRequest | Draft, sampling: Sampling) -> dict[str, Any]:
    """Return the flow shift that grows with the size, as a request value; nothing where none follows from it. Raises
    RequestError for sizes that do not divide."""
    height, width, num_frames = request.height, request.width, request.num_frames
    num_steps = request.num_inference_steps
    if height is None or width is None or num_frames is None or num_steps is None:
        return {}
    geometry = sampling.geometry
    geometry.check(height, width, num_frames)
    step, remainder = geometry.frame_rule
    if request.segment_frames is not None and (request.segment_frames - remainder) % step == 0:
        # The steps are those of a segment.
        num_frames = min(num_frames, request.segment_frames)
    if request.sigmas is not None:
        return {"flow_shift": 1.0}
    if request.second_stage_sigmas is not None:
        # Those of the first stage, whose steps it shifts.
        geometry.check_halving(height, width, 1, "--upsampler-path")
        try:
            geometry.check(height // 2, width // 2, num_frames)
        except RequestError as error:
            raise RequestError(f"{error} (the first stage halves {height} x {width}, height x width)") from error
        height, width = height // 2, width // 2
    num_tokens = geometry.num_tokens(height, width, num_frames)
    if request.last_image_path is not None and geometry.appends_last_image:
        num_tokens += geometry.tokens_of_frame(height, width)
    keyframes = sum(frame > 0 for frame, _, _ in request.frame_conditions or ())
    keyframes += len(keyframes_between(num_frames, request.keyframe_interval, request.frame_conditions))
    if keyframes:
        # One frame is no whole token where a token holds several latent frames: such models take no keyframes.
        num_tokens += keyframes * geometry.tokens_of_frame(height, width)
    flow_shift = sampling.schedule.flow_shift(num_tokens, num_steps)
    return {} if flow_shift is None else {"flow_shift": flow_shift}
