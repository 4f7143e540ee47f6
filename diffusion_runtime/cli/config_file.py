"""`--config FILE` and `--set KEY=VALUE`: read, checked key by key, errors that name the file and the key."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_origin

from diffusion_runtime.cli.attention_flags import overlay_attention, split_entries
from diffusion_runtime.cli.prompts import parse_seeds
from diffusion_runtime.config import ParallelConfig, RuntimeConfig
from diffusion_runtime.core.spellings import resolve
from diffusion_runtime.errors import ConfigError, UsageError, nearest, shown
from diffusion_runtime.request.generation_request import REQUEST_FIELDS, GenerationRequest, request_field_types

SECTIONS = ("runtime", "request", "presets")
# The JSON Schema of such files, which config_schema.py makes; editors find it by a file's first line.
SCHEMA_FILE = Path(__file__).parents[1] / "assets" / "config.schema.json"
# What `tune` measured: a record for people, which decides nothing.
_RECORD = "tuning"
_BOOLEAN_KEYS = [item.name for item in dataclasses.fields(RuntimeConfig) if isinstance(item.default, bool)]

# What a key is refused without, while each is checked alone; it may come from a flag.
_CHECKED_BESIDE = {"quantization_ignored_layers": {"quantization": "fp8"}}
# Of --set; `pipeline` has keywords of diffusers' own.
_SET_SECTIONS = ("request", "runtime", "pipeline")


@dataclass(frozen=True)
class FileConfig:
    """runtime: RuntimeConfig fields; request: GenerationRequest fields, except that repeatable ones
    (`prompt`, `negative_prompt`, `seed`) are lists; settings: the same, of --set; presets: name to GenerationRequest
    fields."""

    runtime: Mapping[str, Any] = field(default_factory=dict)
    request: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def read_config(path: str | None, settings: Sequence[str] = ()) -> FileConfig:
    """The file at `path` (None: no file) with `settings`, texts of KEY=VALUE, on top.

    Raises ConfigError for a missing file, a document that is not a mapping, unknown sections and keys, wrong types.
    """
    where = "" if path is None else f"{path}: "
    content = {} if path is None else _in_sections(_load(Path(path)), where)
    for section, values in content.items():
        if section not in (*SECTIONS, _RECORD):
            raise ConfigError(f"{where}unknown section {shown(section)}.{nearest(section, SECTIONS)}")
        if values is not None and not isinstance(values, Mapping):
            raise ConfigError(f"{where}{section}: expected a mapping, got {shown(values)}")
    presets = {}
    for name, values in (content.get("presets") or {}).items():
        if not isinstance(name, str) or not isinstance(values, Mapping):
            raise ConfigError(f"{where}presets.{name[:80]}: expected a mapping of request values, got {shown(values)}")
        presets[name] = _check_request(values, f"{where}presets.{name}", allow_prompt=False)
    runtime = _check_runtime(content.get("runtime") or {}, f"{where}runtime")
    request = _check_request(content.get("request") or {}, f"{where}request")
    return _with_settings(FileConfig(runtime, request, presets=presets), settings)


def schema_comment(schema: str | Path = SCHEMA_FILE) -> str:
    """The first line of a config file, by which editors find its schema. schema: a path, absolute or from the file's
    folder."""
    return f"# yaml-language-server: $schema={schema}\n"


def _load(path: Path) -> Mapping[str, Any]:
    from diffusion_runtime.untrusted.files import check_file, check_path
    from diffusion_runtime.untrusted.yaml_text import read_yaml_file

    if not os.path.lexists(check_path(path, "--config")):
        raise ConfigError(f"--config: {path} is not a file.{_nearest_file(path)}")
    check_file(path, "--config")
    content = read_yaml_file(path)
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path}: expected a mapping with {', '.join(SECTIONS)}, got a {type(content).__name__}")
    return content


def _in_sections(content: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """A file with flags at its top, as SGLang's have (`model-path: X`), in the sections of ours; any other as it is.

    Raises ConfigError for a key that is no flag of a model, a request or parallel degrees, or has no counterpart here.
    """
    if not content or any(key in SECTIONS or isinstance(value, Mapping) for key, value in content.items()):
        return content
    sections = {
        "runtime": [item.name for item in dataclasses.fields(RuntimeConfig) if item.name != "attention_override"],
        "request": list(request_field_types()),
        "parallel": [item.name for item in dataclasses.fields(ParallelConfig)],
    }
    flags = {*_KEY_OF, *itertools.chain(*sections.values())}
    if not any(key.lower().replace("-", "_") in flags or resolve("flag", key) for key in content):
        return content
    found: dict[str, dict[str, Any]] = {name: {} for name in sections}
    refusals = []
    entries: list[str] = []
    for typed, value in content.items():
        try:
            pairs = _own_keys(typed, value)
        except ConfigError as error:
            refusals.append(str(error))
            continue
        for key, own_value in pairs:
            section = next((name for name, known in sections.items() if key in known), None)
            if key == "attention_backend_config":
                entries += [f"default.extra.{each.strip()}" for each in str(own_value).split(",")]
            elif section is None:
                refusals.append(_unknown_key(typed, key, itertools.chain(*sections.values())))
            elif key in found[section]:
                refusals.append(f"{shown(typed)}: {key} is given twice; leave one out")
            else:
                found[section][key] = own_value
    if refusals:
        raise ConfigError(where + "\n  ".join(refusals))
    if entries:
        found["runtime"]["attention"] = overlay_attention(found["runtime"].get("attention"), split_entries(entries))
    parallel = found.pop("parallel")
    return {**found, "runtime": {**found["runtime"], **({"parallel": parallel} if parallel else {})}}


def _unknown_key(typed: str, key: str, known: Iterable[str]) -> str:
    """Say why a key at the top of a file is none: it is a flag that is typed alone, or unknown."""
    from diffusion_runtime.cli.options import run_parameters, source_parameters

    if any(key == flag.name for flag in (*source_parameters(), *run_parameters())):
        return f"unknown section or flag {shown(typed)}: it is typed alone; write --{key.replace('_', '-')}"
    return f"unknown section or flag {shown(typed)}.{nearest(key, [*SECTIONS, *known])}"


# Flags whose key in a config has another name.
_KEY_OF = {"attention_backend": "attention"}


def _own_keys(typed: str, value: Any) -> list[tuple[str, Any]]:
    """The keys of ours, with their values, that a flag at the top of a file stands for. Raises ConfigError."""
    key = typed.lower().replace("-", "_")
    theirs = resolve("flag", typed)
    if theirs is None:
        return [(_KEY_OF.get(key, key), value)]
    if not theirs.means:
        raise ConfigError(theirs.refusal)
    words = theirs.means.split(" ")
    if theirs.value:
        apart = theirs.taken_apart(str(value))
        if apart is None:
            raise ConfigError(f"{typed}: expected a value such as {theirs.example}, got {shown(value)}")
        words = apart
    elif len(words) == 1:
        own = words[0][2:].replace("-", "_")
        return [(_KEY_OF.get(own, own), value)]
    elif not isinstance(value, bool):
        raise ConfigError(f"{typed}: expected true or false, got {shown(value)}")
    elif not value:
        return []
    pairs = zip(words[::2], words[1::2], strict=True)
    keys = [(flag[2:].replace("-", "_"), int(text) if text.isdecimal() else text) for flag, text in pairs]
    return [(_KEY_OF.get(own, own), own_value) for own, own_value in keys]


def _nearest_file(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.suffix in (".yaml", ".yml")]
    except OSError:
        return f" The folder {path.parent} does not exist either."
    return nearest(path.name, names) or f" {path.parent} holds no .yaml file."


def _check_request(values: Mapping[str, Any], where: str, *, allow_prompt: bool = True) -> dict[str, Any]:
    """Checked values; `prompt` and `seed` become lists, and `negative_prompt` where a list of prompts is allowed."""
    known = request_field_types()
    several = [name for name, declared in REQUEST_FIELDS.items() if declared.repeatable and allow_prompt]
    checked: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known or (key in ("prompt", "seed") and not allow_prompt):
            allowed = known if allow_prompt else set(known) - {"prompt", "seed"}
            raise ConfigError(f"{where}: unknown key {shown(key)}.{nearest(key, allowed)}")
        if value is None:
            continue
        if key in several and key != "seed" and not isinstance(value, list):
            value = [value]
        try:
            if key == "seed":
                value = parse_seeds(value if isinstance(value, list) else [value])
            for single in value if key in several else [value]:
                # The request's own check, one key at a time, so that the error can say where the value stands.
                GenerationRequest.from_dict({"prompt": "checked", key: single})
        except UsageError as error:
            raise ConfigError(f"{where}.{error}") from error
        checked[key] = value
    return checked


def _check_runtime(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    known = [item.name for item in dataclasses.fields(RuntimeConfig) if item.name != "attention_override"]
    checked: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            raise ConfigError(f"{where}: unknown key {shown(key)}.{nearest(key, known)}")
        if value is None:
            continue
        try:
            if key == "attention":
                value = overlay_attention(value, {})
            elif key == "parallel" and not isinstance(value, Mapping):
                raise ConfigError(f"parallel: expected a mapping, got {shown(value)}")
            else:
                RuntimeConfig.from_dict({**_CHECKED_BESIDE.get(key, {}), key: value})
        except UsageError as error:
            message = f"attention: {error}" if key == "attention" else error
            raise ConfigError(f"{where}.{message}") from error
        checked[key] = value
    return checked


def _with_settings(config: FileConfig, settings: Sequence[str]) -> FileConfig:
    request: dict[str, Any] = {}
    runtime: dict[str, Any] = {}
    attention_entries: list[str] = []
    parallel: dict[str, Any] = {}
    keywords: dict[str, Any] = {}
    for setting in settings:
        path, equals, text = setting.partition("=")
        section, _, key = path.strip().partition(".")
        if not equals or not key:
            known = ", ".join(f"{each}.KEY=VALUE" for each in _SET_SECTIONS)
            raise ConfigError(f"--set: expected {known}, got {shown(setting)}")
        if section == "request":
            value = request_value(key, text)
            # What a flag may be given again for.
            request[key] = [*request.get(key, ()), *value] if isinstance(value, list) else value
        elif section == "pipeline":
            keywords[key] = text
        elif section != "runtime":
            raise ConfigError(f"--set {setting}: unknown section {shown(section)}.{nearest(section, _SET_SECTIONS)}")
        elif key.startswith("attention."):
            attention_entries.append(f"{key.removeprefix('attention.')}={text}")
        elif key.startswith("parallel."):
            parallel[key.removeprefix("parallel.")] = split_entries([f"value={text}"])["value"]
        else:
            runtime[key] = {"true": True, "false": False}.get(text, text) if key in _BOOLEAN_KEYS else text
    if parallel:
        runtime["parallel"] = {**config.runtime.get("parallel", {}), **parallel}
    if keywords:
        runtime["pipeline_arguments"] = {**(config.runtime.get("pipeline_arguments") or {}), **keywords}
    merged = {**config.runtime, **_check_runtime(runtime, "--set runtime")}
    if attention_entries:
        merged["attention"] = overlay_attention(merged.get("attention"), split_entries(attention_entries))
    return FileConfig(merged, config.request, _check_request(request, "--set request"), config.presets)


def request_value(key: str, text: str) -> Any:
    """`128` as the type that the request's field has, `5s a blue star` as the one text of a list; text that does not
    fit is left to the request's own check."""
    kind = request_field_types().get(key, str)
    if get_origin(kind) is list:
        return [text]
    if kind is str or key == "seed":
        return text
    try:
        return kind(text)
    except ValueError:
        return text
