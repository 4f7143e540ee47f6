"""Stages of denoising, each at one size: a plain run, those of progressive resolution, a second stage."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch

from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.decoders.latent_upsampler import LatentUpsampler
from diffusion_runtime.denoising.initial_latents import InitialLatents
from diffusion_runtime.denoising.interface import OnStep, Predict, Sampler, SamplerState
from diffusion_runtime.denoising.noise import SampleNoise
from diffusion_runtime.denoising.progressive_resolution import StageSampler, stage_samplers
from diffusion_runtime.denoising.registry import build_sampler
from diffusion_runtime.request.generation_request import SECOND_STAGE_SAMPLERS
from diffusion_runtime.rules.batch_settings import BatchSettings


@dataclass(frozen=True)
class DenoisingStage(ABC):
    """Consecutive steps at one size. settings: of its steps, in which images may count otherwise than in another
    stage's. note: for the report, said when the stage begins. first: how many steps come before those that its sampler
    numbers. refines: whether it begins with clean latents, and runs without step caches and the instruments around
    predictions. begin_again: DiffusionTransformer's, with this stage's conditions."""

    size: ClipSize
    settings: BatchSettings
    note: str | None = dataclasses.field(default=None, kw_only=True)
    first: int = dataclasses.field(default=0, kw_only=True)
    refines: bool = dataclasses.field(default=False, kw_only=True)
    begin_again: Callable[[torch.Tensor], torch.Tensor] = dataclasses.field(default=lambda clean: clean, kw_only=True)

    @abstractmethod
    def steps(self, device: torch.device) -> tuple[StepInfo, ...]:
        """Return the steps that `sample` gives to predict, as Sampler.steps."""

    def is_over(self, state: SamplerState) -> bool:
        """Return whether no step is left behind a place."""
        return state.index > self.steps(torch.device("cpu"))[-1].index

    def noise(self, seeds: Sequence[int], before: SampleNoise | None = None) -> SampleNoise:
        """Return the noise of the stage's samples. before: of the stage before, which goes on where nothing says
        otherwise."""
        shared = self.settings.shared
        as_comfyui, seed = shared.noise == "comfyui", shared.second_stage_seed if self.refines else None
        if before is not None and seed is None and not as_comfyui:
            return before
        seeds = seeds if seed is None else [seed] * len(seeds)
        return SampleNoise(self.settings.sizes.sample_shape(self.size), seeds, as_comfyui=as_comfyui)

    def begin(self, latents: torch.Tensor, noise: SampleNoise) -> torch.Tensor:  # noqa: ARG002
        """Return the latents that the first step is given. latents: initial ones, or those of the stage before."""
        return latents

    def settled(self, latents: torch.Tensor) -> torch.Tensor:
        """Return clean latents with what a mask keeps as it was given."""
        return latents

    @abstractmethod
    def start(self, latents: torch.Tensor) -> SamplerState:
        """Return the place before the first step. latents: of `begin`."""

    def first_place(self, latents: torch.Tensor, noise: SampleNoise) -> SamplerState:
        """Return the place before the first step. latents: of the stage before, or initial ones."""
        return self.start(self.begin(latents, noise))

    def run(
        self, state: SamplerState, predict: Predict, on_step: OnStep, noise: SampleNoise, end: int | None = None
    ) -> SamplerState:
        """Run the steps from a place on, those before step `end` where that comes first, and return the place behind.
        predict: of steps numbered over all stages, as `end` is."""
        last = self.steps(torch.device("cpu"))[-1].index
        own_end = last + 1 if end is None else min(end - self.first, last + 1)
        return self._run(state, predict, on_step, noise, own_end)

    @abstractmethod
    def _run(
        self, state: SamplerState, predict: Predict, on_step: OnStep, noise: SampleNoise, end: int
    ) -> SamplerState:
        """Run the steps before `end` as the sampler counts them."""


@dataclass(frozen=True)
class PlainStage(DenoisingStage):
    """All steps of a sampler. initial: the latents that they start from, None for noise alone."""

    sampler: Sampler
    initial: InitialLatents | None = None

    def steps(self, device: torch.device) -> tuple[StepInfo, ...]:
        return self.sampler.steps(device)

    def begin(self, latents: torch.Tensor, noise: SampleNoise) -> torch.Tensor:  # noqa: ARG002
        if self._started is None:
            return latents
        level = self.steps(latents.device)[0].sigma
        assert level is not None
        return self._started.noised(latents, level)

    def start(self, latents: torch.Tensor) -> SamplerState:
        return self.sampler.start(latents)

    def _run(
        self, state: SamplerState, predict: Predict, on_step: OnStep, noise: SampleNoise, end: int
    ) -> SamplerState:
        if self._started is None:
            return self.sampler.run(state, predict, on_step, noise.draw, end)
        place = self.sampler.run(state, self._started.kept(predict), on_step, noise.draw, end)
        if not self.is_over(place):
            return place
        return dataclasses.replace(place, latents=self.settled(place.latents))

    def settled(self, latents: torch.Tensor) -> torch.Tensor:
        return latents if self._started is None else self._started.settled(latents)

    @cached_property
    def _started(self) -> InitialLatents | None:
        return None if self.initial is None else self.initial.as_noised(self.begin_again)


@dataclass(frozen=True)
class GrowingStage(DenoisingStage):
    """Steps of progressive resolution, before which the latents grow."""

    sampler: StageSampler

    def steps(self, device: torch.device) -> tuple[StepInfo, ...]:
        return self.sampler.steps(device)

    def begin(self, latents: torch.Tensor, noise: SampleNoise) -> torch.Tensor:
        return self.sampler.grown(latents, noise.draw_of)

    def start(self, latents: torch.Tensor) -> SamplerState:
        return self.sampler.start(latents)

    def _run(
        self,
        state: SamplerState,
        predict: Predict,
        on_step: OnStep,
        noise: SampleNoise,  # noqa: ARG002
        end: int,
    ) -> SamplerState:
        return self.sampler.run(state, predict, on_step, end)


@dataclass(frozen=True)
class RefiningStage(DenoisingStage):
    """Steps at full size from latents of half the size, upsampled and mixed with noise; a sound is noised and denoised
    with the pictures."""

    upsampler: LatentUpsampler | None
    sampler: Sampler

    def steps(self, device: torch.device) -> tuple[StepInfo, ...]:
        return self.sampler.steps(device)

    def begin(self, latents: torch.Tensor, noise: SampleNoise) -> torch.Tensor:
        settings, geometry, level = self.settings, self.settings.sampling.geometry, self.settings.second_levels[0]
        assert self.upsampler is not None, "there is one wherever a second stage runs"
        first, shared = settings.sizes.first, settings.shared
        upsampled = partial(
            self.upsampler,
            adain_factor=shared.adain_factor or 0.0,
            tone_map_compression=shared.tone_map_compression_ratio or 0.0,
        )
        clip = geometry.clip_of(latents, first)
        parts = geometry.parts(clip, first)
        clean = geometry.join(upsampled(parts.video).to(latents.device), parts.audio)
        if latents.shape[1] > clip.shape[1]:
            # Keyframes are upsampled as one video, in the order of their frames.
            frames = torch.unflatten(
                latents[:, clip.shape[1] :], 1, (-1, parts.video.shape[1], 1, *parts.video.shape[3:])
            )
            larger = upsampled(torch.cat(frames.unbind(1), dim=2)).to(latents.device)
            clean = torch.cat([clean, larger.transpose(1, 2).flatten(1)], dim=1)
        clean = self.begin_again(clean)
        return level * noise.draw_of(self._shape).to(latents.device) + (1 - level) * clean

    def start(self, latents: torch.Tensor) -> SamplerState:
        return self.sampler.start(latents)

    def _run(
        self, state: SamplerState, predict: Predict, on_step: OnStep, noise: SampleNoise, end: int
    ) -> SamplerState:
        return self.sampler.run(
            state,
            predict,
            lambda step, at: on_step(dataclasses.replace(step, index=self.first + step.index), at),
            lambda: noise.draw_of(self._shape),
            end,
        )

    @property
    def _shape(self) -> tuple[int, ...]:
        return self.settings.sizes.sample_shape(self.size)


def stages_of(
    settings: BatchSettings, upsampler: LatentUpsampler | None = None, initial: InitialLatents | None = None
) -> list[DenoisingStage]:
    """Return the stages of a batch in their order. upsampler: of a second stage; initial: of a request that starts from
    a picture or a video; None where nothing is computed."""
    sampler, first = settings.build_sampler(), settings.sizes.first
    planned, levels = settings.sizes.stages(), settings.second_levels
    if planned:
        growing = stage_samplers(sampler, planned)
        sizes = [settings.sizes.halved(each.stage.level) for each in growing]
        notes = [_sizes_note(growing, sizes), *(None for _ in sizes[1:])]
        return [
            GrowingStage(size, settings, each, note=note)
            for size, each, note in zip(sizes, growing, notes, strict=True)
        ]
    stages: list[DenoisingStage] = [PlainStage(first, settings, sampler, initial, note=settings.sizes.note)]
    if levels:
        size, num_before = settings.size, settings.num_inference_steps
        name = settings.shared.second_stage_sampler or SECOND_STAGE_SAMPLERS[0]
        note = (
            f"second stage: {len(levels)} steps of {name} at {size.height} x {size.width} after {num_before} at "
            f"{first.height} x {first.width} (height x width)"
        )
        refining = build_sampler(name, len(levels), 1.0, {}, levels)
        of_stage = settings.of_second_stage()
        stages.append(RefiningStage(size, of_stage, upsampler, refining, note=note, first=num_before, refines=True))
    return stages


def _sizes_note(stages: Sequence[StageSampler], sizes: Sequence[ClipSize]) -> str:
    """Say which steps run at which size."""
    parts = [
        f"steps {stage.first}-{stage.end - 1} at {size.height} x {size.width}, from sigma {stage.sigma:.3g}"
        for stage, size in zip((each.stage for each in stages), sizes, strict=True)
    ]
    return f"progressive_resolution: {'; '.join(parts)} (height x width)"
