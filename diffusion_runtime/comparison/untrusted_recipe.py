"""Recipes of strangers: what `verify` takes of the recipe in a file that anybody may have written.

No path of a recipe is opened and no host that it names is asked: a file that it was made with is one that the user
gives, found by its digest; the model is where the user says, or one of the hub's cache under its published name. What
may be taken is listed, and an option that is not is refused.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from diffusion_runtime.config import RuntimeConfig, runtime_options
from diffusion_runtime.decoders.latent_upsampler import upsampler_place
from diffusion_runtime.errors import ConfigError, RequestError, UsageError, shown
from diffusion_runtime.media.clips import MAX_CLIP_BYTES
from diffusion_runtime.models.model_sources import EMBEDDED_FOLDERS
from diffusion_runtime.models.published import published_models
from diffusion_runtime.models.weight_fingerprint import fingerprint
from diffusion_runtime.request.generation_request import INPUT_FIELDS, GenerationRequest
from diffusion_runtime.request.step_cache_options import MagCacheOptions, StepCacheSettings, TeaCacheOptions
from diffusion_runtime.untrusted.files import open_file, user_path
from diffusion_runtime.weights.lora.shipped import SHIPPED_LORAS

# Options of RuntimeConfig by what is taken of them. Names and numbers, which are checked as those of a config.
TAKEN = (
    "backend", "compile", "quantization", "quantization_ignored_layers", "revision", "vae_decode", "vae_tiling",
    "variant", "workflow",
)  # fmt: skip
# Places of models, in the hub's cache under a published name alone.
MODELS = ("model_path", "like")
# Files of weights, which the user gives.
FILES = (*(name for name, option in runtime_options().items() if option.is_weight_path), "upsampler_path")
# With readers of their own below.
OWN = ("attention", "attention_override", "dtype", "lora", "vae_decoder")
# Not taken: a text among them may be a path that a pipeline of diffusers' opens.
REFUSED = ("pipeline_arguments",)

# Decoders that are named and no files.
_DECODERS = ("tiny", "diffusion")
_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*")
_FILE_OPTION = "_file_path"
_SHOWN_DIGITS = 12


class GivenFiles:
    """Files that the user gives for those that a recipe was made with, found by what they hold."""

    def __init__(self, paths: Sequence[str]) -> None:
        """Raises ConfigError for a path that is neither a file that can be read nor a folder."""
        self._places = [user_path(path, "--input") for path in paths]
        for place in self._places:
            if not place.is_dir():
                open_file(place, "--input").close()
        self._contents: dict[str, str] = {}

    def by_content(self, digest: object, name: str) -> str:
        """Return the path of the file with this SHA-256. name: the request field, for messages. Raises ConfigError."""
        if not self._contents:
            self._contents = {_sha256(str(place)): str(place) for place in self._places if not place.is_dir()}
        return self._found(None if digest is None else self._contents.get(str(digest)), digest, name)

    def by_fingerprint(self, digest: object, name: str) -> str:
        """Return the path of the weights with this fingerprint. name: the option, for messages. Raises ConfigError."""
        for place in self._places:
            own = upsampler_place(place) if name == "upsampler_path" else place
            if digest is not None and fingerprint(own) == digest:
                return str(place)
        return self._found(None, digest, name)

    @staticmethod
    def _found(path: str | None, digest: object, name: str) -> str:
        if path is not None:
            return path
        if not isinstance(digest, str):
            raise ConfigError(
                f"{name}: the recipe names a file and keeps no digest of it, so that none can take its place: it "
                "cannot be verified"
            )
        raise ConfigError(
            f"{name}: it was made with a file that is not in it, of digest {shown(digest[:_SHOWN_DIGITS])}...; give "
            "that file with --input: none of those given has this digest"
        )


def config_of(recipe: Mapping[str, Any], given: GivenFiles, model_path: str | None, device: str) -> RuntimeConfig:
    """Return the options to make a recipe's clip with, off the network. model_path: where the user says that the model
    is, None for the hub's cache. Raises ConfigError for what is not taken from a recipe, with what to type."""
    if recipe.get("continued") is not None:
        raise ConfigError(
            "the first steps of this clip were made with other values than the rest (finish --allow-changes, "
            "`continued` in its recipe): expected a recipe that makes all of it; this file cannot be verified"
        )
    recorded, weights = _section(recipe, "runtime"), _section(recipe, "weights")
    options = runtime_options()
    if (unknown := next((name for name in recorded if name not in options), None)) is not None:
        raise ConfigError(
            f"the recipe's runtime has a key that is unknown here: {shown(unknown)}; it is of version "
            f"{shown(recipe.get('version'))}: verify it with that version"
        )
    if (refused := next((name for name in REFUSED if recorded.get(name)), None)) is not None:
        raise ConfigError(
            f"{refused}: the recipe has {shown(recorded[refused])}, of which a text may be the path of a file; "
            "expected a recipe without: this file cannot be verified"
        )
    values: dict[str, Any] = {name: recorded[name] for name in TAKEN if recorded.get(name) is not None}
    for name in FILES:
        if recorded.get(name) is not None:
            values[name] = given.by_fingerprint(weights.get(name), name)
    decoder = recorded.get("vae_decoder")
    if decoder is not None:
        is_named = decoder in _DECODERS
        values["vae_decoder"] = decoder if is_named else given.by_fingerprint(weights.get("vae_decoder"), "vae_decoder")
    values["lora"] = _loras(_listed(recorded.get("lora")), _listed(weights.get("lora")), given)
    values.update(_attention(recipe, recorded, given))
    dtype = _section(recipe, "model").get("dtype")
    if dtype is not None:
        values["dtype"] = dtype
    if model_path is not None:
        if model_path != recorded.get("model_path"):
            values.pop("revision", None)
        values["model_path"] = model_path
    else:
        values["model_path"] = _published(recorded.get("model_path", RuntimeConfig.model_path), "model_path")
    if recorded.get("like") is not None:
        values["like"] = _published(recorded["like"], "like")
    return RuntimeConfig.from_dict({**values, "device": device, "offline": True, "download": False})


def request_of(recipe: Mapping[str, Any], given: GivenFiles) -> GenerationRequest:
    """Return the request of a recipe, with given files in place of those that it names. Raises UsageError."""
    values = {name: value for name, value in _section(recipe, "request").items() if value is not None}
    inputs = _section(recipe, "inputs")
    for name in INPUT_FIELDS:
        if values.get(name):
            values[name] = _given_inputs(values[name], inputs.get(name), name, given)
    if "step_cache" in values:
        values["step_cache"] = _step_cache(values["step_cache"], inputs.get("step_cache"), given)
    try:
        return GenerationRequest.from_dict(values)
    except UsageError as error:
        raise RequestError(f"the recipe, of version {shown(recipe.get('version'))}: {error}") from error


def _given_inputs(value: Any, digests: Any, name: str, given: GivenFiles) -> Any:
    """Return the value of a field, a path, several or [frame, path, strength] each, with given paths."""
    several = value if isinstance(value, list) else [value]
    known = digests if isinstance(digests, list) else [digests]
    if len(several) != len(known):
        raise ConfigError(
            f"{name}: the recipe names {len(several)} files and keeps {len(known)} digests; it is damaged"
        )
    found = []
    for each, digest in zip(several, known, strict=True):
        path = given.by_content(digest, name)
        found.append([each[0], path, each[2]] if isinstance(each, list) and len(each) == 3 else path)
    return found if isinstance(value, list) else found[0]


def _step_cache(text: Any, digest: Any, given: GivenFiles) -> Any:
    settings = StepCacheSettings.parse(text) if isinstance(text, str) else None
    options = None if settings is None else settings.options
    if not isinstance(options, MagCacheOptions | TeaCacheOptions) or not options.file:
        return text
    assert settings is not None
    options = dataclasses.replace(options, file=given.by_content(digest, "step_cache"))
    return dataclasses.replace(settings, options=options).text


def _loras(recorded: Sequence[Any], digests: Sequence[Any], given: GivenFiles) -> list[dict[str, Any]]:
    found = []
    for index, each in enumerate(recorded):
        if not isinstance(each, Mapping):
            raise ConfigError(f"lora: expected a mapping, got {shown(each)}; the recipe is damaged")
        kept = {name: each[name] for name in ("scale", "component") if name in each}
        path = each.get("path")
        if not isinstance(path, str) or path not in SHIPPED_LORAS:
            path = given.by_fingerprint(digests[index] if index < len(digests) else None, "lora")
        found.append({**kept, "path": path})
    return found


def _attention(recipe: Mapping[str, Any], recorded: Mapping[str, Any], given: GivenFiles) -> dict[str, Any]:
    """Return the levels of the choice of attention, with given files in place of those that options name."""
    rows = [each for each in _listed(recipe.get("attention")) if isinstance(each, Mapping)]
    named = {
        str(value)
        for row in rows
        for name, value in _section(row, "options").items()
        if name.endswith(_FILE_OPTION) and value is not None
    }
    digests = dict(zip(sorted(named), _listed(_section(recipe, "weights").get("attention")), strict=False))
    found: dict[str, Any] = {}
    for level in ("attention", "attention_override"):
        value = recorded.get(level)
        if value is None:
            continue
        if not isinstance(value, Mapping):
            raise ConfigError(
                f"{level}: the recipe has {shown(value)}, a name that diffusers reads or a file; expected the choices "
                "themselves: this file cannot be verified"
            )
        found[level] = _with_given(value, digests, given)
    # A variable of the environment is not in the recipe; the default that it set is.
    for row in rows:
        if row.get("source") == "environment" and isinstance(row.get("backend"), str):
            found["attention"] = {**found.get("attention", {}), "default": {"backend": row["backend"]}}
    return found


def _with_given(value: Any, digests: Mapping[str, Any], given: GivenFiles, key: str = "") -> Any:
    if isinstance(value, Mapping):
        return {name: _with_given(each, digests, given, str(name)) for name, each in value.items()}
    if isinstance(value, list):
        return [_with_given(each, digests, given, key) for each in value]
    if key.endswith(_FILE_OPTION) and value is not None:
        return given.by_fingerprint(digests.get(str(value)), key)
    return value


def _published(name: Any, key: str) -> str:
    """Return the name of a model of this package or of the hub. Raises ConfigError for a path."""
    if isinstance(name, str) and name in EMBEDDED_FOLDERS:
        return name
    is_published = any(name == each.name for each in published_models())
    if not isinstance(name, str) or not (is_published or _HUB_ID.fullmatch(name)):
        what = f"the recipe's model is {shown(name)}, a place of the machine that made the file"
    elif os.path.lexists(name):
        what = f"the recipe's model is {shown(name)}, and a file or folder of that name is here"
    else:
        return name
    advice = "say where it is with --model-path" if key == "model_path" else "this file cannot be verified"
    raise ConfigError(f"{key}: {what}; {advice}")


def _sha256(path: str) -> str:
    digest = hashlib.sha256()
    with open_file(path, "--input", max_bytes=MAX_CLIP_BYTES) as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def _section(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = values.get(name)
    return found if isinstance(found, Mapping) else {}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
