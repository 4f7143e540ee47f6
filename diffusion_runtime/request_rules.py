"""A model's rules for requests (defaults, presets, sizes, guidance), and the settings shared by a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from diffusion_runtime.attention.layers import AttentionLayer
from diffusion_runtime.denoising.flow_schedule import FlowSchedule
from diffusion_runtime.denoising.registry import build_sampler
from diffusion_runtime.denoising.scheduler_config import SchedulerConfig
from diffusion_runtime.denoising.scheduler_trial import try_scheduler
from diffusion_runtime.errors import RequestError, nearest, shown
from diffusion_runtime.media.images import check_image
from diffusion_runtime.models.geometry import ClipSize, LatentGeometry
from diffusion_runtime.request import GenerationRequest

# The fields in which the requests of one batch may differ.
_OWN_FIELDS = ("prompt", "negative_prompt", "seed")
# The fields that may stay None although no model fills them.
_MAY_STAY_NONE = ("true_cfg_scale", "guidance_scale_2", "image_path")


@dataclass(frozen=True)
class RequestRules:
    """A model's rules for requests: its defaults and presets, its geometry, its scheduler and noise schedule, and its
    attention layers (with or without weights), whose options may need a number of steps.

    embeds_guidance, takes_guidance: see ModelFamily. guidance_offset: added to guidance_scale for classifier-free
    guidance. takes_image, needs_image: whether an image may or must be given.
    """

    defaults: Mapping[str, Any]
    presets: Mapping[str, Mapping[str, Any]]
    geometry: LatentGeometry
    scheduler: SchedulerConfig
    attention_layers: tuple[AttentionLayer, ...]
    schedule: FlowSchedule = field(default_factory=FlowSchedule)
    embeds_guidance: bool = False
    takes_guidance: bool = True
    guidance_offset: float = 0.0
    takes_image: bool = False
    needs_image: bool = False

    def resolve(self, request: GenerationRequest, preset: str | None = None) -> GenerationRequest:
        """The request with every None filled, from the preset first, then from the defaults.

        Raises RequestError for an unknown preset, sizes that do not divide, or a required value without a default;
        ConfigError for attention options made for another number of steps; ModelLoadError without a supported sampler.
        """
        if preset is not None:
            if preset not in self.presets:
                raise RequestError(f"preset: unknown name {shown(preset)}.{nearest(preset, self.presets)}")
            request = request.with_defaults(self.presets[preset])
        request = request.with_defaults(self.defaults)
        if request.sampler is None:
            raise self.scheduler.unknown_class_error()
        request = request.with_defaults(self._computed_defaults(request))
        settings = BatchSettings.of([request], self)
        self.geometry.sample_shape(settings.size)
        if not self.takes_guidance and settings.is_guided:
            raise RequestError(
                "guidance_scale: this model was distilled to run without guidance; expected 1 or less, got "
                f"{settings.guidance_scale:g}; leave it out"
            )
        # Building the sampler raises for what it cannot do.
        options = self.scheduler.options_for(settings.sampler)
        build_sampler(settings.sampler, settings.num_inference_steps, settings.flow_shift, options)
        if settings.image_path is None and self.needs_image:
            raise RequestError("image_path: required: this model makes videos from an image; use --image-path FILE")
        if settings.image_path is not None:
            self._check_image(settings.image_path, settings.height, settings.width)
        for layer in self.attention_layers:
            layer.check_request(settings.num_inference_steps)
        return request

    def try_scheduler(self) -> None:
        """Raises ModelLoadError for scheduler settings of the folder that cannot be used. Nothing is tried for a folder
        whose scheduler class is not ours: a request may choose another one."""
        sampler = self.defaults.get("sampler")
        if sampler is None or sampler != self.scheduler.sampler:
            return
        num_steps = self.defaults.get("num_inference_steps", 2)
        flow_shift = self.defaults.get("flow_shift")
        if flow_shift is None:
            # The shift of an image of 1024 x 1024 pixels; the trial does not depend on the size.
            flow_shift = self.schedule.flow_shift(4096, num_steps) or 1.0
        try_scheduler(self.scheduler, sampler, num_steps, flow_shift, self.schedule.sigmas(num_steps))

    @property
    def makes_sound(self) -> bool:
        """Whether the model generates sound."""
        return self.geometry.makes_sound

    @property
    def num_default_tokens(self) -> int | None:
        """Grid tokens of a request without sizes; None when a request must set them."""
        sizes = [self.defaults.get(name) for name in ("height", "width", "num_frames")]
        height, width, num_frames = (size if isinstance(size, int) else 0 for size in sizes)
        try:
            return self.geometry.num_tokens(height, width, num_frames)
        except RequestError:
            return None

    @property
    def is_guided_by_default(self) -> bool:
        """Whether a request without guidance values runs two branches."""
        scale = self.defaults.get("true_cfg_scale" if self.embeds_guidance else "guidance_scale")
        offset = 0.0 if self.embeds_guidance else self.guidance_offset
        return scale is not None and float(scale) + offset > 1

    def is_guided(self, request: GenerationRequest) -> bool:
        """Whether a resolved request runs two branches of guidance."""
        return BatchSettings.of([request], self).is_guided

    @property
    def _product(self) -> str:
        return "images" if self.geometry.temporal_factor == 1 else "videos"

    def _computed_defaults(self, request: GenerationRequest) -> dict[str, Any]:
        """Values that follow from the request's other values: a flow shift that grows with the size."""
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
            raise RequestError(f"image_path: this model makes {self._product} from text alone; leave it out")
        check_image(image_path, height, width)


@dataclass(frozen=True)
class BatchSettings:
    """The values that the requests of one batch share; None only where no model fills them.

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
        """The guidance scale that the transformer gets as an input; None when it has no such input."""
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
                raise RequestError(f"{name}: required: this model has no default")
            values = list(dict.fromkeys(getattr(request, name) for request in batch))
            if len(values) > 1 and name not in _OWN_FIELDS:
                raise RequestError(f"{name}: must be equal within a batch, got {values}; submit them separately")
        if shared["true_cfg_scale"] is not None and not rules.embeds_guidance:
            raise RequestError("true_cfg_scale: guidance_scale is this model's classifier-free guidance; use that")
        common = {name: value for name, value in shared.items() if name not in _OWN_FIELDS}
        return cls(len(batch), rules, **common)

    def advice(self, dtype: torch.dtype) -> str:
        """What needs less memory."""
        ways = [f"a smaller height, width or num_frames (now {self.height}, {self.width}, {self.num_frames})"]
        if self.num_requests > 1:
            ways.append(f"fewer requests in a batch (now {self.num_requests})")
        if self.is_guided and self.guidance_mode == "batched":
            ways.append("guidance_mode two_pass")
        if dtype == torch.float32:
            ways.append("dtype bfloat16")
        return f"These need less: {', '.join(ways)}"
