"""Inputs and outputs of a diffusers pipeline class, read from its signature: no weight, no instance, no call."""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from diffusion_runtime.diffusers_bridge.frames import PICTURE_FIELDS, VIDEO_FIELDS
from diffusion_runtime.request.generation_request import INPUT_FIELDS, REQUEST_FIELDS

# Request field -> the parameters of `__call__` it may fill; the first one that a pipeline has counts.
PARAMETER_NAMES: Mapping[str, tuple[str, ...]] = {
    name: declared.parameters(name) for name, declared in REQUEST_FIELDS.items() if declared.pipeline_parameters
}
_FILLED = frozenset(name for names in PARAMETER_NAMES.values() for name in names)
# Parameters for files, which a class may need although they have a default.
_FILES = frozenset(name for field in INPUT_FIELDS for name in PARAMETER_NAMES.get(field, ()))
# Parameters for files that are lists of frames.
OF_FRAMES = ("video", "control_video", "conditioning_frames", "mask", "mask_video")
# Arguments of every call, in addition to the request's.
ALWAYS_GIVEN = frozenset({"generator", "output_type", "return_dict"})

# Inputs of a ControlNet: a pipeline that has one as a component cannot run without them, whatever its signature
# declares. Of 31 such classes in diffusers 0.42.1, nine call it optional.
_CONTROL_INPUTS = ("control_image", "conditioning_frames")

# Inputs that a pipeline cannot run without although its signature and its documentation call them optional, because
# another input may replace them (of several alternatives, the one that a request can fill is listed), or because it
# fails later, without a check. By class name, because nothing else tells them apart: their siblings of other families
# have the same parameters and components, and run without. A test rejects entries that the class itself declares.
ALSO_NEEDED: Mapping[str, tuple[str, ...]] = {
    # Indices of the frames that its control images are for; its default is the first alone.
    "AnimateDiffSparseControlNetPipeline": ("controlnet_frame_indices",),
    "BriaFiboEditPipeline": ("image",),
    "CogVideoXFunControlPipeline": ("control_video",),
    "Cosmos2VideoToWorldPipeline": ("image",),
    "CosmosVideoToWorldPipeline": ("image",),
    "EasyAnimateControlPipeline": ("control_video",),
    "EasyAnimateInpaintPipeline": ("video", "mask_video"),
    "Flux2KleinInpaintPipeline": ("image", "mask_image"),
    "FluxFillPipeline": ("image", "mask_image"),
    "FluxKontextInpaintPipeline": ("image",),
    "HunyuanImageRefinerPipeline": ("image",),
    "LongCatImageEditPipeline": ("image",),
    "QwenImageControlNetInpaintPipeline": ("control_mask",),
    "QwenImageEditInpaintPipeline": ("image",),
    "QwenImageEditPipeline": ("image",),
    "QwenImageEditPlusPipeline": ("image",),
    "QwenImageLayeredPipeline": ("image",),
}


@dataclass(frozen=True)
class PipelineInterface:
    """The interface of a pipeline class. name: of the class.

    parameters: of its call: name -> default, inspect.Parameter.empty for none. needed: the ones without which a call
    fails. output: the fields of its result; None when the class does not declare them. tensors: inputs that are a
    tensor of pictures, where others take a list of them. annotations: the parameters' types, of those that have one.
    """

    name: str
    parameters: Mapping[str, Any]
    needed: tuple[str, ...]
    output: tuple[str, ...] | None
    tensors: tuple[str, ...] = ()
    annotations: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, pipeline_class: type) -> PipelineInterface:
        """Read a class."""
        call = _plain_call(pipeline_class)
        declared = [
            each for each in inspect.signature(call).parameters.values() if each.kind not in _VARIADIC
        ]  # `self` is the first
        notes = inspect.getdoc(call) or ""
        also = ALSO_NEEDED.get(pipeline_class.__name__, ())
        if "controlnet" in inspect.signature(pipeline_class).parameters:
            also = (*also, *_CONTROL_INPUTS)
        return cls(
            name=pipeline_class.__name__,
            parameters={each.name: each.default for each in declared[1:]},
            needed=tuple(each.name for each in declared[1:] if each.name in also or _is_needed(each, notes)),
            output=_output_fields(call),
            annotations={
                each.name: each.annotation for each in declared[1:] if each.annotation is not inspect.Parameter.empty
            },
            tensors=tuple(each.name for each in declared if each.name in OF_FRAMES and _is_tensor(each.annotation)),
        )

    def parameter(self, field: str) -> str | None:
        """Return the parameter that a request field fills; None when the pipeline has none."""
        return next((name for name in PARAMETER_NAMES.get(field, ()) if name in self.parameters), None)

    @property
    def filled(self) -> frozenset[str | None]:
        """The parameters that a request can fill."""
        return frozenset(self.parameter(field) for field in PARAMETER_NAMES)

    @property
    def makes_video(self) -> bool:
        """True if the result is a video, by its field or by a parameter for the number of frames."""
        return self.parameter("num_frames") is not None or bool({*VIDEO_FIELDS} & {*(self.output or ())})

    def takes_frames(self, field: str) -> bool:
        """Return whether the parameter that a request field fills is a list of frames."""
        return self.parameter(field) in OF_FRAMES

    def needs(self, field: str) -> bool:
        """Return whether a call fails without the parameter that a request field fills."""
        return self.parameter(field) in self.needed

    def refusals(self) -> list[str]:
        """Return why no request can run it; empty when one can."""
        reasons = []
        if self.parameter("prompt") is None:
            reasons.append("it takes no prompt, which every request has")
        unfilled = [name for name in self.needed if name not in self.filled | ALWAYS_GIVEN]
        if unfilled:
            reasons.append(f"it needs {' and '.join(unfilled)}, which no request gives")
        if self.output is not None and not {*PICTURE_FIELDS} & {*self.output}:
            reasons.append(f"it returns {', '.join(self.output)}, and only pictures and videos are written")
        return reasons

    @property
    def media(self) -> frozenset[str]:
        """The parameters for images, videos and masks, by their names and defaults."""
        return frozenset(
            name
            for name, default in self.parameters.items()
            if default in (None, inspect.Parameter.empty) and _MEDIA.search(name) and not _DERIVED.search(name)
        )

    def other_inputs(self) -> tuple[str, ...]:
        """Return image, video and mask inputs that a call may take and no request fills: listed when a call fails."""
        return tuple(
            name for name in self.parameters if name in self.media - self.filled and self.parameters[name] is None
        )


# Parameters for media, and those for values computed from media.
_MEDIA = re.compile(r"image|video|frames|control|condition|pose|reference|mask|hint")
_DERIVED = re.compile(r"embeds|latents|attention_mask|scale|ids")
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
# A number or a text is never an input that must be given.
_SCALARS = (int, float, str, bool)


def _plain_call(pipeline_class: type) -> Any:
    """Return `__call__` without its decorators."""
    return inspect.unwrap(pipeline_class.__call__)


def _is_needed(parameter: inspect.Parameter, notes: str) -> bool:
    """Return whether a call needs a parameter: one without a default; or one with None, where neither the annotation
    nor the docstring allows it: diffusers writes `image: PipelineImageInput = None` for inputs that its checks then
    require."""
    if parameter.default is inspect.Parameter.empty:
        return True
    if parameter.default is not None or parameter.name in _FILLED - _FILES or parameter.name.endswith("latents"):
        return False
    return not _allows_none(parameter.annotation) and not _is_optional(parameter.name, notes)


def _allows_none(annotation: Any) -> bool:
    if annotation is inspect.Parameter.empty:
        return True
    if isinstance(annotation, str):
        return bool(re.search(r"\b(None|Optional)\b", annotation)) or annotation in {kind.__name__ for kind in _SCALARS}
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return type(None) in typing.get_args(annotation)
    return annotation in _SCALARS


def _is_tensor(annotation: Any) -> bool:
    """Return whether an annotation is a tensor, or a tensor or None, and nothing else."""
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    return text.removesuffix(" | None").rsplit(".", 1)[-1] in ("Tensor", "FloatTensor")


def _is_optional(name: str, notes: str) -> bool:
    """Return whether a docstring has `name (..., *optional*, ...)`."""
    entry = re.search(rf"^\s*{re.escape(name)} ?\(([^\n]*)", notes, re.MULTILINE)
    return entry is not None and "optional" in entry[1]


def _output_fields(call: Any) -> tuple[str, ...] | None:
    """Return the fields of the output classes that a call names, in its return annotation or in its code."""
    named = [*_in_annotation(call), *_in_code(call)]
    return tuple(dict.fromkeys(field.name for kind in named for field in dataclasses.fields(kind))) or None


def _in_annotation(call: Any) -> Iterator[Any]:
    annotation = inspect.signature(call).return_annotation
    parts = [annotation, *typing.get_args(annotation)]
    yield from (part for part in parts if _is_output(part))


def _in_code(call: Any) -> Iterator[Any]:
    if isinstance(call, types.FunctionType):
        found = (call.__globals__.get(name) for name in call.__code__.co_names)
        yield from (value for value in found if _is_output(value))


def _is_output(value: object) -> bool:
    from diffusers.utils import BaseOutput

    return isinstance(value, type) and issubclass(value, BaseOutput) and dataclasses.is_dataclass(value)
