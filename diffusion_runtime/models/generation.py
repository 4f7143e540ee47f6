"""generation.json of a model folder: the request values the model was made for, named presets of them, and the length
of the texts it was trained on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diffusion_runtime.core.model_folder import AnyFolder, ConfigFile, ModelFolder, read_json_in
from diffusion_runtime.errors import ModelLoadError, RequestError, nearest, shown
from diffusion_runtime.request.generation_request import GenerationRequest, request_field_types

FILE_NAME = "generation.json"
_KEYS = ("defaults", "presets", "max_text_tokens", "num_frames")


@dataclass(frozen=True)
class GenerationSettings:
    """Request values by field name. defaults: where a request sets none; presets: by preset name. max_text_tokens:
    length that prompts are padded to where the transformer reads padding; num_frames: the fewest and the most frames of
    a clip, in families with such limits; each is None for that of published models."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    max_text_tokens: int | None = None
    num_frames: tuple[int, int] | None = None


def generation_settings(folder: AnyFolder) -> GenerationSettings:
    """Read generation.json: {"defaults": {...}, "presets": {"draft": {...}}, "max_text_tokens": 64}; empty when there
    is no such file.

    Raises ModelLoadError that names the file and the key for one that is not a request value.
    """
    path = folder / FILE_NAME
    modular = folder.modular if isinstance(folder, ModelFolder) else None
    own = {} if modular is None else modular.defaults
    if not path.exists():
        return GenerationSettings(own)
    values = read_json_in(folder, FILE_NAME)
    for key in values:
        if key not in _KEYS:
            raise ModelLoadError(f"{path}: unknown key {shown(key)}.{nearest(key, _KEYS)}")
    max_text_tokens = values.get("max_text_tokens")
    if max_text_tokens is not None:
        max_text_tokens = ConfigFile(path, values).whole_number("max_text_tokens")
    presets = _mapping(values.get("presets", {}), f"{path}: key 'presets'")
    return GenerationSettings(
        {**own, **_request_values(values.get("defaults", {}), f"{path}: key 'defaults'")},
        {name: _request_values(preset, f"{path}: key 'presets.{name}'") for name, preset in presets.items()},
        max_text_tokens,
        _limits(path, values),
    )


def _limits(path: Path, values: Mapping[str, Any]) -> tuple[int, int] | None:
    found = values.get("num_frames")
    if found is None:
        return None
    is_pair = isinstance(found, list) and len(found) == 2 and all(type(each) is int for each in found)
    if not is_pair or not 1 <= found[0] <= found[1]:
        raise ModelLoadError(f"{path}: key 'num_frames': expected [fewest, most], got {shown(found)}")
    return found[0], found[1]


def _request_values(values: object, where: str) -> dict[str, Any]:
    mapping = _mapping(values, where)
    known = [name for name in request_field_types() if name != "prompt"]
    for key in mapping:
        if key not in known:
            raise ModelLoadError(f"{where}: unknown request value {shown(key)}.{nearest(key, known)}")
    try:
        GenerationRequest(prompt="any", **mapping)
    except RequestError as error:
        raise ModelLoadError(f"{where}: {error}") from error
    return dict(mapping)


def _mapping(values: object, where: str) -> Mapping[str, Any]:
    if not isinstance(values, dict):
        raise ModelLoadError(f"{where}: expected an object with keys, got {shown(values)}")
    return values
