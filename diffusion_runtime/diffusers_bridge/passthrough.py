"""Passthrough: any diffusers pipeline behind our call, with the same requests, progress, recipe, report and media."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from diffusion_runtime.attention.force import current_force
from diffusion_runtime.attention.self_check import SelfChecker
from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.core.model_folder import ModelFolder, read_json
from diffusion_runtime.core.progress import Cancellations, OnProgress
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.diffusers_bridge.attach import AttachedAttention, plan_attachment
from diffusion_runtime.diffusers_bridge.compiled_blocks import CompileCost, CompiledBlocks
from diffusion_runtime.diffusers_bridge.compiled_denoisers import compile_denoisers
from diffusion_runtime.diffusers_bridge.denoisers import denoisers_of
from diffusion_runtime.diffusers_bridge.denoising_observer import DenoisingObserver
from diffusion_runtime.diffusers_bridge.frames import frames_of, sound_of
from diffusion_runtime.diffusers_bridge.long_video import long_video_way
from diffusion_runtime.diffusers_bridge.loras import PlannedLora, load_loras, models_of, plan_loras, remarks_of
from diffusion_runtime.diffusers_bridge.modular import load_modular, run_pipeline
from diffusion_runtime.diffusers_bridge.observe import ObservedAttention
from diffusion_runtime.diffusers_bridge.passthrough_folder import (
    AttentionChoice,
    PassthroughPlan,
    check_weights,
    load_dequantized,
)
from diffusion_runtime.diffusers_bridge.pipeline_errors import translated_errors
from diffusion_runtime.diffusers_bridge.request_rules import PassthroughRules
from diffusion_runtime.diffusers_bridge.size_rules import traits_of
from diffusion_runtime.diffusers_bridge.step_cache import CachedDenoisers
from diffusion_runtime.errors import ModelLoadError, RequestError, shown
from diffusion_runtime.generation.hooks import Hooks
from diffusion_runtime.generation.input_files import input_digests
from diffusion_runtime.generation.one_generation import OneGeneration
from diffusion_runtime.generation.participants import CompileTime
from diffusion_runtime.layers.weight_range import first_unusable
from diffusion_runtime.media import GeneratedMedia
from diffusion_runtime.media.file_writer import OpenSink
from diffusion_runtime.memory.device_memory import explain_memory_shortage, release_device_memory
from diffusion_runtime.memory.machine_memory import peaks
from diffusion_runtime.models.lora_sources import located
from diffusion_runtime.models.weight_fingerprint import with_loras_of
from diffusion_runtime.report.attention_report import AttentionRecorder, LibraryAttention
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.request.step_cache_options import StepCacheSettings
from diffusion_runtime.text_encoders.attention_choice import set_implementation
from diffusion_runtime.text_encoders.loading import quiet_transformers
from diffusion_runtime.weights.weight_files import DAMAGED, UNQUANTISED_FOLDER

_logger = logging.getLogger("diffusion_runtime.diffusers_bridge")


class DiffusersPipeline:
    """A loaded diffusers pipeline, as returned by `load_pipeline(..., backend="diffusers")`. One generation at a time:
    a second call meanwhile is an error.

    pipeline: diffusers' own. defaults, presets: values of request fields. recipe: the part of every generation's recipe
    about the model and its attention. compiled: the blocks of its denoising models, None where they are not compiled.
    """

    def __init__(
        self,
        pipeline: Any,
        plan: PassthroughPlan,
        device: torch.device,
        dtype: torch.dtype,
        recipe: Mapping[str, Any],
        compiled: CompiledBlocks | None = None,
    ) -> None:
        self.pipeline = pipeline
        self._compiled = compiled
        self.rules: PassthroughRules = plan.rules
        self.device = device
        self.dtype = dtype
        self.recipe = recipe
        self.defaults = plan.rules.defaults
        self.presets = plan.rules.presets
        self._choice: AttentionChoice = plan.choice
        self._libraries: tuple[LibraryAttention, ...] = plan.libraries
        self._planned: dict[bool, AttachedAttention | ObservedAttention] = {}
        self.hooks = Hooks()
        self._one_generation = OneGeneration()
        self._loras: tuple[PlannedLora, ...] = plan.loras
        self._remarks_on_weights = plan.remarks_on_weights(dtype)
        self._load_timings: dict[str, float] = {}
        # A choice that reaches nothing fails now, not at the first request.
        self._planned_attention(self._choice.ours)

    def _own_notes(self) -> tuple[str, ...]:
        """Return notes on how this pipeline handles long videos, and on weights that were dequantised."""
        way = long_video_way(self.rules.pipeline_class)
        return (*(() if way is None else (way.note,)), *self._remarks_on_weights)

    @property
    def inspectable(self) -> None:
        """Return None: its parts are diffusers'."""
        return None

    def note_load(self, timings: Mapping[str, float]) -> None:
        for name, seconds in timings.items():
            self._load_timings[name] = self._load_timings.get(name, 0.0) + seconds

    @property
    def load_timings(self) -> dict[str, float]:
        return dict(self._load_timings)

    def resolve(self, request: GenerationRequest, preset: str | None = None) -> GenerationRequest:
        """Resolve a request with `PassthroughRules.resolve` of this pipeline."""
        return self.rules.resolve(request, preset)

    def __call__(
        self, request: GenerationRequest, *, on_progress: OnProgress | None = None, open_sink: OpenSink | None = None
    ) -> GeneratedMedia:
        """Generate one video or image. Raises what `generate` raises."""
        return self.generate([request], on_progress=on_progress, open_sink=open_sink)[0]

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        *,
        on_progress: OnProgress | None = None,
        open_sink: OpenSink | None = None,
    ) -> list[GeneratedMedia]:
        """Generate each request by itself, one after the other: pipelines differ too much in what they batch.

        on_progress: called as steps begin and end; an exception it raises ends the generation. A Cancelled that names
        requests ends those alone: the result leaves them out. open_sink: gets all frames of a clip at once.

        Raises RequestError for an empty list and for values that the pipeline does not take, before any work;
        PipelineBusyError at once while another generation of this pipeline runs; BackendUnavailableError for a call
        that the chosen attention cannot serve, DeviceMemoryError when memory runs out, ThirdPartyError for exceptions
        of the pipeline itself, and DiffusionRuntimeError when the result is not a picture.
        """
        if not requests:
            raise RequestError("a batch needs one request or more, got none")
        with self._one_generation.held():
            batch = [self.resolve(each) for each in requests]
            cancellations = Cancellations(len(batch), on_progress)
            made = []
            for index, request in enumerate(batch):
                if cancellations.is_wanted(index):
                    media = self._generate(request, None if on_progress is None else cancellations.watch)
                    if cancellations.is_wanted(index):
                        if open_sink is not None and media.audio is None:
                            open_sink(index, media.header)(media.frames)
                        made.append(media)
            return made

    def set_loras(self, loras: Sequence[Any]) -> None:
        """Replace the LoRA files for later generations; none for the model alone.

        loras: each in any form that LoraConfig.parse takes; diffusers' own loader adds them to the weights as adapters.
        Raises ConfigError and ModelLoadError for files that cannot be used, and leaves everything unchanged;
        PipelineBusyError while a generation runs.
        """
        configs = located(RuntimeConfig(lora=loras).lora, offline=self.recipe["runtime"].get("offline", False))
        with self._one_generation.held(), quiet_transformers():
            wanted = plan_loras(type(self.pipeline), configs, models_of(self.pipeline))
            try:
                load_loras(self.pipeline, wanted)
            except BaseException:
                load_loras(self.pipeline, self._loras)
                raise
            if self._compiled is not None:
                # Adapters are modules of their own in diffusers.
                self._compiled.renew()
            self._loras = wanted
            self.rules = dataclasses.replace(self.rules, lora_remarks=remarks_of(wanted))
            self.recipe = with_loras_of(self.recipe, configs)

    @property
    def profile_remarks(self) -> tuple[str, ...]:
        return ("diffusers' own pipeline runs: stages and steps have names, guidance branches and attention none",)

    def close(self) -> None:
        """Free the model's memory. A later generation raises PipelineClosedError.

        Raises PipelineBusyError while a generation runs, and PipelineClosedError the second time.
        """
        with self._one_generation.held():
            self._one_generation.close()
            self._planned.clear()
            del self.pipeline
            release_device_memory(self.device)

    def _generate(self, request: GenerationRequest, on_progress: OnProgress | None) -> GeneratedMedia:
        inputs, arguments = input_digests(request), self._arguments(request)
        advice = "These need less: a smaller height, width or num_frames, or dtype bfloat16"
        observer = DenoisingObserver(self.pipeline, self.device, on_progress)
        interface = self.rules.interface
        settings = None if request.step_cache is None else StepCacheSettings.parse(request.step_cache)
        costs, cost_recorder = (CompileTime(), CompileCost(self._compiled)), AttentionRecorder()
        with observer, self._attention(observer) as attention, CachedDenoisers(self.pipeline, settings) as cached:
            with translated_errors(interface, observer), explain_memory_shortage("generating", advice), torch.no_grad():
                result = run_pipeline(self.pipeline, arguments, interface)
            timings = {**self._load_timings, **observer.finish()}
            for stages in (costs[0].finish(cost_recorder), costs[1].report(cost_recorder)):
                timings |= {name: timings.get(name, 0.0) + seconds for name, seconds in stages.items()}
            self._load_timings = {}
        frames = frames_of(result, interface.name)
        sound, notes = sound_of(result, self.pipeline)
        notes += self._other_sizes(request, frames.shape)
        notes += self.rules.unused(request)
        for note in notes:
            _logger.warning(note)
        report = attention.report()
        return GeneratedMedia(
            frames=frames,
            fps=request.fps or 1,
            recipe={
                **self.recipe,
                "request": self._made(request, frames.shape).recorded(),
                **({"inputs": inputs} if inputs else {}),
                "notes": notes,
            },
            attention_report=dataclasses.replace(
                report,
                libraries=(*report.libraries, *self._libraries),
                steps=cached.steps,
                notes=(*self._own_notes(), *report.notes, *cost_recorder.report().notes),
            ),
            timings=timings,
            peak_memory=peaks(self.device),
            audio=sound,
        )

    def _arguments(self, request: GenerationRequest) -> dict[str, Any]:
        arguments = self.rules.arguments(request)
        arguments |= self.rules.images(request)
        if self.rules.takes("generator"):
            # On the CPU, so that the noise is the same on every device.
            arguments["generator"] = torch.Generator("cpu").manual_seed(request.seed)
        if self.rules.takes("output_type"):
            arguments["output_type"] = "np"
        return arguments

    @contextlib.contextmanager
    def _attention(self, observer: DenoisingObserver) -> Iterator[AttachedAttention | ObservedAttention]:
        """Context manager: the chosen attention, for one run."""
        # A force context around this call is a choice too.
        planned = self._planned_attention(self._choice.ours or bool(current_force()))
        planned.start_report(counts_density=self.hooks.counts_density)
        if isinstance(planned, AttachedAttention):
            planned.take_modules()
            with planned:
                yield planned
            return

        def step() -> StepInfo:
            return observer.step

        with planned.counting(step):
            yield planned

    def _planned_attention(self, ours: bool) -> AttachedAttention | ObservedAttention:
        """Return the attention of the models in each run. Raises what `attach` raises."""
        if ours in self._planned:
            return self._planned[ours]
        choice = self._choice
        planned = (
            plan_attachment(
                self.pipeline,
                choice.config,
                override=choice.override,
                device=self.device,
                checker=SelfChecker(enabled=choice.self_check),
            )
            if ours
            else ObservedAttention(self.pipeline, choice.dispatcher, choice.source)
        )
        if planned.others:
            _logger.warning(planned.reach)
        if ours == choice.ours:
            # A force context around one call would otherwise stay in the plan.
            self._planned[ours] = planned
        return planned

    def _other_sizes(self, request: GenerationRequest, shape: tuple[int, ...]) -> list[str]:
        """Return remarks about sizes that the pipeline rounded."""
        return [
            f"{self.rules.pipeline_class} made {field} {made} where {asked} was asked for"
            for field, made in _sizes(shape).items()
            if (asked := getattr(request, field)) not in (None, made)
        ]

    def _made(self, request: GenerationRequest, shape: tuple[int, ...]) -> GenerationRequest:
        """Return the request with the sizes that the pipeline chose."""
        sizes = _sizes(shape)
        taken = {name: size for name, size in sizes.items() if self.rules.interface.parameter(name) is not None}
        return request.with_defaults(taken)


def _sizes(shape: tuple[int, ...]) -> dict[str, int]:
    """Return the request fields of frames [num_frames, height, width, channels]."""
    return dict(zip(("num_frames", "height", "width"), shape[:3], strict=True))


def load_passthrough(
    folder: ModelFolder,
    plan: PassthroughPlan,
    device: torch.device,
    dtype: torch.dtype,
    recipe: Mapping[str, Any],
    compiled: CompiledBlocks | None = None,
) -> DiffusersPipeline:
    """Load diffusers' own pipeline: safetensors alone, no code from the folder. compiled: compiles its blocks.

    Raises ModelLoadError when diffusers cannot load it, BackendUnavailableError for an attention choice that reaches
    nothing in it, and DeviceMemoryError when it does not fit.
    """
    variant, dequantized = check_weights(folder)
    plan = dataclasses.replace(plan, dequantized=dequantized)
    advice = "A dtype of bfloat16 needs half of what float32 does"
    with explain_memory_shortage("loading", advice), quiet_transformers(), _without_progress_bars():
        try:
            given = load_dequantized(folder, dequantized, dtype)
            pipeline = (
                plan.pipeline_class.from_pretrained(
                    folder.path,
                    dtype=dtype,
                    variant=variant,
                    use_safetensors=True,
                    local_files_only=True,
                    trust_remote_code=False,
                    **given,
                )
                if folder.modular is None
                else load_modular(plan.pipeline_class, folder, dtype, variant, given)
            )
            _check_complete(folder, pipeline)
            _check_numbers(folder, pipeline)
            pipeline.to(device)
            if plan.text_attention is not None:
                encoders = [part for name, part in pipeline.components.items() if name.startswith("text_encoder")]
                models = [part for part in encoders if hasattr(part, "set_attn_implementation")]
                set_implementation(models, plan.text_attention.implementation)
        except (MemoryError, torch.OutOfMemoryError, ModelLoadError):
            raise
        except Exception as error:
            # diffusers, transformers and safetensors raise a dozen kinds between them, some of them plain Exceptions.
            if "allocate memory" in str(error) or "not enough memory" in str(error):
                raise
            detail = next(iter(str(error).strip().splitlines()), "no further detail")
            raise ModelLoadError(
                f"{folder}: diffusers cannot load its {plan.rules.pipeline_class}: {detail}{_quantised_advice(folder)}"
            ) from error
    pipeline.set_progress_bar_config(disable=True)
    _decode_in_tiles(pipeline)
    if plan.loras:
        load_loras(pipeline, plan.loras)
    for model in denoisers_of(pipeline).values():
        model.eval().requires_grad_(False)
    if compiled is not None:
        compile_denoisers(denoisers_of(pipeline), compiled)
    return DiffusersPipeline(pipeline, plan, device, dtype, recipe, compiled)


def _decode_in_tiles(pipeline: Any) -> None:
    """Turn on tiling in autoencoders whose class cannot decode without it."""
    for component, part in pipeline.components.items():
        if traits_of(part).tiled_only:
            part.enable_tiling()
            _logger.info("%s: %s decodes in tiles alone; tiling is on", component, type(part).__name__)


def _quantised_advice(folder: ModelFolder) -> str:
    """Return what to do where a component's weights are quantised, for the end of a message; empty where none are."""
    methods = {}
    for path in sorted(Path(folder.path).glob("*/config.json")):
        settings = read_json(path).get("quantization_config")
        if settings is not None:
            methods[path.parent.name] = settings.get("quant_method") if isinstance(settings, dict) else settings
    if not methods:
        return ""
    named = ", ".join(f"{component} ({shown(method)})" for component, method in methods.items())
    return f"; quantised: {named}. Install the package that made them, or {UNQUANTISED_FOLDER}"


def _check_complete(folder: ModelFolder, pipeline: Any) -> None:
    """Check that files hold every weight: diffusers only warns of uninitialised ones. Raises ModelLoadError."""
    for component, part in pipeline.components.items():
        if isinstance(part, torch.nn.Module):
            missing = [name for name, parameter in part.named_parameters() if parameter.is_meta]
            if missing:
                raise ModelLoadError(
                    f"{folder / component}: weights are in no file: {', '.join(missing[:3])}"
                    + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
                    + ". Copy or download the folder again"
                )


def _check_numbers(folder: ModelFolder, pipeline: Any) -> None:
    """Check that no weight holds NaN or infinity. Raises ModelLoadError."""
    for component, part in pipeline.components.items():
        found = first_unusable(part) if isinstance(part, torch.nn.Module) else None
        if found is not None:
            name, wrong = found
            raise ModelLoadError(f"{folder / component}: tensor {name} {wrong}. {DAMAGED}, or use another dtype")


@contextlib.contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Context manager: hide diffusers' own progress bars, which would mix with ours."""
    from diffusers.utils import logging

    had_progress_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if had_progress_bars:
            logging.enable_progress_bar()
