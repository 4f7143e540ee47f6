"""Batch settings: the values that the requests of one batch share, and what follows from them: the sampler, the sizes
of the steps, the scales of guidance."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self, TypeVar

import torch

from diffusion_runtime.attention.cache.history import CompressedHistory
from diffusion_runtime.attention.cache.passes import CachePasses
from diffusion_runtime.core.latent_geometry import ClipSize, LatentGeometry
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.denoising.chunks import ChunkPlan, cache_passes, chunks_of, steps_of_chunk
from diffusion_runtime.denoising.flow_schedule import FlowSchedule
from diffusion_runtime.denoising.guidance_terms import GuidanceTerms
from diffusion_runtime.denoising.interface import Sampler
from diffusion_runtime.denoising.progressive_resolution import Stage, growth_level, plan_stages
from diffusion_runtime.denoising.request_sampler import sampler_of
from diffusion_runtime.denoising.schedule_loop import ScheduleSampler
from diffusion_runtime.denoising.scheduler_config import SchedulerConfig
from diffusion_runtime.errors import RequestError
from diffusion_runtime.models.image_control import ImageControl
from diffusion_runtime.models.video_control import VideoControl
from diffusion_runtime.request.generation_request import REQUEST_FIELDS, GenerationRequest
from diffusion_runtime.request.progressive_options import ProgressiveSettings
from diffusion_runtime.request.step_cache_options import StepCacheSettings

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class SamplingRules:
    """How a model is sampled: the sizes it can make, the scheduler it came with, how its noise levels are spaced,
    whether guidance is an input of it (Model.embeds_guidance), what is added to its guidance_scale for classifier-free
    guidance, whether its pictures and sound are guided apart (guides_parts), how it takes a control video, and whether
    it makes videos chunk by chunk with a key-value cache (Model.is_causal), with older frames in larger patches
    (history) or not."""

    geometry: LatentGeometry
    scheduler: SchedulerConfig
    schedule: FlowSchedule = field(default_factory=FlowSchedule)
    embeds_guidance: bool = False
    guidance_offset: float = 0.0
    guides_parts: bool = False
    control: VideoControl | ImageControl | None = None
    is_causal: bool = False
    history: CompressedHistory | None = None


@dataclass(frozen=True)
class BatchSettings:
    """The values that the requests of one batch share; None only where no model fills them.

    rules: of the model. shared: the values, resolved; those in which requests may differ are the first one's.
    """

    num_requests: int
    rules: SamplingRules
    shared: GenerationRequest

    @property
    def size(self) -> ClipSize:
        shared = self.shared
        return ClipSize(_filled(shared.height), _filled(shared.width), _filled(shared.num_frames), _filled(shared.fps))

    @property
    def has_condition(self) -> bool:
        """Whether the transformer is given a condition beside the text: of images, of a sound, or of control blocks."""
        shared = self.shared
        given = (shared.image_path, shared.last_image_path, shared.frame_conditions, shared.audio_path)
        return any(path is not None for path in given) or self.rules.control is not None

    def sample_shape(self, size: ClipSize) -> tuple[int, ...]:
        """One sample as it is denoised: that of a clip of this size, with the reference images before it."""
        geometry, control = self.rules.geometry, self.rules.control
        num_before = 0 if control is None else control.num_references(self.shared)
        num_frames = size.num_frames + num_before * geometry.temporal_factor
        shape = geometry.sample_shape(dataclasses.replace(size, num_frames=num_frames))
        if not self.num_noised_frames:
            return shape
        # Behind a flat sample: geometries that take images at any frame have no other.
        (length,) = shape
        return (length + self.num_noised_frames * self._frame_length(size),)

    @property
    def num_noised_frames(self) -> int:
        """Images that are denoised with the clip, as frames behind it: those at frames of their own, but for the first,
        that do not count in full."""
        return sum(frame > 0 and strength < 1 for frame, _, strength in self.shared.frame_conditions or ())

    def without_noised_frames(self, latents: torch.Tensor, size: ClipSize) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Samples [batch, *sample_shape(size)] of the clip alone, and those frames, flat; None without any."""
        if not self.num_noised_frames:
            return latents, None
        length = latents.shape[1] - self.num_noised_frames * self._frame_length(size)
        return latents[:, :length], latents[:, length:]

    def _frame_length(self, size: ClipSize) -> int:
        return math.prod(self.rules.geometry.latent_shape(size.height, size.width, 1))

    @property
    def num_inference_steps(self) -> int:
        return _filled(self.shared.num_inference_steps)

    @property
    def second_levels(self) -> tuple[float, ...]:
        """Noise levels of the second stage's steps; empty for one stage."""
        return self.shared.second_stage_sigmas or ()

    @property
    def num_steps(self) -> int:
        """Of both stages together."""
        return self.num_inference_steps + len(self.second_levels)

    @property
    def chunks(self) -> ChunkPlan:
        """How a causal model's video is cut."""
        return chunks_of(self.shared, self.sample_shape(self.size)[1])

    def cache_passes(self, chunks: ChunkPlan | None = None) -> CachePasses:
        """What the passes of a causal model read and write of its cache. chunks: None for those of `chunks`. Raises
        ConfigError for a video without an end or a window."""
        shape = self.sample_shape(self.size)
        chunks = self.chunks if chunks is None else chunks
        return cache_passes(self.shared, chunks, self.rules.geometry.grid(shape), self.rules.history, shape)

    @property
    def num_steps_of_video(self) -> int:
        """Denoising steps of all chunks together; without chunks, num_steps."""
        if not self.rules.is_causal:
            return self.num_steps
        return self.num_steps_of_chunk(0) + self.num_steps * ((self.chunks.num_chunks or 1) - 1)

    @property
    def num_predictions(self) -> int:
        """Calls of the model by the samplers of a clip that is made at once, guidance branches not counted."""
        if self.rules.is_causal:
            return self.num_steps
        of_sampler = len(self.build_sampler().steps(torch.device("cpu")))
        return self.num_steps - self.num_inference_steps + of_sampler

    def num_steps_of_chunk(self, index: int) -> int:
        """Denoising steps of one chunk of a causal model's video."""
        return steps_of_chunk(self.shared, index)

    def num_done(self, step: StepInfo) -> int:
        """How many of these are done after a step."""
        before = self.num_steps_of_chunk(0) + (step.chunk - 1) * self.num_steps if step.chunk else 0
        return before + step.index + 1

    @property
    def first_size(self) -> ClipSize:
        """Of the first stage: half the height and width where there is a second one."""
        return self.halved(1) if self.second_levels else self.size

    @property
    def guidance_scale(self) -> float:
        return _filled(self.shared.guidance_scale)

    @property
    def guidance_mode(self) -> str:
        return _filled(self.shared.guidance_mode)

    @property
    def flow_shift(self) -> float:
        return _filled(self.shared.flow_shift)

    @property
    def sampler(self) -> str:
        return _filled(self.shared.sampler)

    def build_sampler(self, chunk: int | None = None) -> Sampler:
        """The sampler of these values, or of one chunk of a causal model's video. Raises what `sampler_of` raises."""
        shared = self.shared
        if chunk is not None:
            shift, sampler = (shared.first_chunk_flow_shift, shared.first_chunk_sampler) if chunk == 0 else (None, None)
            shared = dataclasses.replace(
                shared,
                num_inference_steps=self.num_steps_of_chunk(chunk),
                flow_shift=shared.flow_shift if shift is None else shift,
                sampler=shared.sampler if sampler is None else sampler,
            )
        return sampler_of(shared, self.rules.scheduler, self.rules.schedule)

    def stages(self) -> tuple[Stage, ...]:
        """The steps by size, none for a request whose steps are all at full size. Raises RequestError where the steps
        end before the full size."""
        text = self.shared.progressive_resolution
        progressive = None if text is None else ProgressiveSettings.parse(text)
        if progressive is None:
            return ()
        options, sampler = progressive.options, self.build_sampler()
        assert options.spectrum is not None
        assert isinstance(sampler, ScheduleSampler)
        sizes = [self.halved(level) for level in range(options.levels, 0, -1)]
        shapes = [self.rules.geometry.sample_shape(size)[-2:] for size in sizes]
        growth_levels = [growth_level(options.spectrum, options.delta, *shape) for shape in shapes]
        return plan_stages(sampler.scheduler(torch.device("cpu")).sigmas[: sampler.num_steps].tolist(), growth_levels)

    def step_sizes(self) -> tuple[tuple[ClipSize, int], ...]:
        """The sizes at which steps run, in their order, and how many steps run at each. Raises what `stages` raises."""
        if stages := self.stages():
            return tuple((self.halved(stage.level), stage.end - stage.first) for stage in stages)
        first = (self.first_size, self.num_inference_steps)
        return (first, (self.size, len(self.second_levels))) if self.second_levels else (first,)

    def halved(self, level: int) -> ClipSize:
        """The clip's size with height and width halved `level` times."""
        return dataclasses.replace(self.size, height=self.size.height >> level, width=self.size.width >> level)

    @property
    def embedded_guidance(self) -> float | None:
        """The guidance scale that the transformer gets as an input; None when it has no such input."""
        return self.guidance_scale if self.rules.embeds_guidance else None

    @property
    def cfg_scales(self) -> tuple[float, float]:
        """The scale of classifier-free guidance for the first expert and for the second."""
        if self.rules.embeds_guidance:
            scale = 1.0 if self.shared.true_cfg_scale is None else self.shared.true_cfg_scale
            return scale, scale
        second = self.guidance_scale if self.shared.guidance_scale_2 is None else self.shared.guidance_scale_2
        return self.guidance_scale + self.rules.guidance_offset, second + self.rules.guidance_offset

    def cfg_scale_at(self, step: StepInfo) -> float:
        """Of one step's expert and chunk; 1 where guided_chunks leaves it without guidance, and no new prompt has it. A
        commit is for the chunk behind it."""
        guided = step.shares_keys or self.has_both_branches(step)
        return self.cfg_scales[min(step.expert, 1)] if guided else 1.0

    def has_both_branches(self, step: StepInfo) -> bool:
        """Whether guided_chunks allows guidance at a step, with keys of both branches; once it does not, it does at no
        later one of the video."""
        num_guided = self.shared.guided_chunks
        return num_guided is None or step.chunk + (step.phase == "commit") < num_guided

    def with_shared_keys(self, step: StepInfo, switched_at: int | None) -> StepInfo:
        """The step with guidance from the keys of the conditional branch alone, where guided_switch_chunks has it.
        switched_at: the first chunk of the prompt; None for the video's first prompt."""
        num_guided = self.shared.guided_switch_chunks or 0
        guided = switched_at is not None and step.chunk < switched_at + num_guided and step.phase == "denoise"
        return dataclasses.replace(step, shares_keys=True) if guided and not self.has_both_branches(step) else step

    @property
    def guidance_terms(self) -> GuidanceTerms | None:
        """Guidance of a model that makes pictures and sound; None for one scale of classifier-free guidance."""
        terms = GuidanceTerms.of(self.shared) if self.rules.guides_parts else None
        return None if terms is None or terms.is_plain else terms

    @property
    def is_guided(self) -> bool:
        """Whether the branch of the negative prompt runs."""
        terms = self.guidance_terms
        return max(self.cfg_scales) > 1 if terms is None else terms.is_guided

    @property
    def decides_per_sample(self) -> bool:
        """Whether the steps that run depend on the sample, so that requests cannot share a forward pass."""
        text = self.shared.step_cache
        return text is not None and StepCacheSettings.parse(text) is not None

    @classmethod
    def of(cls, batch: Sequence[GenerationRequest], rules: SamplingRules) -> Self:
        """Raises RequestError for no request, a field that is still None, and fields that differ within the batch."""
        if not batch:
            raise RequestError("a batch needs one request or more, got none")
        for name, declared in REQUEST_FIELDS.items():
            values = list(dict.fromkeys(getattr(request, name) for request in batch))
            if None in values and not declared.may_stay_none:
                raise RequestError(f"{name}: the model has no default for it; give a value")
            if len(values) > 1 and not declared.differs_in_batch:
                raise RequestError(f"{name}: the requests of one batch must agree, got {values}; generate them apart")
        return cls(len(batch), rules, batch[0])

    def advice(self, dtype: torch.dtype) -> str:
        """What would need less memory."""
        size = self.size
        ways = [f"a smaller height, width or num_frames (now {size.height}, {size.width}, {size.num_frames})"]
        if self.num_requests > 1:
            ways.append(f"fewer requests in a batch (now {self.num_requests})")
        if self.is_guided and self.guidance_mode == "batched":
            ways.append("guidance_mode two_pass")
        if dtype == torch.float32:
            ways.append("dtype bfloat16")
        return f"These need less: {', '.join(ways)}"


def _filled(value: _T | None) -> _T:
    """A value that `BatchSettings.of` has seen to."""
    assert value is not None
    return value
