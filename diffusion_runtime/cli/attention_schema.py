"""JSON Schema of the `attention` key of a config file, from what backends, roles and their options declare."""

from __future__ import annotations

import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from diffusion_runtime.attention.backends.registry import KNOWN_NAMES, available_names, find_backend
from diffusion_runtime.attention.config import AUTO
from diffusion_runtime.attention.roles import is_role, known_roles
from diffusion_runtime.core.spellings import table_of

Schema = dict[str, Any]

NUMBER = r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?"
# A number in quotes is read as one.
_NUMBER_TEXT = rf"^\s*{NUMBER}\s*$"
_WHOLE_TEXT = r"^\s*[-+]?[0-9]+\s*$"
_WORD = "^([tT]rue|[fF]alse|TRUE|FALSE|yes|no|on|off)$"
_RANGE = r"-?[0-9]{1,9}(-(-?[0-9]{1,9}))?"


def attention_definitions() -> dict[str, Schema]:
    """Schemas by name, to be referred to as `#/definitions/NAME`; `attention` is the key's own."""
    optional_object = {"type": ["object", "null"]}
    spec_keys = {
        "backend": {"$ref": "#/definitions/backend"},
        "name": {"$ref": "#/definitions/backend", "description": "The same as backend."},
        "extra": {**optional_object, "description": "Options of the backend."},
        "options": {**optional_object, "description": "The same as extra."},
    }
    one_name = [{"not": {"required": pair}} for pair in (["backend", "name"], ["extra", "options"])]
    roles = {"enum": list(_roles()), "description": "self, cross, or a role of one model family."}
    mapping = {
        "type": "object",
        "properties": {
            "default": {"$ref": "#/definitions/choice", "description": "For every role that the backend can serve."},
            "per_role": {
                "type": ["object", "null"],
                "propertyNames": roles,
                "additionalProperties": {"$ref": "#/definitions/choice"},
                "description": "For one role, above the default.",
            },
            "schedule": {
                "type": ["array", "null"],
                "items": {"$ref": "#/definitions/rule"},
                "description": "For some steps or layers, above both; the first rule that holds wins.",
            },
        },
        # A value by its path, such as default.backend or per_role.cross.extra.KEY.
        "patternProperties": {r"^(default|per_role)\.": {}},
        "additionalProperties": False,
    }
    options_alone = {
        "type": "object",
        "not": {"anyOf": [{"required": [key]} for key in ("default", "per_role", "schedule", *spec_keys)]},
        "additionalProperties": {"not": {"type": "object"}},
    }
    return {
        "backend": _backend(),
        **_options(),
        "choice_rules": {"allOf": [*one_name, *_options_by_backend()]},
        "choice": {
            "anyOf": [
                {"$ref": "#/definitions/backend"},
                {"type": "null"},
                {
                    "type": "object",
                    "properties": spec_keys,
                    "additionalProperties": False,
                    "allOf": [{"$ref": "#/definitions/choice_rules"}],
                },
            ]
        },
        "ranges": {
            "anyOf": [
                {"type": ["null", "integer"]},
                {"type": "string", "pattern": rf"^\s*{_RANGE}\s*(,\s*{_RANGE}\s*)*$"},
                {
                    "type": "array",
                    "items": {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": rf"^\s*{_RANGE}\s*$"}]},
                },
            ]
        },
        "rule": {
            "type": "object",
            "properties": {
                "role": {"anyOf": [roles, {"type": "null"}]},
                "steps": {"$ref": "#/definitions/ranges", "description": "0-3,10,-2--1; -1 is the last step."},
                "layers": {"$ref": "#/definitions/ranges", "description": "The same for layers."},
                **spec_keys,
            },
            "additionalProperties": False,
            "allOf": [{"$ref": "#/definitions/choice_rules"}],
        },
        "attention": {
            "anyOf": [
                {"$ref": "#/definitions/choice"},
                {
                    "type": "string",
                    "pattern": r"^\s*\{|=|\.([jJ][sS][oO][nN]|[yY][aA]?[mM][lL])\s*$",
                    "description": "JSON, key=value,... or the path of a JSON or YAML file.",
                },
                mapping,
                options_alone,
            ]
        },
    }


def _roles() -> tuple[str, ...]:
    # Asking for a role that nobody has registered brings in those of every model.
    is_role("")
    return tuple(sorted(known_roles()))


def _spellings() -> dict[str, list[str]]:
    """Canonical name -> every lower-case spelling of it, itself first."""
    names = {name: {name} for name in (*KNOWN_NAMES, *available_names())}
    for spelling, row in table_of("backend").items():
        if row.means:
            names[row.means].add(spelling)
    for name in available_names():
        names[name].update(getattr(find_backend(name), "aliases", ()))
    return {name: [name, *sorted(names[name] - {name})] for name in sorted(names)}


def _backend() -> Schema:
    spellings = _spellings()
    others = sorted({spelling for each in spellings.values() for spelling in each[1:]})
    return {
        "description": "A backend, several in order of preference (fa,torch_sdpa), or auto for no choice.",
        "anyOf": [
            {"enum": [AUTO, *spellings]},
            {"enum": others},
            # Several names, and any spelling in upper case or with hyphens, which the runtime itself checks.
            {"type": "string", "pattern": r"^(?=.*\S)([^/]*[,A-Z\-][^/]*|\s.*|.*\s)$"},
        ],
    }


def _options_types() -> dict[type, list[str]]:
    """Every type of options -> the backends that have it."""
    found: dict[type, list[str]] = {}
    for name in sorted(available_names()):
        backend = find_backend(name)
        if backend is not None:
            found.setdefault(backend.options_type, []).append(name)
    return found


def _options_by_backend() -> list[Schema]:
    """The rules that a choice of one backend takes that backend's options."""
    spellings, rules = _spellings(), []
    for options_type, names in _options_types().items():
        known = [spelling for name in names for spelling in spellings[name]]
        by_key = [{"required": [key], "properties": {key: {"enum": known}}} for key in ("backend", "name")]
        optional = {"anyOf": [{"type": "null"}, {"$ref": f"#/definitions/{options_type.__name__}"}]}
        rules.append({"if": {"anyOf": by_key}, "then": {"properties": {"extra": optional, "options": optional}}})
    return rules


def _options() -> dict[str, Schema]:
    """The schema of each type of options, by its name."""
    return {
        options_type.__name__: {
            "type": "object",
            "properties": {key: _value(hint) for key, hint in get_type_hints(options_type).items()},
            "additionalProperties": False,
        }
        for options_type in _options_types()
    }


def _value(hint: Any) -> Schema:
    """Return the schema of what options.py makes into a value of this type."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return {"anyOf": [{"type": "null"} if each is type(None) else _value(each) for each in arguments]}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (tuple, list):
        if origin is list or arguments[-1] is Ellipsis:
            return {"type": "array", "items": _value(arguments[0])}
        return {
            "type": "array",
            "items": [_value(each) for each in arguments],
            "minItems": len(arguments),
            "maxItems": len(arguments),
        }
    if hint is bool:
        return {"anyOf": [{"type": "boolean"}, {"type": "string", "pattern": _WORD}]}
    if hint is int:
        return {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": _WHOLE_TEXT}]}
    if hint is float:
        return {"anyOf": [{"type": "number"}, {"type": "string", "pattern": _NUMBER_TEXT}]}
    return {"type": "string"}
