"""JSON Schema of config files (`config schema`), made from what RuntimeConfig, GenerationRequest and the attention
backends declare; written into the package by scripts/write_configs.py.

It accepts every file that `--config` accepts. What several keys say together, and texts with a syntax of their own, are
checked by the runtime alone.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Iterable

from diffusion_runtime.cli.attention_schema import NUMBER, Schema, attention_definitions
from diffusion_runtime.config import (
    LORA_COMPONENTS,
    MAX_LORA_SCALE,
    REVISION,
    LoraConfig,
    ParallelConfig,
    RuntimeConfig,
)
from diffusion_runtime.core.options import NONE, MethodText
from diffusion_runtime.core.runtime_options import options_of
from diffusion_runtime.models.published import published_models
from diffusion_runtime.models.sampling_presets import sampling_presets
from diffusion_runtime.request.fields import (
    MAX_COUNT,
    MAX_LEVELS,
    MAX_REFERENCES,
    MAX_SCALE,
    Blocks,
    ByRole,
    Count,
    ImageFile,
    Levels,
    MediaFiles,
    Number,
    OneOf,
    Scales,
    SeedNumber,
    Seeds,
    SoundFile,
    Text,
    VideoFile,
)
from diffusion_runtime.request.frame_conditions import MAX_CONDITIONS, FrameConditions
from diffusion_runtime.request.frame_conditions import TEXT as CONDITION_TEXT
from diffusion_runtime.request.generation_request import REQUEST_FIELDS
from diffusion_runtime.request.prompt_switches import MAX_SWITCHES, TIME, PromptSwitches, SeedSwitches

_SEEDS = r"^\s*[0-9]{1,19}(-[0-9]{1,19})?\s*(,\s*[0-9]{1,19}(-[0-9]{1,19})?\s*)*$"
_NUMBERS = rf"^\s*{NUMBER}\s*(,\s*{NUMBER}\s*)*$"
_BY_ROLE = rf"\s*[^=,]+={NUMBER}"
_NAME = {"type": "string", "minLength": 1}


def schema_text() -> str:
    """The schema as it stands in its file."""
    return json.dumps(config_schema(), indent=1, ensure_ascii=False) + "\n"


def config_schema() -> Schema:
    """The schema of a config file (draft 7, which editors read)."""
    preset = _section(_request(name) for name in REQUEST_FIELDS if name not in ("prompt", "seed"))
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "diffusion_runtime config",
        "description": "A file for --config. A key that is left out or null leaves the value to the next level.",
        "type": ["object", "null"],
        "properties": {
            "runtime": {
                **_section(
                    (item.name, _runtime(item.name))
                    for item in dataclasses.fields(RuntimeConfig)
                    if item.name != "attention_override"
                ),
                "description": "How the pipeline is loaded.",
            },
            "request": {
                **_section(_request(name, several=True) for name in REQUEST_FIELDS),
                "description": "What to make.",
            },
            "presets": {
                "type": ["object", "null"],
                "propertyNames": {"anyOf": [{"enum": _preset_names()}, {"type": "string"}]},
                "additionalProperties": {"$ref": "#/definitions/preset"},
                "description": "Request values by name, for --preset.",
            },
            "tuning": {"description": "What `tune` measured: a record that decides nothing."},
        },
        "additionalProperties": False,
        "definitions": {**attention_definitions(), "preset": {**preset, "type": "object"}},
    }


def _section(keys: Iterable[tuple[str, Schema]]) -> Schema:
    """A mapping of these keys, any of which may be null."""
    properties = {}
    for name, schema in keys:
        described = {"description": schema["description"]} if "description" in schema else {}
        value = {key: part for key, part in schema.items() if key != "description"}
        alternatives = value["anyOf"] if list(value) == ["anyOf"] else [value]
        properties[name] = {**described, "anyOf": [*alternatives, {"type": "null"}]}
    return {"type": ["object", "null"], "properties": properties, "additionalProperties": False}


def _preset_names() -> list[str]:
    of_models = {name for model in published_models() for name in model.presets}
    return sorted(of_models | {preset.name for preset in sampling_presets()})


def _model_names() -> list[str]:
    """Short names first, then hub ids."""
    models = published_models()
    return list(dict.fromkeys([*(model.name for model in models), *(model.model_path for model in models)]))


def _runtime(name: str) -> Schema:
    return {**_runtime_value(name), "description": _documented(RuntimeConfig)[name]}


def _runtime_value(name: str) -> Schema:
    if name == "attention":
        return {"anyOf": [{"$ref": "#/definitions/attention"}]}
    if name == "model_path":
        return {"anyOf": [{"enum": _model_names()}, _NAME]}
    if name == "parallel":
        return _parallel()
    if name == "pipeline_arguments":
        return {"type": ["object", "null"], "propertyNames": {"pattern": r"^[A-Za-z_]\w*$"}}
    if name == "lora":
        return {"type": "array", "items": _lora()}
    return _declared(RuntimeConfig, name)


def _declared(declared: type, name: str) -> Schema:
    """Return the schema of an option by its check."""
    check = options_of(declared)[name].check
    assert check is not None, f"no schema is known for {name}"
    return check.schema()


def _parallel() -> Schema:
    documented = _documented(ParallelConfig)
    described = {name: {**_declared(ParallelConfig, name), "description": documented[name]} for name in documented}
    return {"type": "object", "properties": described, "additionalProperties": False}


def _lora() -> Schema:
    scale = {"type": "number", "minimum": -MAX_LORA_SCALE, "maximum": MAX_LORA_SCALE}
    values: dict[str, Schema] = {"path": _NAME, "scale": scale, "component": {"enum": list(LORA_COMPONENTS)}}
    values["revision"] = {"type": "string", "pattern": REVISION}
    described = {name: {**value, "description": _documented(LoraConfig)[name]} for name, value in values.items()}
    mapping = {"type": "object", "properties": described, "required": ["path"], "additionalProperties": False}
    return {"anyOf": [_NAME, mapping, {"type": "array", "items": [_NAME, scale], "minItems": 2, "maxItems": 2}]}


def _request(name: str, *, several: bool = False) -> tuple[str, Schema]:
    """several: whether a list of values is allowed where the request's field is repeatable."""
    declared = REQUEST_FIELDS[name]
    value = _checked(declared.check)
    if name == "seed":
        value = {"anyOf": [value, {"type": "string", "pattern": _SEEDS}]}
    if several and declared.repeatable:
        value = {"anyOf": [value, {"type": "array", "items": value}]}
    return name, {**value, "description": declared.help}


def _checked(check: object) -> Schema:
    """The values that a check of a request field lets pass."""
    if isinstance(check, Text):
        return {"type": "string", **({"pattern": r"\S"} if check.needs_words else {})}
    if isinstance(check, Count):
        return {"type": "integer", "minimum": check.minimum, "maximum": check.maximum}
    if isinstance(check, SeedNumber):
        return {"type": "integer", "minimum": 0, "maximum": 2**63 - 1}
    if isinstance(check, Number):
        return {"type": "number", "minimum": check.minimum, "maximum": check.maximum}
    if isinstance(check, Levels):
        level = {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
        several = {"type": "array", "items": level, "minItems": 1, "maxItems": MAX_LEVELS}
        return {"anyOf": [several, {"type": "string", "pattern": _NUMBERS}]}
    if isinstance(check, Scales):
        scale = {"type": "number", "minimum": 0, "maximum": MAX_SCALE}
        several = {"type": "array", "items": scale, "minItems": 1}
        return {"anyOf": [scale, several, {"type": "string", "pattern": _NUMBERS}]}
    if isinstance(check, ByRole):
        number = {"type": "number", "minimum": check.number.minimum, "maximum": check.number.maximum}
        pair = {"type": "array", "items": [{"type": "string"}, number], "minItems": 2, "maxItems": 2}
        mapping = {"type": "object", "additionalProperties": number, "minProperties": 1}
        text = {"type": "string", "pattern": rf"^\s*({NUMBER}|{_BY_ROLE}(,{_BY_ROLE})*)\s*$"}
        return {"anyOf": [number, {"type": "array", "items": pair, "minItems": 1}, mapping, text]}
    if isinstance(check, OneOf):
        return {"enum": list(check.names)}
    if isinstance(check, MethodText):
        methods = "|".join(map(re.escape, check.settings.methods))
        return {
            "anyOf": [
                {"enum": [*check.settings.methods, NONE]},
                {"type": "string", "pattern": rf"^\s*({methods})\s*(:.*)?$|^\s*{NONE}\s*:?$"},
            ]
        }
    if isinstance(check, FrameConditions):
        frame, strength = {"type": "integer", "minimum": 0, "maximum": MAX_COUNT}, {"minimum": 0, "maximum": 1}
        items = [frame, _NAME, {"type": "number", **strength}]
        listed = {"type": "array", "items": items, "minItems": 2, "maxItems": 3}
        text = {"type": "string", "pattern": CONDITION_TEXT}
        several = {"type": "array", "items": {"anyOf": [listed, text]}, "maxItems": MAX_CONDITIONS}
        return {"anyOf": [several, text]}
    if isinstance(check, MediaFiles):
        return {"anyOf": [_NAME, {"type": "array", "items": _NAME, "maxItems": MAX_REFERENCES}]}
    if isinstance(check, ImageFile):
        return {"anyOf": [_NAME, {"type": "array", "items": _NAME}]} if check.several else _NAME
    if isinstance(check, PromptSwitches | SeedSwitches):
        at = {"anyOf": [{"type": "integer", "minimum": 1, "maximum": MAX_COUNT}, {"type": "string", "pattern": TIME}]}
        digits = r"[0-9]{1,19}\s*$"
        second: dict[str, object] = {"type": "string", "pattern": r"\S"}
        if isinstance(check, SeedSwitches):
            number = {"type": "integer", "minimum": 0, "maximum": 2**63 - 1}
            second = {"anyOf": [number, {"type": "string", "pattern": rf"^\s*{digits}"}]}
        pair = {"type": "array", "items": [at, second], "minItems": 2, "maxItems": 2}
        last = digits if isinstance(check, SeedSwitches) else r"\S"
        text = {"type": "string", "pattern": rf"{TIME.removesuffix('$')}\s+{last}"}
        return {"type": "array", "items": {"anyOf": [pair, text]}, "maxItems": MAX_SWITCHES}
    if isinstance(check, Seeds):
        seed = {"type": "integer", "minimum": 0, "maximum": 2**63 - 1}
        seeds = {"type": "array", "items": seed, "minItems": 1, "maxItems": MAX_LEVELS}
        return {"anyOf": [seed, seeds, {"type": "string", "pattern": r"^\s*[0-9]{1,19}\s*(,\s*[0-9]{1,19}\s*)*$"}]}
    if isinstance(check, Blocks):
        block = {"type": "integer", "minimum": 0, "exclusiveMaximum": MAX_COUNT}
        several = {"type": "array", "items": block, "minItems": 1, "maxItems": MAX_LEVELS, "uniqueItems": True}
        return {"anyOf": [block, several, {"type": "string", "pattern": r"^\s*[0-9]{1,7}\s*(,\s*[0-9]{1,7}\s*)*$"}]}
    assert isinstance(check, SoundFile | VideoFile), f"no schema is known for {check}"
    return _NAME


def _documented(declared: type) -> dict[str, str]:
    """Return the text about each field in the docstring of a dataclass: `name: text`, or `name, name: text`, at the
    start of a line or of a sentence."""
    names = [item.name for item in dataclasses.fields(declared)]
    text = " ".join(inspect.cleandoc(declared.__doc__ or "").split())
    one = "|".join(sorted(names, key=len, reverse=True))
    starts = list(re.finditer(rf"(?:^|(?<=[.;] ))((?:(?:{one}), )*(?:{one})): ", text))
    found = {}
    for start, following in zip(starts, [*starts[1:], None], strict=True):
        words = text[start.end() : following.start() if following else None].strip().rstrip(".;")
        found.update(dict.fromkeys(start[1].split(", "), f"{words[:1].upper()}{words[1:]}."))
    return found
