"""Denoising of one batch: sampler, guidance, step cache and progressive resolution around the transformer."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from diffusion_runtime.attention.cache.frame_cache import FrameCache
from diffusion_runtime.attention.context import AttentionContext, RequestCache
from diffusion_runtime.attention.forward_plans import ForwardPlans
from diffusion_runtime.core.block_stack import BlockRunner
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.decoders.latent_upsampler import LatentUpsampler
from diffusion_runtime.denoising.cuda_graphs.captured_forward import ForwardPass
from diffusion_runtime.denoising.cuda_graphs.forward_graphs import ForwardGraphs, GraphedForward
from diffusion_runtime.denoising.guidance import rescaled, with_guidance
from diffusion_runtime.denoising.guidance_terms import with_guidance_terms
from diffusion_runtime.denoising.interface import BranchWrapper, OnStep, Predict, Sampler
from diffusion_runtime.denoising.noise import SampleNoise
from diffusion_runtime.denoising.progressive_resolution import Stage, sample_in_stages, steps_in_stages
from diffusion_runtime.denoising.registry import build_sampler
from diffusion_runtime.denoising.schedule_loop import ScheduleSampler
from diffusion_runtime.denoising.step_cache.requested import StepCache
from diffusion_runtime.errors import DiffusionRuntimeError
from diffusion_runtime.generation.hooks import Hooks
from diffusion_runtime.layers.modulation_rows import plan_steps
from diffusion_runtime.models.image_control import ImageControl
from diffusion_runtime.models.interface import DenoiserInputs, DiffusionTransformer, ImageCondition, ImageConditioner
from diffusion_runtime.parallel.branches import BranchExchange
from diffusion_runtime.parallel.groups import ProcessMesh
from diffusion_runtime.report.attention_report import AttentionRecorder
from diffusion_runtime.request.step_cache_options import TeaCachePolynomials
from diffusion_runtime.rules.batch_settings import BatchSettings
from diffusion_runtime.text_encoders.interface import Conditions

# Whatever sampler the first stage has: the levels of the second are its authors', for Euler steps.
_SECOND_STAGE_SAMPLER = "flow_match_euler"


@dataclass(frozen=True)
class LatentDenoiser:
    """From the conditions of a batch to its clean latents.

    image_conditioner: called where the requests have an image, or the model control blocks. model: what a
    calibration of a step cache must have been measured on (`model_identity`). published: TeaCache's coefficients
    for the model. is_compiled: whether torch.compile has compiled the transformer's blocks. graphs: the CUDA graphs of
    its forward passes; None runs all of them eagerly. upsampler: of a second stage. hooks: of instruments; the one that
    wraps predictions is of the first stage.
    """

    transformer: DiffusionTransformer
    image_conditioner: Callable[[], ImageConditioner]
    settings: BatchSettings
    mesh: ProcessMesh
    device: torch.device
    dtype: torch.dtype
    model: Mapping[str, str]
    recorder: AttentionRecorder
    is_compiled: bool = False
    graphs: ForwardGraphs | None = None
    published: TeaCachePolynomials | None = None
    upsampler: LatentUpsampler | None = None
    hooks: Hooks = field(default_factory=Hooks)

    def denoise(self, text: Mapping[str, Conditions], seeds: Sequence[int], on_step: OnStep) -> torch.Tensor:
        """Return the clean latents, float32, [batch, *sample_shape]. text: by guidance branch. seeds: of each sample's
        noise.

        Raises DiffusionRuntimeError when they are not finite.
        """
        settings = self.settings
        stages, sampler = settings.sizes.stages(), settings.build_sampler()
        if settings.sizes.num_noised_frames:
            on_step = _of_clip(on_step, settings)
        if (terms := settings.guidance.terms) is not None:
            self.recorder.note(terms.note(settings.guidance.mode))
        sizes = [settings.sizes.halved(stage.level) for stage in stages] or [settings.sizes.first]
        sample_noise = SampleNoise(settings.sizes.sample_shape(sizes[0]), seeds)
        noise = sample_noise.draw().to(self.device)
        # What is computed from the prompt alone serves every size.
        state = RequestCache()
        plan_steps(state, self._planned_steps(stages, sampler))
        forward = self.forward_of()
        predicts: list[Predict] = []
        caches: list[StepCache] = []
        for size in sizes:
            inputs = self.inputs_of(text, size)
            if size == sizes[0]:
                noise = self.transformer.start(noise, inputs["cond"])
            # One of each size: nothing of another size can be reused.
            cache = StepCache.of(settings.shared, self.mesh, self.recorder, self.model, self.published)
            caches.append(cache)
            context = functools.partial(self.context_of, state, cache.block_runner)
            guided = self.guided(self.predict_of(forward, inputs, context), inputs["cond"], cache.wrappers)
            predicts.append(_numbered(self._wrapped(self._with_expert(guided, state)), 0, settings.num_steps))
        if stages:
            self.recorder.note(_sizes_remark(stages, sizes))
            assert isinstance(sampler, ScheduleSampler)
            latents = sample_in_stages(sampler, stages, noise, predicts, sample_noise.draw_of, on_step)
        else:
            latents = sampler.sample(noise, predicts[0], on_step, sample_noise.draw)
        for cache in caches:
            cache.finish(latents.device)
        if settings.second_levels:
            latents = self.transformer.settle(latents, inputs["cond"])
            inputs = self.inputs_of(text, settings.size)
            latents = self._second_stage(latents, inputs, forward, state, sample_noise, on_step)
        if isinstance(forward, GraphedForward):
            forward.report()
        latents, _ = settings.sizes.without_noised_frames(
            self.transformer.settle(latents, inputs["cond"]), settings.size
        )
        check_finite(latents, self.dtype)
        return latents

    def _planned_steps(self, stages: Sequence[Stage], sampler: Sampler) -> tuple[StepInfo, ...]:
        if not stages:
            return sampler.steps(self.device)
        assert isinstance(sampler, ScheduleSampler)
        return steps_in_stages(sampler, stages, self.device)

    def _second_stage(
        self,
        latents: torch.Tensor,
        inputs: Mapping[str, DenoiserInputs],
        forward: Callable[[ForwardPass], torch.Tensor],
        state: RequestCache,
        sample_noise: SampleNoise,
        on_step: OnStep,
    ) -> torch.Tensor:
        """Return the latents at full size: those of the first stage upsampled, mixed with noise and denoised again.

        latents: clean, of the first stage. inputs: at full size. A sound is noised and denoised with the pictures."""
        settings, geometry, levels = self.settings, self.settings.sampling.geometry, self.settings.second_levels
        assert self.upsampler is not None
        parts = geometry.parts(latents, settings.sizes.first)
        shared = settings.shared
        larger = self.upsampler(
            parts.video,
            adain_factor=shared.adain_factor or 0.0,
            tone_map_compression=shared.tone_map_compression_ratio or 0.0,
        )
        clean = geometry.join(larger.to(latents.device), parts.audio)
        noise = sample_noise.draw_of(geometry.sample_shape(settings.size)).to(latents.device)
        context = functools.partial(self.context_of, state)
        guided = self.guided(self.predict_of(forward, inputs, context), inputs["cond"])
        first = settings.num_inference_steps
        self.recorder.note(
            f"second stage: {len(levels)} steps at {settings.size.height} x {settings.size.width} after {first} at "
            f"{settings.sizes.first.height} x {settings.sizes.first.width} (height x width)"
        )
        return build_sampler(_SECOND_STAGE_SAMPLER, len(levels), 1.0, {}, levels).sample(
            levels[0] * noise + (1 - levels[0]) * clean,
            _numbered(self._with_expert(guided, state), first, settings.num_steps),
            lambda step, at: on_step(dataclasses.replace(step, index=first + step.index), at),
        )

    def inputs_of(self, text: Mapping[str, Conditions], size: ClipSize) -> dict[str, DenoiserInputs]:
        """Return the conditions of the transformer, by guidance branch."""
        image = self._image_condition(size)
        prompt = text["cond"] if isinstance(self.settings.sampling.control, ImageControl) else None
        inputs = {
            branch: DenoiserInputs(
                text=conditions,
                size=size,
                guidance=self.settings.guidance.embedded,
                image=None if image is None else image.repeat(len(conditions.lengths)),
                request=self.settings.shared,
                prompt=prompt,
            )
            for branch, conditions in text.items()
        }
        terms = self.settings.guidance.terms
        return inputs | dict.fromkeys(() if terms is None else terms.further_branches, inputs["cond"])

    def _image_condition(self, size: ClipSize) -> ImageCondition | None:
        shared = self.settings.shared
        if not self.settings.has_condition:
            return None
        conditioner = self.image_conditioner()
        condition = conditioner.condition(shared, size)
        # Afterwards: an encoder may find that its kernels are not to be used here.
        for part in conditioner.libraries:
            self.recorder.record_library(part.component, part.library, part.implementation)
        return condition

    def forward_of(self) -> Callable[[ForwardPass], torch.Tensor]:
        """Return the transformer, of which some forward passes are replayed."""
        if self.graphs is None:
            return lambda given: given.run(self.transformer)
        return self.graphs.of_generation(
            self.transformer,
            self.recorder,
            read=self.transformer.read_inputs,
            refusal=self.transformer.replay_refusal(),
            group=self.mesh.forward,
            eager_reason=lambda: self.hooks.eager_reason,
        )

    def guided(self, predict: Predict, inputs: DenoiserInputs, wrappers: Sequence[BranchWrapper] = ()) -> Predict:
        """Return the guidance of these settings around a prediction that reads `step.branch`. inputs: of the
        conditional branch; wrappers: see with_guidance."""
        settings, geometry, exchange = self.settings, self.settings.sampling.geometry, BranchExchange.of(self.mesh)
        terms = settings.guidance.terms

        def held(guided: Predict) -> Predict:
            def to_images(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
                assert step.sigma is not None
                return self.transformer.hold(guided(latents, step), latents, step.sigma, inputs)

            return to_images if settings.shared.frame_conditions else guided

        if terms is None:
            guided = with_guidance(
                predict,
                settings.guidance.cfg_scale_at,
                settings.guidance.mode,
                rescaled(self.transformer.combine_guidance, settings.shared.guidance_rescale or 0.0),
                exchange,
                wrappers,
            )
            return held(guided)

        length = math.prod(geometry.sample_shape(inputs.size))

        def split(latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            parts, frames = geometry.parts(latents[:, :length], inputs.size), latents[:, length:]
            assert parts.audio is not None, "guides_parts is of models that make sound"
            has_frames = frames.shape[1] > 0
            return torch.cat([parts.video.flatten(1), frames], 1) if has_frames else parts.video, parts.audio

        def join(video: torch.Tensor, audio: torch.Tensor) -> torch.Tensor:
            video, end = video.flatten(1), length - audio[0].numel()
            return torch.cat([geometry.join(video[:, :end], audio), video[:, end:]], dim=1)

        with_terms = with_guidance_terms(predict, terms, split, join, settings.guidance.mode, exchange, wrappers)
        # Rescaling is measured with the images as they are, including those given with the clip.
        whole = self.transformer.complete if terms.video.rescale > 0 else self.transformer.settle

        def of_clip(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
            measured = whole(latents, inputs)
            velocity, num_kept = with_terms(measured, step), measured.shape[1] - latents.shape[1]
            kept = slice(length, length + num_kept)
            return torch.cat([velocity[:, : kept.start], velocity[:, kept.stop :]], dim=1) if num_kept else velocity

        return held(of_clip)

    def context_of(
        self,
        state: RequestCache,
        block_runner: BlockRunner | None = None,
        cache: FrameCache | None = None,
        plans: ForwardPlans | None = None,
    ) -> AttentionContext:
        """Return the context of one forward pass, but for its step. block_runner: unless an instrument has set one.
        plans: what backends prepare for the pass, None where nothing outlives it."""
        runner = BlockRunner() if block_runner is None else block_runner
        return AttentionContext(
            state=state,
            recorder=self.recorder,
            sharding=self.mesh.sharding,
            block_runner=runner if self.hooks.block_runner is None else self.hooks.block_runner,
            plans=ForwardPlans() if plans is None else plans,
            is_compiled=self.is_compiled,
            cache=cache,
        )

    def predict_of(
        self,
        forward: Callable[[ForwardPass], torch.Tensor],
        inputs: Mapping[str, DenoiserInputs],
        context: Callable[[], AttentionContext],
    ) -> Predict:
        """Return the transformer as a function of latents and step. inputs: by guidance branch, read at every pass;
        context: of the pass that runs now."""

        def predict(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
            assert step.timestep is not None
            timestep = torch.full(latents.shape[:1], step.timestep, dtype=torch.float32, device=latents.device)
            if step.frame_timesteps is not None:
                of_frames = torch.tensor(step.frame_timesteps, dtype=torch.float32)
                timestep = of_frames.repeat(len(latents), 1).to(latents.device)
            of_pass = dataclasses.replace(context(), step=step)
            return forward(ForwardPass(latents.to(self.dtype), timestep, inputs[step.branch], of_pass))

        return predict

    def _wrapped(self, predict: Predict) -> Predict:
        return predict if self.hooks.wrap is None else self.hooks.wrap(predict)

    def _with_expert(self, predict: Predict, state: RequestCache) -> Predict:
        """`predict` with the expert of each step in its StepInfo. What the one before kept in `state` is dropped."""

        def of_expert(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
            assert step.timestep is not None
            expert = self.transformer.expert_at(step.timestep)
            state.keep_expert(expert)
            return predict(latents, dataclasses.replace(step, expert=expert))

        return of_expert


def _of_clip(on_step: OnStep, settings: BatchSettings) -> OnStep:
    """`on_step` without the images that are denoised with the clip."""
    return lambda step, latents: on_step(step, settings.sizes.without_noised_frames(latents, settings.size)[0])


def _numbered(predict: Predict, first: int, num_steps: int) -> Predict:
    """`predict` as the steps from `first` on of `num_steps`."""

    def numbered(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
        return predict(latents, dataclasses.replace(step, index=first + step.index, num_steps=num_steps))

    return numbered


def _sizes_remark(stages: Sequence[Stage], sizes: Sequence[ClipSize]) -> str:
    """Which steps run at which size."""
    parts = [
        f"steps {stage.first}-{stage.end - 1} at {size.height} x {size.width}, from sigma {stage.sigma:.3g}"
        for stage, size in zip(stages, sizes, strict=True)
    ]
    return f"progressive_resolution: {'; '.join(parts)} (height x width)"


def check_finite(latents: torch.Tensor, dtype: torch.dtype) -> None:
    """Raises DiffusionRuntimeError for latents that are not. dtype: of the model."""
    if not bool(latents.isfinite().all()):
        raise DiffusionRuntimeError(
            f"the latents are not finite after denoising in {str(dtype).removeprefix('torch.')}: numbers overflowed, "
            "or the weights are damaged. Use dtype float32 or a smaller guidance_scale, or copy the model again"
        )
