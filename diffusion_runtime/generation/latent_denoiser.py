"""Denoising of one batch: sampler, guidance, step cache and progressive resolution around the transformer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from diffusion_runtime.attention.cache.frame_cache import FrameCache
from diffusion_runtime.attention.context import AttentionContext, RequestCache
from diffusion_runtime.attention.forward_plans import ForwardPlans
from diffusion_runtime.core.block_stack import BlockRunner
from diffusion_runtime.core.kept_results import KeptResults
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.decoders.latent_upsampler import LatentUpsampler
from diffusion_runtime.denoising.cuda_graphs.captured_forward import ForwardPass
from diffusion_runtime.denoising.cuda_graphs.forward_graphs import ForwardGraphs, GraphedForward
from diffusion_runtime.denoising.guidance import RequestGuidance
from diffusion_runtime.denoising.interface import BranchWrapper, OnStep, Predict
from diffusion_runtime.denoising.step_cache.requested import StepCache
from diffusion_runtime.errors import DiffusionRuntimeError
from diffusion_runtime.generation.denoising_stages import DenoisingStage, stages_of
from diffusion_runtime.generation.hooks import Hooks
from diffusion_runtime.generation.prompt_encoding import KEPT, inputs_key
from diffusion_runtime.layers.modulation_rows import plan_steps
from diffusion_runtime.models.image_control import ImageControl
from diffusion_runtime.models.interface import DenoiserInputs, DiffusionTransformer, ImageCondition, ImageConditioner
from diffusion_runtime.parallel.branches import BranchExchange
from diffusion_runtime.parallel.groups import ProcessMesh
from diffusion_runtime.report.attention_report import AttentionRecorder, LibraryAttention
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.request.step_cache_options import TeaCachePolynomials
from diffusion_runtime.rules.batch_settings import BatchSettings
from diffusion_runtime.text_encoders.interface import Conditions


@dataclass(frozen=True)
class _StageRun:
    """A stage with the conditions of its size by guidance branch, its step cache, and its prediction."""

    stage: DenoisingStage
    inputs: Mapping[str, DenoiserInputs]
    cache: StepCache
    predict: Predict


@dataclass(frozen=True)
class LatentDenoiser:
    """From the conditions of a batch to its clean latents.

    image_conditioner: called where the requests have an image, or the model control blocks. model: what a calibration
    of a step cache must have been measured on (`model_identity`). published: TeaCache's coefficients for the model.
    graphs: the CUDA graphs of its forward passes; None runs all of them eagerly. upsampler: of a second stage.
    encodings: of images of earlier requests, None to keep none. hooks: of instruments; the one that wraps predictions
    is of the first stage.
    """

    transformer: DiffusionTransformer
    image_conditioner: Callable[[], ImageConditioner]
    settings: BatchSettings
    mesh: ProcessMesh
    device: torch.device
    dtype: torch.dtype
    model: Mapping[str, str]
    recorder: AttentionRecorder
    graphs: ForwardGraphs | None = None
    published: TeaCachePolynomials | None = None
    upsampler: LatentUpsampler | None = None
    encodings: KeptResults | None = None
    hooks: Hooks = field(default_factory=Hooks)

    def denoise(
        self, text: Mapping[str, Conditions], seeds: Sequence[int], on_step: OnStep, num_drawn: int = 0
    ) -> torch.Tensor:
        """Return the clean latents, float32, [batch, *sample_shape]. text: by guidance branch. seeds: of each sample's
        noise. num_drawn: how many times as much noise earlier segments of the video have drawn.

        Raises DiffusionRuntimeError when they are not finite.
        """
        settings, stages = self.settings, stages_of(self.settings, self.upsampler)
        if settings.guidance.note is not None:
            self.recorder.note(settings.guidance.note)
        noise = stages[0].noise(seeds)
        for _ in range(num_drawn):
            noise.draw()
        initial = noise.draw().to(self.device)
        # What is computed from the prompt alone serves every size.
        state, forward = RequestCache(), self.forward_of()
        plan_steps(state, [step for stage in stages if not stage.refines for step in stage.steps(self.device)])
        runs = [self._run_of(stage, text, forward, state) for stage in stages]
        latents = self.transformer.start(initial, runs[0].inputs["cond"])
        for before, run in zip((runs[0], *runs), runs, strict=False):
            if run.stage.note is not None:
                self.recorder.note(run.stage.note)
            if run.stage.refines:
                latents = self.transformer.settle(latents, before.inputs["cond"])
                noise = run.stage.noise(seeds, noise)
            begin_again = functools.partial(self.transformer.begin_again, inputs=run.inputs["cond"])
            latents = run.stage.begin(latents, noise, begin_again)
            latents = run.stage.sample(latents, run.predict, self._of_clip(on_step, run.stage.size), noise)
            run.cache.finish(latents.device)
        if isinstance(forward, GraphedForward):
            forward.report()
        latents = self.transformer.settle(latents, runs[-1].inputs["cond"])
        check_finite(latents, self.dtype)
        return latents

    def _run_of(
        self,
        stage: DenoisingStage,
        text: Mapping[str, Conditions],
        forward: Callable[[ForwardPass], torch.Tensor],
        state: RequestCache,
    ) -> _StageRun:
        """Return a stage with its conditions and its prediction. A step cache is of one stage: nothing of another size
        can be reused."""
        settings = self.settings
        inputs = self.inputs_of(text, stage.size, stage.settings.shared)
        cache = StepCache()
        if not stage.refines:
            cache = StepCache.of(settings.shared, self.mesh, self.recorder, self.model, self.published)
        context = functools.partial(self.context_of, state, None if stage.refines else cache.block_runner)
        guided = self.guided(self.predict_of(forward, inputs, context), inputs["cond"], cache.wrappers)
        predict = self._with_expert(guided, state)
        if self.hooks.wrap is not None and not stage.refines:
            predict = self.hooks.wrap(predict)
        return _StageRun(stage, inputs, cache, _numbered(predict, stage.first, settings.num_steps))

    def _of_clip(self, on_step: OnStep, size: ClipSize) -> OnStep:
        """Return `on_step` without what is denoised with the clip, of this size."""
        geometry = self.settings.sampling.geometry
        return lambda step, latents: on_step(step, geometry.clip_of(latents, size))

    def inputs_of(
        self, text: Mapping[str, Conditions], size: ClipSize, shared: GenerationRequest
    ) -> dict[str, DenoiserInputs]:
        """Return the conditions of the transformer, by guidance branch. shared: values of the stage of this size."""
        image = self._image_condition(size, shared)
        prompt = text["cond"] if isinstance(self.settings.sampling.control, ImageControl) else None
        inputs = {
            branch: DenoiserInputs(
                text=conditions,
                size=size,
                guidance=self.settings.guidance.embedded,
                image=None if image is None else image.repeat(len(conditions.lengths)),
                request=shared,
                prompt=prompt,
            )
            for branch, conditions in text.items()
        }
        return inputs | dict.fromkeys(self.settings.guidance.further_branches, inputs["cond"])

    def _image_condition(self, size: ClipSize, shared: GenerationRequest) -> ImageCondition | None:
        if not self.settings.has_condition:
            return None

        def encode() -> tuple[ImageCondition, tuple[LibraryAttention, ...]]:
            conditioner = self.image_conditioner()
            condition = conditioner.condition(shared, size)
            # Afterwards: an encoder may find that its kernels are not to be used here.
            return condition, conditioner.libraries

        kept, was_kept = self.encodings, False
        if kept is None:
            condition, libraries = encode()
        else:
            (condition, libraries), was_kept = kept.get((inputs_key(shared), size), encode)
        for part in libraries:
            self.recorder.record_library(part.component, part.library, KEPT if was_kept else part.implementation)
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
        guidance, branches = self.settings.guidance, BranchExchange.of(self.mesh)
        given = RequestGuidance(guidance.cfg_scale_at, guidance.mode, branches, wrappers, guidance.skip)
        return self.transformer.guided(predict, given, inputs)

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

    def _with_expert(self, predict: Predict, state: RequestCache) -> Predict:
        """`predict` with the expert of each step in its StepInfo. What the one before kept in `state` is dropped."""
        expert_at = self.settings.expert_at(self.transformer.expert_at)

        def of_expert(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
            assert step.timestep is not None
            expert = expert_at(step.timestep)
            state.keep_expert(expert)
            return predict(latents, dataclasses.replace(step, expert=expert))

        return of_expert


def _numbered(predict: Predict, first: int, num_steps: int) -> Predict:
    """`predict` as the steps from `first` on of `num_steps`."""

    def numbered(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
        return predict(latents, dataclasses.replace(step, index=first + step.index, num_steps=num_steps))

    return numbered


def check_finite(latents: torch.Tensor, dtype: torch.dtype) -> None:
    """Raises DiffusionRuntimeError for latents that are not. dtype: of the model."""
    if not bool(latents.isfinite().all()):
        raise DiffusionRuntimeError(
            f"the latents are not finite after denoising in {str(dtype).removeprefix('torch.')}: numbers overflowed, "
            "or the weights are damaged. Use dtype float32 or a smaller guidance_scale, or copy the model again"
        )
