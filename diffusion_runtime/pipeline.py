"""Pipeline: the data flow of the whole project, from requests to media."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Self, TypeAlias

import torch

from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.attention.info import StepInfo
from diffusion_runtime.attention.layers import AttentionLayer
from diffusion_runtime.attention.report import AttentionRecorder
from diffusion_runtime.attention.state import AttentionState
from diffusion_runtime.denoising.flow_schedule import FlowSchedule
from diffusion_runtime.denoising.guidance import with_guidance
from diffusion_runtime.denoising.interface import Predict
from diffusion_runtime.denoising.noise import initial_noise
from diffusion_runtime.denoising.registry import build_sampler
from diffusion_runtime.denoising.scheduler_config import SchedulerConfig
from diffusion_runtime.errors import DiffusionRuntimeError, RequestError, nearest
from diffusion_runtime.media import Audio, GeneratedMedia
from diffusion_runtime.media.images import check_image, read_image
from diffusion_runtime.memory.shortage import explain_memory_shortage
from diffusion_runtime.models.interface import (
    ClipSize,
    DenoiserInputs,
    DiffusionTransformer,
    ImageCondition,
    ImageConditioner,
    LatentDecoder,
    LatentGeometry,
)
from diffusion_runtime.parallel.branches import BranchExchange
from diffusion_runtime.parallel.groups import ProcessMesh
from diffusion_runtime.request import GenerationRequest
from diffusion_runtime.text_encoders.interface import Conditions, TextEncoder

logger = logging.getLogger("diffusion_runtime")

# What the requests of one batch may differ in.
_OWN_FIELDS = ("prompt", "negative_prompt", "seed")
# What a request may leave open although no model fills it.
_MAY_STAY_NONE = ("true_cfg_scale", "guidance_scale_2", "image_path")

Stage: TypeAlias = Literal["text", "denoise", "decode"]


@dataclass(frozen=True)
class Progress:
    """`step` of `num_steps` of a stage are done, `seconds` after the stage began; step 0 says that it begins.

    request_index: which request of the batch, None for a stage in which all of them move together.
    """

    stage: Stage
    step: int
    num_steps: int
    seconds: float
    request_index: int | None = None


OnProgress: TypeAlias = Callable[[Progress], None]


@dataclass(frozen=True)
class RequestRules:
    """What a model says about requests: its defaults and presets, the sizes it can make, the scheduler it came with,
    how its noise levels are spaced, whether guidance is an input of it (ModelFamily.embeds_guidance), what is added to
    its guidance_scale for classifier-free guidance, whether it takes or needs an image, and its attention layers, with
    or without weights around them, whose options may ask for a number of steps.
    """

    defaults: Mapping[str, Any]
    presets: Mapping[str, Mapping[str, Any]]
    geometry: LatentGeometry
    scheduler: SchedulerConfig
    attention_layers: tuple[AttentionLayer, ...]
    schedule: FlowSchedule = field(default_factory=FlowSchedule)
    embeds_guidance: bool = False
    guidance_offset: float = 0.0
    takes_image: bool = False
    needs_image: bool = False

    def resolve(self, request: GenerationRequest, preset: str | None = None) -> GenerationRequest:
        """The request with every None filled, from the preset first, then from the defaults.

        Raises RequestError for an unknown preset, sizes that do not divide, or a value that nothing gives; ConfigError
        for attention options made for other steps; ModelLoadError when nobody names a sampler there is.
        """
        if preset is not None:
            if preset not in self.presets:
                raise RequestError(f"preset: unknown name {preset!r}.{nearest(preset, self.presets)}")
            request = request.with_defaults(self.presets[preset])
        request = request.with_defaults(self.defaults)
        if request.sampler is None:
            raise self.scheduler.unknown_class_error()
        request = request.with_defaults(self._computed_defaults(request))
        settings = _Settings.of([request], self)
        self.geometry.sample_shape(settings.size)
        # What a sampler cannot do it says when it is made.
        options = self.scheduler.options_for(settings.sampler)
        build_sampler(settings.sampler, settings.num_inference_steps, settings.flow_shift, options)
        if settings.image_path is None and self.needs_image:
            raise RequestError("image_path: this model makes videos from an image; say which: --image-path FILE")
        if settings.image_path is not None:
            self._check_image(settings.image_path, settings.height, settings.width)
        for layer in self.attention_layers:
            layer.check_request(settings.num_inference_steps)
        return request

    @property
    def makes_sound(self) -> bool:
        """Whether what it makes is more than pictures."""
        return self.geometry.makes_sound

    @property
    def is_guided_by_default(self) -> bool:
        """Whether a request that says nothing about guidance runs two branches."""
        scale = self.defaults.get("true_cfg_scale" if self.embeds_guidance else "guidance_scale")
        offset = 0.0 if self.embeds_guidance else self.guidance_offset
        return scale is not None and float(scale) + offset > 1

    def is_guided(self, request: GenerationRequest) -> bool:
        """Whether a resolved request runs two branches of guidance."""
        return _Settings.of([request], self).is_guided

    def _computed_defaults(self, request: GenerationRequest) -> dict[str, Any]:
        """What follows from the request's other values: a flow shift that grows with the size."""
        height, width, num_frames, num_steps = (
            request.height,
            request.width,
            request.num_frames,
            request.num_inference_steps,
        )
        if height is None or width is None or num_frames is None or num_steps is None:
            return {}
        self.geometry.check(height, width, num_frames)
        flow_shift = self.schedule.flow_shift(self.geometry.num_tokens(height, width, num_frames), num_steps)
        return {} if flow_shift is None else {"flow_shift": flow_shift}

    def _check_image(self, image_path: str, height: int, width: int) -> None:
        if not self.takes_image:
            raise RequestError("image_path: this model makes videos from text alone; leave it out")
        check_image(image_path, height, width)


class Pipeline:
    """A loaded model; `load_pipeline` makes one. One generation at a time.

    defaults, presets: values of request fields, the model's own. load_image_conditioner: called when the first request
    brings an image. recipe: what the recipe of every generation says about the model and its attention. mesh: the
    processes that run the model together; each is given the same requests, and returns the same media.
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
    ) -> None:
        self.text_encoder = text_encoder
        self.transformer = transformer
        self.decoder = decoder
        self.rules = rules
        self.device = device
        self.dtype = dtype
        self.recipe = recipe
        self.mesh = ProcessMesh() if mesh is None else mesh
        self.defaults = rules.defaults
        self.presets = rules.presets
        self._load_image_conditioner = load_image_conditioner
        self._image_conditioner: ImageConditioner | None = None

    def resolve(self, request: GenerationRequest, preset: str | None = None) -> GenerationRequest:
        """`RequestRules.resolve` of this model."""
        return self.rules.resolve(request, preset)

    def __call__(self, request: GenerationRequest, *, on_progress: OnProgress | None = None) -> GeneratedMedia:
        """One video or image. Raises what `generate` raises."""
        return self.generate([request], on_progress=on_progress)[0]

    @torch.inference_mode()
    def generate(
        self, requests: Sequence[GenerationRequest], *, on_progress: OnProgress | None = None
    ) -> list[GeneratedMedia]:
        """One batch, each request with its own prompt, negative prompt and seed; the results equal single runs.

        on_progress: called before and after every step; what it raises ends the generation.

        Raises what `resolve` raises and RequestError for requests that do not belong together, before any work;
        DeviceMemoryError when memory runs out, and DiffusionRuntimeError when the numbers overflow.
        """
        batch = [self.resolve(request) for request in requests]
        settings = _Settings.of(batch, self.rules)
        recorder, clock = AttentionRecorder(), _Clock(self.device, on_progress)
        with explain_memory_shortage("generating", settings.advice(self.dtype)):
            with clock.stage("text", 1) as done:
                prompts = self._encode(batch, settings, recorder)
                done(1)
            with clock.stage("denoise", settings.num_inference_steps) as done:
                sample_shape = self.rules.geometry.sample_shape(settings.size)
                noise = initial_noise(sample_shape, [request.seed for request in batch]).to(self.device)
                options = self.rules.scheduler.options_for(settings.sampler)
                sigmas = self.rules.schedule.sigmas(settings.num_inference_steps)
                sampler = build_sampler(
                    settings.sampler, settings.num_inference_steps, settings.flow_shift, options, sigmas
                )
                inputs = self._inputs(prompts.conditions, settings)
                guided = with_guidance(
                    self._predict(inputs, recorder),
                    lambda step: settings.cfg_scales[min(step.expert, 1)],
                    settings.guidance_mode,
                    self.transformer.combine_guidance,
                    BranchExchange.of(self.mesh),
                )
                latents = sampler.sample(noise, self._with_expert(guided), lambda step, _: done(step.index + 1))
                latents = self.transformer.settle(latents, inputs["cond"])
                _check_finite(latents, self.dtype)
            frames, sounds = [], []
            # One after the other: the decoder's activations are what needs the most memory.
            for index in range(len(batch)):
                with clock.stage("decode", 1, index) as done:
                    recorder.record_library("vae", self.decoder.library, self.decoder.implementation)
                    parts = self.rules.geometry.parts(latents[index : index + 1], settings.size)
                    frames.append(_to_uint8(self.decoder.decode(parts.video)[0]))
                    sounds.append(self._sound(parts.audio, recorder))
                    done(1)
        return [
            GeneratedMedia(
                frames=frames[index].numpy(),
                fps=settings.fps,
                recipe={**self.recipe, "request": request.to_dict(), "notes": list(prompts.notes[index])},
                attention_report=recorder.report(),
                timings=clock.timings(index),
                audio=sounds[index],
            )
            for index, request in enumerate(batch)
        ]

    def _sound(self, latents: torch.Tensor | None, recorder: AttentionRecorder) -> Audio | None:
        """The sound of one sample, [1, channels, length, bins]; the report says when its latents are left unheard."""
        if latents is None:
            return None
        sound = self.decoder.decode_audio(latents)
        if sound is None:
            recorder.note("the model made sound as well, which this decoder does not decode")
        return sound

    def _encode(
        self, batch: Sequence[GenerationRequest], settings: _Settings, recorder: AttentionRecorder
    ) -> _EncodedPrompts:
        """Every different text of the batch once, in one call."""
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

    def _inputs(self, text: Mapping[str, Conditions], settings: _Settings) -> dict[str, DenoiserInputs]:
        """What the transformer is conditioned on, by guidance branch."""
        image = self._image_condition(settings)
        return {
            branch: DenoiserInputs(
                text=conditions,
                size=settings.size,
                guidance=settings.embedded_guidance,
                image=None if image is None else image.repeat(len(conditions.lengths)),
            )
            for branch, conditions in text.items()
        }

    def _image_condition(self, settings: _Settings) -> ImageCondition | None:
        if settings.image_path is None:
            return None
        if self._image_conditioner is None:
            self._image_conditioner = self._load_image_conditioner()
        image = torch.from_numpy(read_image(settings.image_path, settings.height, settings.width))
        return self._image_conditioner.encode(image, settings.size)

    def _predict(self, inputs: Mapping[str, DenoiserInputs], recorder: AttentionRecorder) -> Predict:
        """The transformer as a function of latents and step. inputs: by guidance branch."""
        state = AttentionState()

        def predict(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
            assert step.timestep is not None
            timestep = torch.full(latents.shape[:1], step.timestep, dtype=torch.float32, device=latents.device)
            context = AttentionContext(step=step, state=state, recorder=recorder, sharding=self.mesh.sharding)
            velocity: torch.Tensor = self.transformer(latents.to(self.dtype), timestep, inputs[step.branch], context)
            return velocity

        return predict

    def _with_expert(self, predict: Predict) -> Predict:
        """`predict` of steps that say which expert they belong to."""

        def of_expert(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
            assert step.timestep is not None
            return predict(latents, dataclasses.replace(step, expert=self.transformer.expert_at(step.timestep)))

        return of_expert


@dataclass(frozen=True)
class _EncodedPrompts:
    """conditions: by guidance branch. notes: for each request what its prompts lost."""

    conditions: Mapping[str, Conditions]
    notes: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class _Settings:
    """What the requests of one batch have in common, with no None left that a model could fill.

    rules: of the model.
    """

    num_requests: int
    rules: RequestRules
    height: int
    width: int
    num_frames: int
    fps: int
    num_inference_steps: int
    guidance_scale: float
    true_cfg_scale: float | None
    guidance_scale_2: float | None
    guidance_mode: str
    flow_shift: float
    sampler: str
    image_path: str | None

    @property
    def size(self) -> ClipSize:
        return ClipSize(self.height, self.width, self.num_frames, self.fps)

    @property
    def embedded_guidance(self) -> float | None:
        """The scale that goes into the transformer; None when it takes none."""
        return self.guidance_scale if self.rules.embeds_guidance else None

    @property
    def cfg_scales(self) -> tuple[float, float]:
        """The scale of classifier-free guidance for the first expert and for the second."""
        if self.rules.embeds_guidance:
            scale = 1.0 if self.true_cfg_scale is None else self.true_cfg_scale
            return scale, scale
        second = self.guidance_scale if self.guidance_scale_2 is None else self.guidance_scale_2
        return self.guidance_scale + self.rules.guidance_offset, second + self.rules.guidance_offset

    @property
    def is_guided(self) -> bool:
        return max(self.cfg_scales) > 1

    @classmethod
    def of(cls, batch: Sequence[GenerationRequest], rules: RequestRules) -> Self:
        """Raises RequestError for no request, a field that is still None, and fields that differ within the batch."""
        if not batch:
            raise RequestError("a batch needs one request or more, got none")
        shared = batch[0].to_dict()
        for name in shared:
            if shared[name] is None and name not in _MAY_STAY_NONE:
                raise RequestError(f"{name}: the model has no default for it; say a value")
            values = list(dict.fromkeys(getattr(request, name) for request in batch))
            if len(values) > 1 and name not in _OWN_FIELDS:
                raise RequestError(f"{name}: the requests of one batch must agree, got {values}; generate them apart")
        if shared["true_cfg_scale"] is not None and not rules.embeds_guidance:
            raise RequestError("true_cfg_scale: guidance_scale is this model's classifier-free guidance; use that")
        common = {name: value for name, value in shared.items() if name not in _OWN_FIELDS}
        return cls(len(batch), rules, **common)

    def advice(self, dtype: torch.dtype) -> str:
        """What would need less memory."""
        ways = [f"a smaller height, width or num_frames (now {self.height}, {self.width}, {self.num_frames})"]
        if self.num_requests > 1:
            ways.append(f"fewer requests in a batch (now {self.num_requests})")
        if self.is_guided and self.guidance_mode == "batched":
            ways.append("guidance_mode two_pass")
        if dtype == torch.float32:
            ways.append("dtype bfloat16")
        return f"These need less: {', '.join(ways)}"


class _Clock:
    """Tells the time of stages, and whoever watches how far they are."""

    def __init__(self, device: torch.device, on_progress: OnProgress | None) -> None:
        self._device = device
        self._on_progress = on_progress
        self._seconds: dict[tuple[Stage, int | None], float] = {}

    @contextmanager
    def stage(self, stage: Stage, num_steps: int, request_index: int | None = None) -> Iterator[Callable[[int], None]]:
        """Gives a function to call with the number of steps that are done."""
        started = time.perf_counter()

        def done(step: int) -> None:
            if self._on_progress is not None:
                if step:
                    self._wait()
                seconds = time.perf_counter() - started
                self._on_progress(Progress(stage, step, num_steps, seconds, request_index))

        done(0)
        yield done
        self._wait()
        self._seconds[stage, request_index] = time.perf_counter() - started

    def timings(self, request_index: int) -> dict[str, float]:
        """Seconds by stage: the batch's where it moved together, the request's own where it did not."""
        return {stage: seconds for (stage, index), seconds in self._seconds.items() if index in (None, request_index)}

    def _wait(self) -> None:
        # An accelerator runs behind the CPU. Without somebody who watches it is waited for once a stage only.
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)


def _check_finite(latents: torch.Tensor, dtype: torch.dtype) -> None:
    if not bool(latents.isfinite().all()):
        raise DiffusionRuntimeError(
            f"the latents are not finite after denoising in {str(dtype).removeprefix('torch.')}: numbers overflowed, "
            "or the weights are damaged. Use dtype float32 or a smaller guidance_scale, or copy the model again"
        )


def _to_uint8(frames: torch.Tensor) -> torch.Tensor:
    """Frames in [0, 1] as bytes on the CPU."""
    return (frames * 255).round().clamp(0, 255).to("cpu", torch.uint8)
