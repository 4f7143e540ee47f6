"""Further keywords of a diffusers pipeline's call (`--set pipeline.NAME=value`), checked against its signature."""

from __future__ import annotations

import contextlib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from diffusion_runtime.diffusers_bridge.pipeline_interface import ALWAYS_GIVEN, PARAMETER_NAMES, PipelineInterface
from diffusion_runtime.errors import ConfigError, nearest, shown
from diffusion_runtime.request.generation_request import REQUEST_FIELDS
from diffusion_runtime.untrusted.document import DocumentError
from diffusion_runtime.untrusted.json_text import parse_json

_NUMBERS_AND_TEXTS = (bool, int, float, str)
_SPELLED = {"true": True, "True": True, "false": False, "False": False, "none": None, "None": None}
_LISTS = (list, tuple, Sequence, typing.Iterable)


def further_arguments(interface: PipelineInterface, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return keywords of a pipeline's call with their values in the types of its signature. given: numbers, texts and
    lists of them, or texts that spell those.

    Raises ConfigError for a name that the call does not have, one that requests or the runtime fill, an input that is
    no plain value, and a value of another type.
    """
    return {name: _value(interface, name, value) for name, value in given.items()}


def _value(interface: PipelineInterface, name: str, value: Any) -> Any:
    key = f"pipeline.{name}"
    if name not in interface.parameters:
        known = [each for each in interface.parameters if _refusal(interface, each) is None]
        raise ConfigError(f"{key}: {interface.name} has no such keyword.{nearest(name, known)}")
    if (refusal := _refusal(interface, name)) is not None:
        raise ConfigError(f"{key}: {refusal}")
    annotation = interface.annotations.get(name, Any)
    for candidate in _readings(value):
        if fits(candidate, annotation):
            return candidate
    raise ConfigError(f"{key}: expected {_named(annotation)}, got {shown(value)}")


def _refusal(interface: PipelineInterface, name: str) -> str | None:
    """Return why a keyword cannot be set by its name; None where it can."""
    field = next((field for field in PARAMETER_NAMES if interface.parameter(field) == name), None)
    if field is not None:
        flag = REQUEST_FIELDS[field].flag or f"--{field.replace('_', '-')}"
        return f"it is a value of requests; write {flag}, or --set request.{field}=..."
    if name in ALWAYS_GIVEN:
        return "the runtime gives it; leave it out"
    if name in interface.media:
        return "it is a picture, a video or a mask, and no text names a file to a pipeline; leave it out"
    annotation = interface.annotations.get(name, Any)
    if not any(_is_plain(each) for each in _members(annotation)):
        return f"it takes {_named(annotation)}, which is no number, text or list; call the pipeline in a script"
    return None


def _readings(value: Any) -> Iterator[Any]:
    """Yield what a value may mean: itself, or of a text first what it spells."""
    if isinstance(value, str):
        if value in _SPELLED:
            yield _SPELLED[value]
        with contextlib.suppress(DocumentError):
            yield parse_json(value, max_values=10_000)
    yield value


def fits(value: Any, annotation: Any) -> bool:
    """Return whether a plain value has the type of an annotation; any plain value has one that says nothing."""
    return any(_fits(value, each) for each in _members(annotation))


def _fits(value: Any, kind: Any) -> bool:
    if kind is Any:
        return True
    if kind in (int, float) and isinstance(value, bool):
        return False
    if kind is float:
        return isinstance(value, int | float)
    if kind in (*_NUMBERS_AND_TEXTS, types.NoneType):
        return isinstance(value, kind)
    origin, arguments = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin in (dict, Mapping):
        inner = arguments[1] if len(arguments) == 2 else Any
        return isinstance(value, dict) and all(fits(each, inner) for each in value.values())
    if _is_list(origin):
        if origin is tuple and arguments and arguments[-1] is not Ellipsis:
            return isinstance(value, list) and len(value) == len(arguments) and all(map(fits, value, arguments))
        inner = arguments[0] if arguments else Any
        return isinstance(value, list) and all(fits(each, inner) for each in value)
    return False


def _members(annotation: Any) -> tuple[Any, ...]:
    """Return the alternatives of an annotation. A text, as of modules that postpone them, says nothing here."""
    if isinstance(annotation, str) or annotation is typing.Any:
        return (Any,)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return tuple(each for inner in typing.get_args(annotation) for each in _members(inner))
    return (annotation,)


def _is_plain(kind: Any) -> bool:
    """Return whether a number, a text, a list or a mapping of them can be of a type."""
    if kind is Any or kind in _NUMBERS_AND_TEXTS:
        return True
    origin, arguments = typing.get_origin(kind) or kind, typing.get_args(kind)
    if not (origin in (dict, Mapping) or _is_list(origin)):
        return False
    inner = [each for argument in arguments[-1:] for each in _members(argument) if argument is not Ellipsis]
    return not inner or any(map(_is_plain, inner))


def _is_list(origin: Any) -> bool:
    return origin in (*_LISTS, *(typing.get_origin(each) for each in _LISTS))


def _named(annotation: Any) -> str:
    """Return the plain alternatives of an annotation as text; all of them where none is."""
    members = _members(annotation)
    shown_ones = members if not any(map(_is_plain, members)) else [each for each in members if _is_plain(each)]
    # The name of list[int] is list.
    names = [str(each) if typing.get_args(each) else getattr(each, "__name__", str(each)) for each in shown_ones]
    return " or ".join(dict.fromkeys(names))
