"""Which values of a request a diffusers pipeline takes, read off the signature of its call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from diffusion_runtime.errors import RequestError, nearest
from diffusion_runtime.media.images import open_picture
from diffusion_runtime.request import GenerationRequest

# Request field -> what pipelines call it, the first that a pipeline has.
_NAMES: Mapping[str, tuple[str, ...]] = {
    "prompt": ("prompt",),
    "negative_prompt": ("negative_prompt",),
    "height": ("height",),
    "width": ("width",),
    "num_frames": ("num_frames", "video_length"),
    "fps": ("frame_rate", "fps"),
    "num_inference_steps": ("num_inference_steps",),
    "guidance_scale": ("guidance_scale",),
    "true_cfg_scale": ("true_cfg_scale",),
    "guidance_scale_2": ("guidance_scale_2",),
    "image_path": ("image",),
}
# Fields that mean something without the pipeline: the file's speed, and the generator's seed.
_OURS = ("fps", "seed")
DEFAULT_FPS = 16


@dataclass(frozen=True)
class PassthroughRules:
    """What one class of pipelines takes. pipeline_class: its name. parameters: of its call: name -> default,
    inspect.Parameter.empty for none. defaults, presets: values of request fields. check_steps: raises ConfigError for
    attention options that are made for another number of steps."""

    pipeline_class: str
    parameters: Mapping[str, Any]
    defaults: Mapping[str, Any]
    presets: Mapping[str, Mapping[str, Any]]
    check_steps: Callable[[int], None]

    # Known when something comes out.
    makes_sound: ClassVar[bool | None] = None

    def resolve(self, request: GenerationRequest, preset: str | None = None) -> GenerationRequest:
        """The request with every None filled that the preset or the pipeline has a value for; the others are the
        pipeline's own to choose.

        Raises RequestError for an unknown preset, and for a value that the pipeline does not take; it names the value.
        """
        if preset is not None:
            if preset not in self.presets:
                raise RequestError(f"preset: unknown name {preset!r}.{nearest(preset, self.presets)}")
            request = request.with_defaults(self.presets[preset])
        request = request.with_defaults(self.defaults)
        if request.num_frames not in (None, 1) and self._name("num_frames") is None:
            raise RequestError(f"num_frames: {self.pipeline_class} makes images; leave it out, or say 1")
        for name, value in request.to_dict().items():
            if value is not None and name not in (*_OURS, "num_frames") and self._name(name) is None:
                raise RequestError(f"{name}: {self.pipeline_class} takes no such value; leave it out")
        self._check_image(request)
        if request.num_inference_steps is not None:
            self.check_steps(request.num_inference_steps)
        return request

    def is_guided(self, _request: GenerationRequest) -> bool:
        """Whether a resolved request runs two guidance branches; here they never run on processes of their own."""
        return False

    def arguments(self, request: GenerationRequest) -> dict[str, Any]:
        """What a resolved request says, as keyword arguments of the pipeline's call; no image, no generator."""
        named = {self._name(field): value for field, value in request.to_dict().items() if field != "image_path"}
        return {name: value for name, value in named.items() if name is not None and value is not None}

    def takes(self, parameter: str) -> bool:
        return parameter in self.parameters

    def _name(self, field: str) -> str | None:
        return next((name for name in _NAMES.get(field, ()) if name in self.parameters), None)

    def _check_image(self, request: GenerationRequest) -> None:
        if request.image_path is None:
            if self.parameters.get("image") is inspect.Parameter.empty:
                raise RequestError(f"image_path: {self.pipeline_class} starts from an image; give one")
        else:
            open_picture(request.image_path)


def call_parameters(pipeline_class: type) -> dict[str, Any]:
    """Name and default of each parameter of a pipeline's call."""
    parameters = inspect.signature(pipeline_class.__call__).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.name != "self"}


def signature_defaults(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers that a pipeline's call has as defaults, by request field; one frame where it makes images."""
    defaults: dict[str, Any] = {"num_frames": 1} if not {*_NAMES["num_frames"]} & {*parameters} else {}
    for field, names in _NAMES.items():
        value = next((parameters[name] for name in names if name in parameters), None)
        if isinstance(value, int | float) and not isinstance(value, bool):
            defaults[field] = round(value) if field == "fps" else value
    return {"fps": DEFAULT_FPS, **defaults}


def accepted(values: Mapping[str, Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Those request values that a pipeline has a parameter for, or that are not its to know."""
    return {
        field: value
        for field, value in values.items()
        if field in _OURS or any(name in parameters for name in _NAMES.get(field, ()))
    }
