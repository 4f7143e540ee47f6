"""Denoising of one batch: sampler, guidance, step cache and progressive resolution around the transformer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from diffusion_runtime.attention.cache.frame_cache import FrameCache
from diffusion_runtime.attention.context import AttentionContext, RequestCache
from diffusion_runtime.attention.forward_plans import ForwardPlans
from diffusion_runtime.attention.layer_decisions import MeasuredPasses
from diffusion_runtime.attention.normalized_guidance import NormalizedGuidance
from diffusion_runtime.core.block_stack import BlockRunner
from diffusion_runtime.core.kept_results import KeptResults
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.decoders.interface import LatentEncoder
from diffusion_runtime.decoders.latent_upsampler import LatentUpsampler
from diffusion_runtime.denoising.context_windows import over_windows
from diffusion_runtime.denoising.cuda_graphs.captured_forward import ForwardPass
from diffusion_runtime.denoising.cuda_graphs.forward_graphs import ForwardGraphs, GraphedForward
from diffusion_runtime.denoising.guidance import RequestGuidance
from diffusion_runtime.denoising.initial_latents import InitialLatents
from diffusion_runtime.denoising.interface import BranchWrapper, OnStep, Predict, SamplerState
from diffusion_runtime.denoising.noise import SampleNoise
from diffusion_runtime.denoising.step_cache.requested import StepCache
from diffusion_runtime.denoising.zero_star import with_zero_init
from diffusion_runtime.errors import DiffusionRuntimeError
from diffusion_runtime.generation.denoising_stages import DenoisingStage, stages_of
from diffusion_runtime.generation.hooks import Hooks
from diffusion_runtime.generation.initial_picture import initial_latents
from diffusion_runtime.generation.prompt_encoding import KEPT, inputs_key
from diffusion_runtime.generation.saved_latents import DenoisingState
from diffusion_runtime.layers.modulation_rows import plan_steps
from diffusion_runtime.models.image_control import ImageControl
from diffusion_runtime.models.interface import DenoiserInputs, DiffusionTransformer, ImageCondition, ImageConditioner
from diffusion_runtime.parallel.branches import BranchExchange
from diffusion_runtime.parallel.groups import ProcessMesh
from diffusion_runtime.report.attention_report import AttentionRecorder, LibraryAttention
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.request.step_cache_options import TeaCachePolynomials
from diffusion_runtime.request.strength import reads_initial
from diffusion_runtime.rules.batch_settings import BatchSettings, expert_by_timestep
from diffusion_runtime.text_encoders.interface import Conditions


@dataclass(frozen=True)
class _PromptRun:
    """A text by guidance branch, with what its forward passes keep."""

    text: Mapping[str, Conditions]
    state: RequestCache = field(default_factory=RequestCache)


@dataclass(frozen=True)
class _StageRun:
    """A stage with the conditions of its size by guidance branch, its step cache, and its prediction."""

    stage: DenoisingStage
    inputs: Mapping[str, DenoiserInputs]
    cache: StepCache
    predict: Predict


@dataclass(frozen=True, eq=False)
class Denoised:
    """The end of a batch's denoising, or where it was stopped.

    latents: clean, float32 [batch, *sample_shape]; of a stopped one the model's estimate of them at the last step.
    size: of the clip that they are of, smaller where a stage at full size did not run. state: the place behind the last
    step, None in a model that makes a video chunk by chunk.
    """

    latents: torch.Tensor
    size: ClipSize
    state: DenoisingState | None


@dataclass(frozen=True)
class LatentDenoiser:
    """From the conditions of a batch to its clean latents.

    image_conditioner: called where the requests have an image, or the model control blocks; latent_encoder: where they
    start from a picture or a video. model: what a calibration of a step cache must have been measured on
    (`model_identity`). published: TeaCache's coefficients for the model. graphs: the CUDA graphs of its forward passes;
    None runs all of them eagerly. upsampler: of a second stage. encodings: of images of earlier requests, None to keep
    none. hooks: of instruments; the one that wraps predictions is of the first stage.
    """

    transformer: DiffusionTransformer
    image_conditioner: Callable[[], ImageConditioner]
    latent_encoder: Callable[[], LatentEncoder]
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
        self,
        text: Mapping[str, Conditions],
        seeds: Sequence[int],
        on_step: OnStep,
        num_drawn: int = 0,
        begin: DenoisingState | None = None,
        of_windows: Sequence[Mapping[str, Conditions]] = (),
    ) -> Denoised:
        """Denoise to the end, or to the request's stop_after_step. text: by guidance branch. seeds: of each sample's
        noise. num_drawn: how many times as much noise earlier segments of the video have drawn. begin: the place to go
        on from, None for the first step. of_windows: the text of each context window; empty for `text` in all.

        Raises DiffusionRuntimeError when the latents are not finite.
        """
        settings, stages = self.settings, stages_of(self.settings, self.upsampler, self.initial_latents())
        if settings.guidance.note is not None:
            self.recorder.note(settings.guidance.note)
        noise = stages[0].noise(seeds)
        for _ in range(num_drawn):
            noise.draw()
        if begin is not None:
            for stage in stages[1 : begin.stage + 1]:
                noise = stage.noise(seeds, noise) if stage.refines else noise
            noise.draw_again(begin.drawn)
        # What is computed from the prompt alone serves every size.
        prompts, forward = self._prompts(of_windows or [text] * len(settings.windows or (None,))), self.forward_of()
        steps = [step for stage in stages if not stage.refines for step in stage.steps(self.device)]
        for state in {prompt.state for prompt in prompts}:
            plan_steps(state, steps)
        runs = [self._run_of(stage, prompts, forward) for stage in stages]
        number, stop = 0 if begin is None else begin.stage, settings.shared.stop_after_step
        place = self._first_place(runs[0], noise) if begin is None else begin.sampler.on(self.device)
        while True:
            run = runs[number]
            if run.stage.note is not None:
                self.recorder.note(run.stage.note)
            of_clean = functools.partial(self.transformer.estimate, inputs=run.inputs["cond"])
            predict = run.predict if stop is None else _LastEstimate(run.predict, of_clean)
            place = run.stage.run(place, predict, self._of_clip(on_step, run.stage.size), noise, stop)
            run.cache.finish(place.latents.device)
            latents, following = place.latents.float(), runs[number + 1 : number + 2]
            is_stopped = stop is not None and run.stage.first + place.index >= stop
            if is_stopped or not following:
                break
            if following[0].stage.refines:
                latents = self.transformer.settle(latents, run.inputs["cond"])
                noise = following[0].stage.noise(seeds, noise)
            number, place = number + 1, following[0].stage.first_place(latents, noise)
        if isinstance(forward, GraphedForward):
            forward.report()
        if run.stage.is_over(place):
            # The next stage begins anew, without what this one's sampler keeps.
            place = SamplerState(place.index, place.latents)
        left = DenoisingState(number, place, noise.drawn)
        if is_stopped:
            self.recorder.note(f"stop_after_step: {stop} of {settings.num_steps} steps were made: a preview")
            is_clean = run.stage.is_over(place) and bool(following) and following[0].stage.refines
            if isinstance(predict, _LastEstimate) and not is_clean:
                latents = run.stage.settled(predict.estimate)
        latents = self.transformer.settle(latents, run.inputs["cond"])
        latents = settings.sampling.geometry.clip_of(latents, run.stage.size)
        check_finite(latents, self.dtype)
        return Denoised(latents, run.stage.size, left)

    def _first_place(self, run: _StageRun, noise: SampleNoise) -> SamplerState:
        """Return the place before the first step. run: of the first stage."""
        latents = self.transformer.start(self._initial(noise).to(self.device), run.inputs["cond"])
        return run.stage.first_place(latents, noise)

    def initial_latents(self) -> InitialLatents | None:
        """Return what the requests start from; None for noise alone."""
        shared, geometry = self.settings.shared, self.settings.sampling.geometry
        if not reads_initial(shared):
            return None

        def encode() -> tuple[InitialLatents, tuple[LibraryAttention, ...]]:
            encoder = self.latent_encoder()
            return initial_latents(shared, self.settings.size, geometry, encoder), encoder.libraries()

        if self.encodings is None:
            initial, libraries = encode()
            was_kept = False
        else:
            (initial, libraries), was_kept = self.encodings.get((inputs_key(shared), "initial"), encode)
        for part in libraries:
            self.recorder.record_library(part.component, part.library, KEPT if was_kept else part.implementation)
        return initial

    def _initial(self, noise: SampleNoise) -> torch.Tensor:
        """Draw the noise of the first step."""
        windows = self.settings.windows
        if windows is None or self.settings.shared.context_noise != "repeated":
            return noise.draw()
        return noise.draw_repeated(windows.length, windows.stride)

    def _prompts(self, texts: Sequence[Mapping[str, Conditions]]) -> list[_PromptRun]:
        """Return what runs of each text; texts that are one object share it."""
        known = {id(each): _PromptRun(each) for each in texts}
        return [known[id(each)] for each in texts]

    def _run_of(
        self, stage: DenoisingStage, prompts: Sequence[_PromptRun], forward: Callable[[ForwardPass], torch.Tensor]
    ) -> _StageRun:
        """Return a stage with its conditions and its prediction. prompts: of each context window, or one of the clip. A
        step cache is of one stage: nothing of another size can be reused."""
        settings, shared = self.settings, stage.settings.shared
        inputs = self.inputs_of(prompts[0].text, stage.size, shared)
        begin_again = functools.partial(self.transformer.begin_again, inputs=inputs["cond"])
        stage = dataclasses.replace(stage, begin_again=begin_again)
        cache = StepCache()
        if not stage.refines:
            cache = StepCache.of(settings.shared, self.mesh, self.recorder, self.model, self.published)
        runner = None if stage.refines else cache.block_runner

        def predict_of(prompt: _PromptRun, given: Mapping[str, DenoiserInputs]) -> Predict:
            return self.predict_of(forward, given, functools.partial(self.context_of, prompt.state, runner))

        if settings.windows is None:
            predict = predict_of(prompts[0], inputs)
        else:
            size = settings.of_window(stage.size)
            # One object for the windows of a prompt: what is computed from it is kept.
            of_each = {
                prompt.state: predict_of(prompt, self.inputs_of(prompt.text, size, shared)) for prompt in prompts
            }
            predict = over_windows([of_each[prompt.state] for prompt in prompts], settings.windows, self.device)
        guided = self.guided(predict, inputs["cond"], cache.wrappers)
        predict = self._with_expert(guided, {prompt.state for prompt in prompts})
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
        image, guidance = self._image_condition(size, shared), self.settings.guidance
        prompt = text["cond"] if isinstance(self.settings.sampling.control, ImageControl) else None
        inputs = {
            branch: DenoiserInputs(
                text=conditions,
                size=size,
                guidance=guidance.embedded,
                image=None if image is None else image.repeat(len(conditions.lengths)),
                request=shared,
                prompt=prompt,
            )
            for branch, conditions in text.items()
        }
        within = guidance.normalized(len(text["cond"].lengths))
        if within is not None:
            inputs["both"] = self._with_both_texts(inputs, within)
        return inputs | dict.fromkeys(guidance.further_branches, inputs["cond"])

    def _with_both_texts(self, inputs: Mapping[str, DenoiserInputs], guidance: NormalizedGuidance) -> DenoiserInputs:
        """Return the inputs of a pass with guidance within attention. A pooled text does not meet in attention: it
        stays the prompt's."""
        both, pooled = inputs["both"], inputs["cond"].text.pooled
        text = both.text if pooled is None else dataclasses.replace(both.text, pooled=torch.cat([pooled, pooled]))
        image = inputs["cond" if self.transformer.text_is_keys else "both"].image
        return dataclasses.replace(both, text=text, image=image, attention_guidance=guidance)

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
        """Return the guidance of these settings around a prediction that reads `step.branch`, which the report names.
        inputs: of the conditional branch; wrappers: see with_guidance."""
        guidance, layers = self.settings.guidance, self.transformer.attention_layers()
        leaves_out = guidance.skip.is_active if guidance.skip else lambda _: False
        branches = BranchExchange.of(
            self.mesh, MeasuredPasses(((each.layer, each.policy) for each in layers), leaves_out)
        )
        if guidance.note is not None:
            self.recorder.note(guidance.note)
        steps = guidance.steps
        wrappers = (*wrappers, *steps.wrappers)
        given = RequestGuidance(
            guidance.cfg_scale_at, steps.is_active, guidance.mode, branches, wrappers, guidance.skip
        )
        return with_zero_init(self.transformer.guided(predict, given, inputs), steps.num_zero)

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

        within, num_copies = self.settings.guidance.is_within_attention, 1 if self.transformer.text_is_keys else 2

        def predict(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
            if not within or step.branch == "uncond":
                return run(latents, step, inputs[step.branch])
            return run(torch.cat([latents] * num_copies), step, inputs["both"])[: len(latents)]

        def run(latents: torch.Tensor, step: StepInfo, given: DenoiserInputs) -> torch.Tensor:
            assert step.timestep is not None
            timestep = torch.full(latents.shape[:1], step.timestep, dtype=torch.float32, device=latents.device)
            if step.frame_timesteps is not None:
                of_frames = torch.tensor(step.frame_timesteps, dtype=torch.float32)
                timestep = of_frames.repeat(len(latents), 1).to(latents.device)
            of_pass = dataclasses.replace(context(), step=step, guidance=given.attention_guidance)
            return forward(ForwardPass(latents.to(self.dtype), timestep, given, of_pass))

        return predict

    def _with_expert(self, predict: Predict, states: Collection[RequestCache]) -> Predict:
        """`predict` with the expert of each step in its StepInfo. What the one before kept in `states` is dropped."""
        expert_at = expert_by_timestep(self.settings.shared, self.transformer.expert_at)

        def of_expert(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
            assert step.timestep is not None
            expert = expert_at(step.timestep)
            for state in states:
                state.keep_expert(expert)
            return predict(latents, dataclasses.replace(step, expert=expert))

        return of_expert


class _LastEstimate:
    """A prediction that keeps what it took for the data at its last call. of_clean: the estimate, by the latents, the
    velocity and the step."""

    def __init__(
        self, predict: Predict, of_clean: Callable[[torch.Tensor, torch.Tensor, StepInfo], torch.Tensor]
    ) -> None:
        self._predict, self._of_clean = predict, of_clean
        self.estimate = torch.empty(0)

    def __call__(self, latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
        velocity = self._predict(latents, step)
        self.estimate = self._of_clean(latents.float(), velocity, step)
        return velocity


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
