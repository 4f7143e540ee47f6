"""Pipeline: from requests to media; encode, denoise, decode."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from diffusion_runtime.attention.context import AttentionContext, RequestCache
from diffusion_runtime.attention_report import AttentionRecorder
from diffusion_runtime.block_stack import BlockRunner
from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.denoising.guidance import with_guidance
from diffusion_runtime.denoising.interface import OnStep, Predict
from diffusion_runtime.denoising.noise import SampleNoise
from diffusion_runtime.denoising.progressive_resolution import MIN_FITTED_SIZE, Stage, fit_spectrum, sample_in_stages
from diffusion_runtime.denoising.schedule_loop import ScheduleSampler
from diffusion_runtime.denoising.step_cache.calibration import Calibration, model_identity
from diffusion_runtime.denoising.step_cache.measurement import StackMeasurement, fit_polynomials, mean_ratios
from diffusion_runtime.denoising.step_cache.requested import StepCache
from diffusion_runtime.device_guard import device_guard
from diffusion_runtime.errors import ConfigError, DiffusionRuntimeError
from diffusion_runtime.media import Audio, GeneratedMedia
from diffusion_runtime.media.images import read_image
from diffusion_runtime.memory.device_memory import explain_memory_shortage, release_device_memory
from diffusion_runtime.models.geometry import ClipSize
from diffusion_runtime.models.interface import (
    DenoiserInputs,
    DiffusionTransformer,
    ImageCondition,
    ImageConditioner,
    LatentDecoder,
)
from diffusion_runtime.models.lora.binding import Lora
from diffusion_runtime.models.lora.switching import LoraSwitch
from diffusion_runtime.models.sampling_presets import FewSteps
from diffusion_runtime.one_generation import OneGeneration
from diffusion_runtime.parallel.branches import BranchExchange
from diffusion_runtime.parallel.groups import ProcessMesh
from diffusion_runtime.progress import Cancellations, OnProgress, Progress, StageClock
from diffusion_runtime.request import GenerationRequest
from diffusion_runtime.request_rules import BatchSettings, RequestRules
from diffusion_runtime.step_info import StepInfo
from diffusion_runtime.text_encoders.interface import Conditions, TextEncoder

logger = logging.getLogger("diffusion_runtime")


class Pipeline:
    """A loaded model; `load_pipeline` makes one. One generation at a time: a second call meanwhile is an error.

    defaults, presets: values of request fields, the model's own. load_image_conditioner: called when the first request
    has an image. recipe: the part of every generation's recipe about the model and its attention. mesh: the processes
    that run the model together; each is given the same requests, and returns the same media. remarks: added to every
    attention report. loras: the LoRA files of the transformer. few_steps_of: what the model was distilled to with other
    LoRA files, by their paths.
    """

    def __init__(
        self,
        *,
        text_encoder: TextEncoder,
        transformer: DiffusionTransformer,
        decoder: LatentDecoder,
        rules: RequestRules,
        load_image_conditioner: Callable[[], ImageConditioner],
        device: torch.device,
        dtype: torch.dtype,
        recipe: Mapping[str, Any],
        mesh: ProcessMesh | None = None,
        remarks: Sequence[str] = (),
        loras: LoraSwitch | None = None,
        few_steps_of: Callable[[Iterable[str]], FewSteps | None] = lambda _: None,
    ) -> None:
        self.text_encoder = text_encoder
        self.transformer = transformer
        self.decoder = decoder
        self.rules = rules
        self.device = device
        self.dtype = dtype
        self.recipe = recipe
        self.mesh = ProcessMesh() if mesh is None else mesh
        self._remarks = tuple(remarks)
        self._loras = loras
        self._few_steps_of = few_steps_of
        self.defaults = rules.defaults
        self.presets = rules.presets
        self._load_image_conditioner = load_image_conditioner
        self._image_conditioner: ImageConditioner | None = None
        self._one_generation = OneGeneration()

    def resolve(self, request: GenerationRequest, preset: str | None = None) -> GenerationRequest:
        """`RequestRules.resolve` of this model."""
        return self.rules.resolve(request, preset)

    def __call__(self, request: GenerationRequest, *, on_progress: OnProgress | None = None) -> GeneratedMedia:
        """One video or image. Raises what `generate` raises."""
        return self.generate([request], on_progress=on_progress)[0]

    def generate(
        self, requests: Sequence[GenerationRequest], *, on_progress: OnProgress | None = None
    ) -> list[GeneratedMedia]:
        """One batch, each request with its own prompt, negative prompt and seed; the results equal single runs. With a
        step cache, which decides per sample, the requests are made one after the other.

        on_progress: called before and after every step; what it raises ends the generation. A Cancelled that names
        requests ends those alone: the result leaves them out, the others equal what they would have been (a batch is
        denoised whole; cancelled requests are not decoded).

        Raises what `resolve` raises and RequestError for requests that do not belong together, before any work;
        PipelineBusyError at once while another generation of this pipeline runs; DeviceMemoryError when memory runs
        out, and DiffusionRuntimeError when the numbers overflow.
        """
        with self._one_generation.held():
            batch = [self.resolve(request) for request in requests]
            settings = BatchSettings.of(batch, self.rules)
            if len(batch) > 1 and settings.decides_per_sample:
                return self._generate_apart(batch, on_progress)
            return self._generate(batch, settings, on_progress)

    @property
    def loras(self) -> tuple[Lora, ...]:
        """The LoRA files that are merged into the transformer."""
        return () if self._loras is None else self._loras.loras

    def set_loras(self, loras: Sequence[Any]) -> None:
        """Other LoRA files for the generations from here on, instead of those before; none for the model alone.

        loras: each in any form that LoraConfig.parse takes. The weights of the layers concerned are kept on the CPU, so
        that nothing is loaded again; what follows is bit for bit what a pipeline loaded with these files makes. Where
        several processes run the model together, each must be given the same files, as with `generate`.

        Raises ConfigError and ModelLoadError for files that cannot be used, and leaves everything as it was;
        PipelineBusyError while a generation runs.
        """
        configs = RuntimeConfig(lora=loras).lora
        with self._one_generation.held(), device_guard(self.device):
            if self._loras is None:
                raise ConfigError("set_loras: this pipeline does not know its model's folder: use load_pipeline")
            self._loras.switch(configs)
            few_steps = self._few_steps_of([config.path for config in configs])
            model = self.recipe["model"]
            self.rules = dataclasses.replace(
                self.rules,
                few_steps=few_steps,
                loras=self._loras.loras,
                identity=functools.partial(model_identity, model["family"], model["config_sha256"], configs),
            )
            runtime = {**self.recipe["runtime"], "lora": [dataclasses.asdict(config) for config in configs]}
            self.recipe = {**self.recipe, "runtime": runtime}

    def calibrate(self, requests: Sequence[GenerationRequest], *, on_progress: OnProgress | None = None) -> Calibration:
        """Measure what the step caches MagCache and TeaCache and progressive resolution need to know of this model, on
        whole generations of these requests.

        Raises what `generate` raises, and ConfigError on several processes, which hold a part of the tokens each.
        """
        if self.mesh.size > 1:
            raise ConfigError("calibrate: expected one process; leave out --num-gpus and degrees")
        with self._one_generation.held():
            # Each branch by itself, as the cache runs them.
            batch = [
                self.resolve(
                    dataclasses.replace(
                        request, step_cache=None, cfg_gate=None, progressive_resolution=None, guidance_mode="two_pass"
                    )
                )
                for request in requests
            ]
            settings = BatchSettings.of(batch, self.rules)
            measured: list[StackMeasurement] = []
            clean: list[torch.Tensor] = []
            for request in batch:
                measured.append(StackMeasurement())
                alone = BatchSettings.of([request], self.rules)
                self._generate([request], alone, on_progress, block_runner=measured[-1], on_latents=clean.append)
        latents = self.rules.geometry.parts(torch.cat(clean), settings.size).video
        spectrum = None if min(latents.shape[-2:]) < MIN_FITTED_SIZE else fit_spectrum(latents)
        own = ("prompt", "negative_prompt", "seed")
        return Calibration(
            model=self.rules.identity(),
            num_steps=settings.num_inference_steps,
            ratios=mean_ratios(measured, settings.num_inference_steps),
            prompts=tuple(request.prompt for request in batch),
            request={key: value for key, value in settings.shared.to_dict().items() if key not in own},
            versions={"diffusion_runtime": str(self.recipe["version"]), "torch": torch.__version__},
            coefficients=fit_polynomials(measured),
            spectrum=None if spectrum is None else dataclasses.asdict(spectrum),
        )

    def close(self) -> None:
        """Give the memory of the model back. A later generation raises PipelineClosedError.

        Raises PipelineBusyError while a generation runs, and PipelineClosedError the second time.
        """
        with self._one_generation.held():
            self._one_generation.close()
            del self.text_encoder, self.transformer, self.decoder, self._image_conditioner, self._load_image_conditioner
            self._loras = None
            release_device_memory(self.device)

    def _generate_apart(
        self, batch: Sequence[GenerationRequest], on_progress: OnProgress | None
    ) -> list[GeneratedMedia]:
        """Each request by itself, one after the other, for what is decided per sample: a forward pass has one batch."""
        cancellations = Cancellations(len(batch), on_progress)
        remark = f"step_cache decides for each request: the {len(batch)} of this batch were made one after the other"
        made = []
        for index, request in enumerate(batch):

            def watch(progress: Progress, index: int = index) -> None:
                cancellations.watch(dataclasses.replace(progress, request_index=index))

            if cancellations.is_wanted(index):
                settings = BatchSettings.of([request], self.rules)
                media = self._generate([request], settings, None if on_progress is None else watch, (remark,))
                if cancellations.is_wanted(index):
                    made += media
        return made

    @torch.inference_mode()
    def _generate(
        self,
        batch: Sequence[GenerationRequest],
        settings: BatchSettings,
        on_progress: OnProgress | None,
        remarks: Sequence[str] = (),
        block_runner: BlockRunner | None = None,
        on_latents: Callable[[torch.Tensor], object] = lambda _: None,
    ) -> list[GeneratedMedia]:
        """batch: resolved requests; remarks: added to the attention report. block_runner: None for the one of the
        requests' step cache. on_latents: called with the clean latents, [batch, *sample_shape]."""
        cancellations = Cancellations(len(batch), on_progress)
        watch = None if on_progress is None else cancellations.watch
        recorder, clock = AttentionRecorder(), StageClock(self.device, watch)
        for remark in (*self._remarks, *remarks):
            recorder.note(remark)
        if self.mesh.branch.size > 1 and not settings.is_guided:
            remark = "no guidance to share: the processes of one half wait for the other; leave out --cfg-parallel"
            logger.warning(remark)
            recorder.note(remark)
        for remark in dict.fromkeys(remark for request in batch for remark in self.rules.unused(request)):
            logger.warning(remark)
            recorder.note(remark)
        preset, note = self.rules.sampling_preset(settings.shared), self.rules.sampling_note(settings.shared)
        if note is not None:
            logger.info(note)
            recorder.note(note)
        with device_guard(self.device), explain_memory_shortage("generating", settings.advice(self.dtype)):
            with clock.stage("text", 1) as done:
                prompts = self._encode(batch, settings, recorder)
                done(1)
            with clock.stage("denoise", settings.num_inference_steps) as done:
                latents = self._denoise(
                    prompts.conditions,
                    settings,
                    [request.seed for request in batch],
                    recorder,
                    lambda step, _: done(step.index + 1),
                    block_runner,
                )
                _check_finite(latents, self.dtype)
                on_latents(latents)
            frames: dict[int, torch.Tensor] = {}
            sounds: dict[int, Audio | None] = {}
            # One after the other: the decoder's activations are what needs the most memory.
            for index in range(len(batch)):
                if not cancellations.is_wanted(index):
                    continue
                with clock.stage("decode", 1, index) as done:
                    parts = self.rules.geometry.parts(latents[index : index + 1], settings.size)
                    frames[index] = _to_uint8(self.decoder.decode(parts.video)[0])
                    # Afterwards: a decoder may find that its kernels are not to be used here.
                    recorder.record_library("vae", self.decoder.library, self.decoder.implementation)
                    sounds[index] = self._sound(parts.audio, recorder)
                    done(1)
        return [
            GeneratedMedia(
                frames=frames[index].numpy(),
                fps=settings.size.fps,
                recipe={
                    **self.recipe,
                    "request": request.to_dict(),
                    **({} if preset is None else {"sampling_preset": preset}),
                    "notes": list(prompts.notes[index]),
                },
                attention_report=recorder.report(),
                timings=clock.timings(index),
                audio=sounds[index],
            )
            for index, request in enumerate(batch)
            if cancellations.is_wanted(index)
        ]

    def _denoise(
        self,
        text: Mapping[str, Conditions],
        settings: BatchSettings,
        seeds: Sequence[int],
        recorder: AttentionRecorder,
        on_step: OnStep,
        block_runner: BlockRunner | None,
    ) -> torch.Tensor:
        """The clean latents, float32, [batch, *sample_shape]. text: by guidance branch. block_runner: see _generate."""
        stages, sampler = settings.stages(), settings.build_sampler()
        sizes = [settings.halved(stage.level) for stage in stages] or [settings.size]
        sample_noise = SampleNoise(self.rules.geometry.sample_shape(sizes[0]), seeds)
        noise = sample_noise.draw().to(self.device)
        # What is computed from the prompt alone serves every size.
        state = RequestCache()
        predicts: list[Predict] = []
        caches: list[StepCache] = []
        for size in sizes:
            inputs = self._inputs(text, settings, size)
            # One of each size: nothing of another size can be reused.
            cache = StepCache.of(settings.shared, self.mesh, recorder, self.rules.identity(), self.rules.teacache)
            caches.append(cache)
            guided = with_guidance(
                self._predict(inputs, state, recorder, cache.block_runner if block_runner is None else block_runner),
                lambda step: settings.cfg_scales[min(step.expert, 1)],
                settings.guidance_mode,
                self.transformer.combine_guidance,
                BranchExchange.of(self.mesh),
                cache.wrappers,
            )
            predicts.append(self._with_expert(guided))
        if stages:
            recorder.note(_sizes_remark(stages, sizes))
            assert isinstance(sampler, ScheduleSampler)
            latents = sample_in_stages(sampler, stages, noise, predicts, sample_noise.draw_of, on_step)
        else:
            latents = sampler.sample(noise, predicts[0], on_step, sample_noise.draw)
        for cache in caches:
            cache.finish(latents.device)
        return self.transformer.settle(latents, inputs["cond"])

    def _sound(self, latents: torch.Tensor | None, recorder: AttentionRecorder) -> Audio | None:
        """The sound of one sample, [1, channels, length, bins]; a note records audio latents that the decoder cannot
        decode."""
        if latents is None:
            return None
        sound = self.decoder.decode_audio(latents)
        if sound is None:
            recorder.note("the model made sound as well, which this decoder does not decode")
        return sound

    def _encode(
        self, batch: Sequence[GenerationRequest], settings: BatchSettings, recorder: AttentionRecorder
    ) -> _EncodedPrompts:
        """Encode every distinct text of the batch once, in one call."""
        positive = [request.prompt for request in batch]
        negative = [request.negative_prompt or "" for request in batch] if settings.is_guided else []
        texts = list(dict.fromkeys([*positive, *negative]))
        conditions = self.text_encoder.encode(texts)
        recorder.record_library("text_encoder", self.text_encoder.library, self.text_encoder.implementation)
        remarks = {text: conditions.remarks(index, text) for index, text in enumerate(texts)}
        for remark in (remark for several in remarks.values() for remark in several):
            logger.warning(remark)

        def chosen(of: Sequence[str]) -> Conditions:
            return conditions.take([texts.index(text) for text in of]).to(self.device, self.dtype)

        branches = {"cond": chosen(positive)}
        if negative:
            branches |= {"uncond": chosen(negative), "both": chosen([*positive, *negative])}
        pairs = zip(positive, negative or positive, strict=True)
        return _EncodedPrompts(branches, tuple(tuple(dict.fromkeys(remarks[a] + remarks[b])) for a, b in pairs))

    def _inputs(
        self, text: Mapping[str, Conditions], settings: BatchSettings, size: ClipSize
    ) -> dict[str, DenoiserInputs]:
        """The conditions of the transformer, by guidance branch."""
        image = self._image_condition(settings, size)
        return {
            branch: DenoiserInputs(
                text=conditions,
                size=size,
                guidance=settings.embedded_guidance,
                image=None if image is None else image.repeat(len(conditions.lengths)),
                request=settings.shared,
            )
            for branch, conditions in text.items()
        }

    def _image_condition(self, settings: BatchSettings, size: ClipSize) -> ImageCondition | None:
        path = settings.shared.image_path
        if path is None:
            return None
        if self._image_conditioner is None:
            self._image_conditioner = self._load_image_conditioner()
        image = torch.from_numpy(read_image(path, size.height, size.width))
        return self._image_conditioner.encode(image, size)

    def _predict(
        self,
        inputs: Mapping[str, DenoiserInputs],
        state: RequestCache,
        recorder: AttentionRecorder,
        block_runner: BlockRunner,
    ) -> Predict:
        """The transformer as a function of latents and step. inputs: by guidance branch."""

        def predict(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
            assert step.timestep is not None
            timestep = torch.full(latents.shape[:1], step.timestep, dtype=torch.float32, device=latents.device)
            context = AttentionContext(
                step=step, state=state, recorder=recorder, sharding=self.mesh.sharding, block_runner=block_runner
            )
            velocity: torch.Tensor = self.transformer(latents.to(self.dtype), timestep, inputs[step.branch], context)
            return velocity

        return predict

    def _with_expert(self, predict: Predict) -> Predict:
        """`predict` with the expert of each step in its StepInfo."""

        def of_expert(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
            assert step.timestep is not None
            return predict(latents, dataclasses.replace(step, expert=self.transformer.expert_at(step.timestep)))

        return of_expert


@dataclass(frozen=True)
class _EncodedPrompts:
    """conditions: by guidance branch. notes: for each request, remarks about its prompts."""

    conditions: Mapping[str, Conditions]
    notes: tuple[tuple[str, ...], ...]


def _sizes_remark(stages: Sequence[Stage], sizes: Sequence[ClipSize]) -> str:
    """Which steps run at which size."""
    parts = [
        f"steps {stage.first}-{stage.end - 1} at {size.height} x {size.width}, from sigma {stage.sigma:.3g}"
        for stage, size in zip(stages, sizes, strict=True)
    ]
    return f"progressive_resolution: {'; '.join(parts)} (height x width)"


def _check_finite(latents: torch.Tensor, dtype: torch.dtype) -> None:
    if not bool(latents.isfinite().all()):
        raise DiffusionRuntimeError(
            f"the latents are not finite after denoising in {str(dtype).removeprefix('torch.')}: numbers overflowed, "
            "or the weights are damaged. Use dtype float32 or a smaller guidance_scale, or copy the model again"
        )


def _to_uint8(frames: torch.Tensor) -> torch.Tensor:
    """Frames in [0, 1] as uint8 on the CPU."""
    return (frames * 255).round().clamp(0, 255).to("cpu", torch.uint8)
