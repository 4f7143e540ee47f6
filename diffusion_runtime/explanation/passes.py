"""Passes of a generation: the forward passes that the denoiser runs, in its order, without running any."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Self

import torch

from diffusion_runtime.attention.cache.plan import CachePlan
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.denoising.chunks import is_rolling, passes_of
from diffusion_runtime.denoising.prompt_times import chunk_at
from diffusion_runtime.generation.chunked_denoiser import experts_by_step
from diffusion_runtime.generation.denoising_stages import stages_of
from diffusion_runtime.loading.interface import InspectableModel
from diffusion_runtime.models.image_control import ImageControl, counts_at
from diffusion_runtime.models.memory_demand import PlannedRequest
from diffusion_runtime.rules.batch_settings import BatchSettings


@dataclass(frozen=True)
class StepPass:
    """The forward passes of one call of the model.

    size: of the clip, or of a context window of it. step: its index among those of its group; None for a commit, which
    belongs to no step. num: how many passes, by guidance branches, experts and context windows. weight: the same in
    passes as large as the one that is counted, which may be of two branches. cache: of a pass over some frames of a
    video that is made chunk by chunk. is_controlled: False where a ControlNet leaves it out.
    is_guided: False where guidance_start and guidance_stop leave it without guidance.
    """

    size: ClipSize
    step: int | None
    num: int
    weight: float
    cache: CachePlan | None = None
    is_controlled: bool = True
    is_guided: bool = True

    @property
    def kind(self) -> Hashable:
        """All that its cost depends on."""
        plan = self.cache
        if plan is None:
            return self.size, self.is_controlled
        return self.size, plan.num_frames, plan.tokens_per_frame, plan.num_keys, plan.phase == "commit"


@dataclass(frozen=True)
class PassGroup:
    """Passes of steps at one size; of the first chunk, or of all others. steps: that a schedule shows, of num_steps."""

    steps: range
    num_steps: int
    passes: tuple[StepPass, ...]


@dataclass(frozen=True)
class _PassesOfStep:
    """Forward passes of one call of the model. num, weight: see StepPass."""

    num: int
    weight: float

    @classmethod
    def at(cls, planned: PlannedRequest, *, is_active: bool, has_one_text: bool) -> Self:
        """is_active: whether the step has guidance. has_one_text: whether guidance within attention leaves the
        unconditional pass with one text, and its tokens once."""
        further, is_guided = len(planned.further_branches), planned.is_guided and is_active
        if planned.is_guided and planned.is_batched:
            # What is counted is one pass of two branches.
            return cls(1 + further, (1 if is_guided else 1 / 2) + further / 2)
        num = 1 + is_guided + further
        return cls(num, num - 1 / 2 if is_guided and has_one_text else num)


def groups_of(prepared: InspectableModel, planned: PlannedRequest, settings: BatchSettings) -> list[PassGroup]:
    """Return all passes of a generation, without those that step caches leave out."""
    if settings.sampling.is_causal:
        return list(_groups_of_chunks(prepared, planned, settings))
    return list(_groups_of_clip(prepared, planned, settings))


def num_first_steps(settings: BatchSettings) -> int | None:
    """Return the steps of the first chunk, where the others take another number."""
    first = settings.chunking.num_steps_of_chunk(0)
    is_alike = not settings.sampling.is_causal or first == settings.num_steps or is_rolling(settings.shared)
    return None if is_alike else first


def _groups_of_clip(
    prepared: InspectableModel, planned: PlannedRequest, settings: BatchSettings
) -> Iterator[PassGroup]:
    count, settings = len(settings.segments) * len(settings.windows or (None,)), settings.of_segment()
    has_one_text = planned.attention_guidance is not None and not prepared.transformer.text_is_keys
    guided = settings.guidance.steps
    has_control = isinstance(prepared.model.sampling.control, ImageControl)
    start, stop = 0, settings.shared.stop_after_step or settings.num_steps
    for stage in stages_of(settings):
        # Samplers may call the model several times per step, and zero-init calls it at none of the first.
        indices = [stage.first + step.index for step in stage.steps(torch.device("cpu"))]
        calls = [index for index in indices if index < stop]
        if not calls:
            return
        steps = range(start, max(calls) + 1)
        start = steps.stop
        yield PassGroup(
            steps,
            settings.num_steps,
            tuple(
                StepPass(
                    settings.of_window(stage.size),
                    step.index,
                    count * passes.num,
                    count * passes.weight,
                    is_controlled=not has_control or counts_at(planned.request, step),
                    is_guided=guided.is_active(step),
                )
                for step in (StepInfo(index, settings.num_steps) for index in calls)
                if step.index >= guided.num_zero
                for passes in (_PassesOfStep.at(planned, is_active=guided.is_active(step), has_one_text=has_one_text),)
            ),
        )


def _groups_of_chunks(
    prepared: InspectableModel, planned: PlannedRequest, settings: BatchSettings
) -> Iterator[PassGroup]:
    num_first = num_first_steps(settings)
    found: tuple[list[StepPass], list[StepPass]] = ([], [])
    for chunk, each in _passes_of_chunks(prepared, planned, settings):
        found[num_first is None or chunk > 0].append(each)
    for passes, num_steps in zip(found, (num_first or 0, settings.num_steps), strict=True):
        if passes:
            yield PassGroup(range(num_steps), num_steps, tuple(passes))


def _passes_of_chunks(
    prepared: InspectableModel, planned: PlannedRequest, settings: BatchSettings
) -> Iterator[tuple[int, StepPass]]:
    """Yield every pass of a video with its chunk; a commit with the chunk after it, by the experts of later chunks."""
    request, chunks, passes = planned.request, settings.chunking.plan, settings.chunking.cache_passes()
    is_alone = not planned.is_guided or planned.is_batched
    places = {chunk.frames: chunk.index for chunk in chunks}
    temporal_factor = settings.sampling.geometry.temporal_factor
    switches = [chunk_at(frame, chunks, temporal_factor) for frame, _ in request.prompt_switches or ()]
    expert_at = prepared.transformer.expert_at
    of_first, of_later = (experts_by_step(settings.build_sampler(chunk=index), expert_at) for index in (0, 1))
    chunk = num_made = 0
    before = None
    for frames, kind in passes_of(request, chunks, settings.sampling.history):
        if kind == "denoise":
            # Several chunks at once are all guided, or none of them.
            chunk = places.get(frames, 0)
            num_made, before = (num_made + 1 if frames == before else 0), frames
            switched_at = max((at for at in switches if at <= chunk), default=None)
            step = settings.guidance.with_shared_keys(StepInfo(chunk=chunk), switched_at)
            of_chunk = of_later if chunk else of_first
            experts = {of_chunk[min(num_made, len(of_chunk) - 1)]}
        else:
            step = StepInfo(chunk=chunk + 1)
            experts = {*of_later}
        scales = [settings.guidance.cfg_scale_at(dataclasses.replace(step, expert=expert)) for expert in experts]
        num = sum(1 if is_alone or scale <= 1 else 2 for scale in scales)
        index = num_made if kind == "denoise" else None
        yield step.chunk, StepPass(planned.size, index, num, num, passes.plan(frames, kind))
