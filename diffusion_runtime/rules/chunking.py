"""Chunking of a batch: how a causal model's video is cut into chunks, and the steps of each."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from diffusion_runtime.attention.cache.passes import CachePasses
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.denoising.chunks import ChunkPlan, cache_passes, chunks_of, steps_of_chunk
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.rules.sizes import Sizes


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
            num_inference_steps=self.num_steps_of_chunk(0),
            flow_shift=shared.first_chunk_flow_shift or shared.flow_shift,
            sampler=shared.first_chunk_sampler or shared.sampler,
        )
