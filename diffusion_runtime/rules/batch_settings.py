"""Batch settings: the values that the requests of one batch share, and what follows from them: the sampler, the sizes
of the steps, guidance, the chunks of a causal model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch

from diffusion_runtime.attention.cache.passes import CachePasses
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.denoising.chunks import ChunkPlan, cache_passes, chunks_of, steps_of_chunk
from diffusion_runtime.denoising.context_windows import WindowPlan, windows_of
from diffusion_runtime.denoising.interface import Sampler
from diffusion_runtime.denoising.registry import sampler_of
from diffusion_runtime.denoising.segments import SegmentPlan
from diffusion_runtime.errors import RequestError
from diffusion_runtime.models.sampling import Sampling
from diffusion_runtime.request.generation_request import EXPERTS, REQUEST_FIELDS, GenerationRequest
from diffusion_runtime.request.step_cache_options import StepCacheSettings
from diffusion_runtime.request.strength import starts_from_noise, steps_left_out
from diffusion_runtime.rules.draft import filled
from diffusion_runtime.rules.guidance import Guidance
from diffusion_runtime.rules.sizes import Sizes


@dataclass(frozen=True)
class BatchSettings:
    """The values that the requests of one batch share; None only where no model fills them.

    sampling: of the model. shared: the values, resolved; those in which requests may differ are the first one's.
    """

    num_requests: int
    sampling: Sampling
    shared: GenerationRequest

    @classmethod
    def of(cls, batch: Sequence[GenerationRequest], sampling: Sampling) -> Self:
        """Raises RequestError for no request, a field that is still None, and fields that differ within the batch."""
        if not batch:
            raise RequestError("a batch needs one request or more, got none")
        for name, declared in REQUEST_FIELDS.items():
            values = list(dict.fromkeys(getattr(request, name) for request in batch))
            if None in values and not declared.may_stay_none:
                raise RequestError(f"{name}: the model has no default for it; give a value")
            if len(values) > 1 and not declared.differs_in_batch:
                raise RequestError(f"{name}: the requests of one batch must agree, got {values}; generate them apart")
        return cls(len(batch), sampling, batch[0])

    @cached_property
    def guidance(self) -> Guidance:
        return Guidance(self.shared, self.sampling)

    @cached_property
    def sizes(self) -> Sizes:
        return Sizes(self.shared, self.sampling)

    @cached_property
    def chunking(self) -> Chunking:
        return Chunking(self.sizes, self.num_steps)

    @cached_property
    def segments(self) -> SegmentPlan:
        """The segments of the video; one of all frames for a model that makes it at once."""
        kind, num_frames, shared = self.sampling.segments, self.size.num_frames, self.shared
        longest, overlap = shared.segment_frames or num_frames, shared.segment_overlap or 0
        if self.sampling.continues_images and shared.segment_frames is not None:
            kind, overlap = "continued", 1
        return SegmentPlan(num_frames, longest, overlap, kind) if kind else SegmentPlan(num_frames, num_frames)

    @cached_property
    def windows(self) -> WindowPlan | None:
        """The context windows of each prediction; None for a clip that is predicted at once."""
        return windows_of(self.shared, self.sampling.geometry) if self.sampling.takes_windows else None

    def of_window(self, size: ClipSize) -> ClipSize:
        """Return the size of one context window of a clip of a size; itself where there are none."""
        return (
            size if self.windows is None else dataclasses.replace(size, num_frames=filled(self.shared.context_frames))
        )

    def of_segment(self, index: int = 0, image_path: str | None = None) -> Self:
        """Return the settings of one segment; these where the video is made at once. image_path: of the image that it
        begins with, None for the request's."""
        if not self.segments.is_apart:
            return self
        shared = dataclasses.replace(
            self.shared,
            num_frames=self.segments.length,
            seed=self.seed_of_segment(index),
            prompt=prompt_at(self.shared, self.segments.starts[index]),
            prompt_switches=None,
            image_path=self.shared.image_path if image_path is None else image_path,
        )
        return dataclasses.replace(self, shared=shared)

    def seed_of_segment(self, index: int) -> int:
        """Return the seed of a segment's noise."""
        seeds = self.shared.segment_seeds or ()
        return seeds[index] if index < len(seeds) else self.shared.seed

    def of_second_stage(self) -> Self:
        """Return the settings of the second stage's steps, in which the images at frames may count otherwise."""
        strength, given = self.shared.second_stage_strength, self.shared.frame_conditions
        if strength is None or given is None:
            return self
        conditions = tuple((frame, path, strength) for frame, path, _ in given)
        return dataclasses.replace(self, shared=dataclasses.replace(self.shared, frame_conditions=conditions))

    @property
    def size(self) -> ClipSize:
        """The size of what is made."""
        return self.sizes.clip

    @property
    def has_condition(self) -> bool:
        """True where the transformer has a condition beside the text: of images, of keyframes to make, of a sound, or
        of control blocks."""
        shared = self.shared
        given = (
            shared.image_path,
            shared.last_image_path,
            shared.frame_conditions,
            shared.keyframe_interval,
            shared.references,
            shared.audio_path,
        )
        return any(value is not None for value in given) or self.sampling.control is not None

    @property
    def frame_rate(self) -> float:
        """Frames per second of the file that is written."""
        restoration = self.sampling.restoration
        return self.size.fps if restoration is None else restoration.frame_rate(self.shared, self.size.fps)

    @property
    def num_inference_steps(self) -> int:
        """Steps of the first stage, with those that strength leaves out."""
        return filled(self.shared.num_inference_steps)

    @property
    def second_levels(self) -> tuple[float, ...]:
        """Noise levels of the second stage's steps; empty for one stage."""
        return self.shared.second_stage_sigmas or ()

    @property
    def num_steps(self) -> int:
        """Steps of both stages together that run."""
        return self.num_inference_steps - steps_left_out(self.shared) + len(self.second_levels)

    @property
    def num_predictions(self) -> int:
        """Calls of the model by the samplers of a clip that is made at once, guidance branches not counted."""
        if self.sampling.is_causal:
            return self.num_steps
        return len(self.build_sampler().steps(torch.device("cpu"))) + len(self.second_levels)

    def build_sampler(self, chunk: int | None = None) -> Sampler:
        """Build the sampler of these values, or of one chunk of a causal model's video. Raises what `sampler_of`
        raises."""
        shared = self.chunking.first_chunk() if chunk == 0 else self.shared
        sampler = sampler_of(shared, self.sampling.scheduler, self.sampling.schedule)
        return sampler if starts_from_noise(shared) else sampler.from_step(steps_left_out(shared))

    @property
    def decides_per_sample(self) -> bool:
        """True where the steps that run depend on the sample, so that requests cannot share a forward pass."""
        text = self.shared.step_cache
        return text is not None and StepCacheSettings.parse(text) is not None

    def advice(self, dtype: torch.dtype) -> str:
        """Return what would need less memory."""
        size = self.size
        ways = [f"a smaller height, width or num_frames (now {size.height}, {size.width}, {size.num_frames})"]
        if self.num_requests > 1:
            ways.append(f"fewer requests in a batch (now {self.num_requests})")
        if self.guidance.is_guided and self.guidance.mode == "batched":
            ways.append("guidance_mode two_pass")
        if dtype == torch.float32:
            ways.append("dtype bfloat16")
        shorter = self.segments.shorter(self.sampling.geometry.temporal_factor) if self.segments.kind else None
        if shorter is not None:
            ways.insert(0, f"segment_frames {shorter} (now {self.segments.length})")
        return f"These need less: {', '.join(ways)}"


def prompt_at(request: GenerationRequest, frame: int) -> str:
    """Return the prompt of a resolved request that holds at a frame of its video."""
    later = [prompt for at, prompt in request.prompt_switches or () if int(at) <= frame]
    return later[-1] if later else request.prompt


def expert_by_timestep(request: GenerationRequest, own: Callable[[float], int]) -> Callable[[float], int]:
    """Return which expert predicts at a timestep in [0, 1000]. own: of the transformer."""
    if request.expert is not None:
        return lambda _: EXPERTS.index(str(request.expert))
    ratio = request.boundary_ratio
    return own if ratio is None else lambda timestep: 0 if timestep >= 1000 * ratio else 1


@dataclass(frozen=True)
class Chunking:
    """The chunks of the requests of a batch. sizes: of the batch. num_steps: of a chunk behind the first; of the clip
    where the model makes it at once."""

    sizes: Sizes
    num_steps: int

    @property
    def plan(self) -> ChunkPlan:
        """The chunks of the video."""
        return chunks_of(self.sizes.shared, self.sizes.sample_shape(self.sizes.clip)[1])

    def cache_passes(self, chunks: ChunkPlan | None = None) -> CachePasses:
        """Return what the passes of a causal model read and write of its cache. chunks: None for those of `plan`.
        Raises ConfigError for a video without an end or a window."""
        shape, sampling = self.sizes.sample_shape(self.sizes.clip), self.sizes.sampling
        chunks = self.plan if chunks is None else chunks
        return cache_passes(self.sizes.shared, chunks, sampling.geometry.grid(shape), sampling.history, shape)

    @property
    def num_steps_of_video(self) -> int:
        """Denoising steps of all chunks together; without chunks, num_steps."""
        if not self.sizes.sampling.is_causal:
            return self.num_steps
        return self.num_steps_of_chunk(0) + self.num_steps * ((self.plan.num_chunks or 1) - 1)

    def num_steps_of_chunk(self, index: int) -> int:
        """Return the denoising steps of one chunk of a causal model's video."""
        return steps_of_chunk(self.sizes.shared, index)

    def num_done(self, step: StepInfo) -> int:
        """Return how many of the video's steps are done after a step."""
        before = self.num_steps_of_chunk(0) + (step.chunk - 1) * self.num_steps if step.chunk else 0
        return before + step.index + 1

    def first_chunk(self) -> GenerationRequest:
        """Return the request with the first chunk's own values for those of all chunks."""
        shared = self.sizes.shared
        return dataclasses.replace(
            shared,
            num_inference_steps=shared.first_chunk_steps or shared.num_inference_steps,
            flow_shift=shared.first_chunk_flow_shift or shared.flow_shift,
            sampler=shared.first_chunk_sampler or shared.sampler,
        )
