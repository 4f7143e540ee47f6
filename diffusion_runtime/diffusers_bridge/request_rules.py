"""Request rules of a diffusers pipeline: the values it takes, read from the signature of its call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from diffusion_runtime.diffusers_bridge.pipeline_interface import PARAMETER_NAMES, PipelineInterface
from diffusion_runtime.diffusers_bridge.size_rules import SizeRules
from diffusion_runtime.errors import RequestError, nearest
from diffusion_runtime.media.clips import read_pictures
from diffusion_runtime.media.images import open_picture
from diffusion_runtime.request.generation_request import IMAGE_FIELDS, INPUT_FIELDS, GenerationRequest, image_paths
from diffusion_runtime.request.step_cache_options import StepCacheSettings
from diffusion_runtime.rules.images import image_remarks
from diffusion_runtime.rules.step_cache_rules import step_cache_values

# Fields that need no parameter of the pipeline: the file's frame rate, the generator's seed, steps that are reused.
_OURS = ("fps", "seed", "step_cache")
# Tasks of a pipeline that needs an image.
_DOES = {
    "image_path": "starts from an image",
    "last_image_path": "ends with an image",
    "mask_path": "repaints what a mask says",
    "video_path": "starts from a video",
}
# Caches that need only a model's input and output.
STEP_CACHES = ("easycache",)
DEFAULT_FPS = 16
# Values of a video for a pipeline that takes no number of frames.
MAX_FRAMES = 1000


@dataclass(frozen=True)
class PassthroughRules:
    """Request rules of one pipeline. interface: of its class. sizes: those it makes. defaults, presets: values of
    request fields. check_steps: raises ConfigError for attention options that are made for another number of steps.
    lora_remarks: parts of its LoRA files that were not applied. further: keywords of every call, of
    `further_arguments`."""

    interface: PipelineInterface
    sizes: SizeRules
    defaults: Mapping[str, Any]
    presets: Mapping[str, Mapping[str, Any]]
    check_steps: Callable[[int], None]
    lora_remarks: tuple[str, ...] = ()
    further: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    # Known after the first result only.
    makes_sound: ClassVar[bool | None] = None

    @property
    def pipeline_class(self) -> str:
        """The name of the class."""
        return self.interface.name

    @property
    def wanted_images(self) -> frozenset[str]:
        """Request fields of the images that the pipeline's call needs."""
        return frozenset(filter(self.interface.needs, ("image_path", "last_image_path", "mask_path")))

    def resolve(self, request: GenerationRequest, preset: str | None = None) -> GenerationRequest:
        """Return the request with every None filled for which the preset or the pipeline has a value; the pipeline
        itself chooses the others.

        Raises RequestError, which names the value, for an unknown preset, for a value that the pipeline does not take
        and for a size that it does not make.
        """
        if preset is not None:
            if preset not in self.presets:
                raise RequestError(f"preset: unknown name {preset!r}.{nearest(preset, self.presets)}")
            request = request.with_defaults(self.presets[preset])
        request = request.with_defaults(self.defaults)
        self._check_num_frames(request)
        for name, value in request.to_dict().items():
            if value is not None and name not in (*_OURS, "num_frames") and self.interface.parameter(name) is None:
                instead = "leave it out"
                if name == "init_path" and self.interface.parameter("strength") is not None:
                    instead = "it noises its own input to --strength: write --image-path or --video-path"
                raise RequestError(f"{name}: {self.pipeline_class} takes no such value; {instead}")
        for name in INPUT_FIELDS:
            if getattr(request, name) is None and self.interface.needs(name):
                flag = f"--{name.replace('_', '-')}"
                raise RequestError(f"{name}: {self.pipeline_class} {_DOES[name]}; give one: {flag} FILE")
        self.sizes.check({**self.arguments(request), **self.images(request)})
        if request.num_inference_steps is not None:
            self.check_steps(request.num_inference_steps)
        return self._with_step_cache(request)

    def _with_step_cache(self, request: GenerationRequest) -> GenerationRequest:
        cache = None if request.step_cache is None else StepCacheSettings.parse(request.step_cache)
        if cache is not None and cache.method not in STEP_CACHES:
            raise RequestError(
                f"step_cache: {cache.method} reads the blocks of a native model, which {self.pipeline_class} of "
                f"diffusers is not; expected {' or '.join(STEP_CACHES)}"
            )
        return dataclasses.replace(request, **step_cache_values(request))

    def is_guided(self, _request: GenerationRequest) -> bool:
        """Return whether a resolved request runs two guidance branches; they never run on separate processes."""
        return False

    def unused(self, request: GenerationRequest) -> tuple[str, ...]:
        """Return the parts of the LoRA files and of the images that were not applied; everything else of the request is
        used, as far as a signature shows."""
        return (*self.lora_remarks, *image_remarks(request, but=filter(self.interface.takes_frames, IMAGE_FIELDS)))

    def sampling_note(self, _request: GenerationRequest) -> str | None:
        """Return None: a diffusers pipeline has its own schedule."""
        return None

    def batch_key(self, _request: GenerationRequest) -> tuple[tuple[str, Any], ...]:
        """Return the same key for every request: each is made by itself, so any may be given to one `generate`."""
        return ()

    def arguments(self, request: GenerationRequest) -> dict[str, Any]:
        """Return a resolved request as keyword arguments of the pipeline's call; without images and generator."""
        fields = {field: value for field, value in request.to_dict().items() if field not in INPUT_FIELDS}
        named = {self.interface.parameter(field): value for field, value in fields.items()}
        given = {name: value for name, value in named.items() if name is not None and value is not None}
        return {**given, **self.further}

    def takes(self, parameter: str) -> bool:
        return parameter in self.interface.parameters

    def _check_num_frames(self, request: GenerationRequest) -> None:
        if request.num_frames is None or self.interface.parameter("num_frames") is not None:
            return
        if self.interface.makes_video:
            raise RequestError(f"num_frames: {self.pipeline_class} sets the length of its video itself; leave it out")
        if request.num_frames != 1:
            raise RequestError(f"num_frames: {self.pipeline_class} makes images; leave it out, or use 1")

    def images(self, request: GenerationRequest) -> dict[str, Any]:
        """Read the images and videos of a request, as keyword arguments of the pipeline's call."""
        fields = [field for field in IMAGE_FIELDS if not self.interface.takes_frames(field)]
        read = {field: [open_picture(path, field) for path in image_paths(request, field)] for field in fields}
        return {
            self.interface.parameter(field) or field: pictures[0] if len(pictures) == 1 else pictures
            for field, pictures in read.items()
            if pictures
        } | self._videos(request)

    def _videos(self, request: GenerationRequest) -> dict[str, Any]:
        """Return lists of frames; a mask of one frame is repeated for every frame of the video."""
        most = request.num_frames if self.interface.parameter("num_frames") is not None else None
        read = {
            field: read_pictures(path, field, most or MAX_FRAMES)
            for field in INPUT_FIELDS
            if self.interface.takes_frames(field)
            for path in image_paths(request, field)
        }
        count = len(read.get("video_path", ()))
        named = {
            self.interface.parameter(field) or field: frames * count if len(frames) == 1 and count else frames
            for field, frames in read.items()
        }
        return {
            name: _tensor_of(frames) if name in self.interface.tensors else frames for name, frames in named.items()
        }


def _tensor_of(frames: Sequence[Any]) -> Any:
    """Convert pictures of one size to a tensor [1, channels, frames, height, width], 0 to 1."""
    import numpy as np
    import torch

    pictures = np.stack([np.atleast_3d(np.asarray(each)) for each in frames])
    return torch.from_numpy(pictures).permute(3, 0, 1, 2)[None].float().div(255)


def signature_defaults(interface: PipelineInterface) -> dict[str, Any]:
    """Return the numeric defaults of a pipeline's call, by request field; one frame where it makes images."""
    defaults: dict[str, Any] = {} if interface.makes_video else {"num_frames": 1}
    for field in PARAMETER_NAMES:
        value = interface.parameters.get(interface.parameter(field) or "")
        if isinstance(value, int | float) and not isinstance(value, bool):
            defaults[field] = round(value) if field == "fps" else value
    return {"fps": DEFAULT_FPS, **defaults}


def accepted(values: Mapping[str, Any], interface: PipelineInterface) -> dict[str, Any]:
    """Return the request values that a pipeline has a parameter for, or that need none."""
    return {field: value for field, value in values.items() if field in _OURS or interface.parameter(field) is not None}
