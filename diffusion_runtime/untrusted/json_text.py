"""The one JSON parser: bounded depth, numbers and size, no duplicate keys; raises nothing but DocumentError."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from diffusion_runtime.errors import ConfigError, DiffusionRuntimeError, shown
from diffusion_runtime.untrusted.document import MAX_NUMBER_CHARACTERS, DocumentError, check_depth
from diffusion_runtime.untrusted.files import named, read_file

# A value needs up to a hundred bytes of memory, and as few as two of the text.
MAX_VALUES = 1_000_000
# The index of the largest published checkpoints has a few million.
MAX_JSON_BYTES = 32 * 1024 * 1024


def parse_json(text: str | bytes, *, allow_constants: bool = False, max_values: int = MAX_VALUES) -> Any:
    """Parse the value of a JSON text.

    allow_constants: whether NaN and Infinity, which JSON does not have, are accepted; diffusers writes them into
    configs. max_values: how many commas and brackets the text may hold. Raises DocumentError.
    """
    if isinstance(text, bytes):
        try:
            # As json.loads does: UTF-8 with or without a mark, UTF-16 and UTF-32 by their zero bytes.
            text = text.decode(json.detect_encoding(text))
        except UnicodeDecodeError as error:
            raise DocumentError(f"it is not UTF-8 text ({error.reason} at byte {error.start})") from error
    if text.count(",") + text.count("[") + text.count("{") > max_values:
        raise DocumentError(f"it holds more than {max_values} values")
    try:
        value = json.loads(
            text,
            object_pairs_hook=_mapping,
            parse_int=_whole_number,
            parse_float=_number,
            parse_constant=float if allow_constants else _refuse_constant,
        )
    except json.JSONDecodeError as error:
        raise DocumentError(f"{error.msg} at line {error.lineno}, column {error.colno}") from error
    except RecursionError as error:
        raise DocumentError("it nests too deep") from error
    check_depth(value)
    return value


def read_json_file(
    path: str | Path,
    key: str = "",
    *,
    error: type[DiffusionRuntimeError] = ConfigError,
    missing: type[DiffusionRuntimeError] | None = None,
    advice: str = "",
    allow_constants: bool = False,
    max_values: int = MAX_VALUES,
) -> Any:
    """Read the value of the JSON file at `path`. key: the flag or key that named it.

    Raises what read_file raises, and `error` for a text that parse_json refuses.
    """
    content = read_file(path, key, max_bytes=MAX_JSON_BYTES, error=error, missing=missing, advice=advice)
    return parse_json_file(content, path, key, error=error, allow_constants=allow_constants, max_values=max_values)


def parse_json_file(
    content: bytes,
    path: str | Path,
    key: str = "",
    *,
    error: type[DiffusionRuntimeError] = ConfigError,
    allow_constants: bool = False,
    max_values: int = MAX_VALUES,
) -> Any:
    """Parse the value of a JSON file that has been read. path, key: for the message of `error`."""
    try:
        return parse_json(content, allow_constants=allow_constants, max_values=max_values)
    except DocumentError as reason:
        raise error(f"{named(key, path)} is not valid JSON: {reason}; copy it again, or correct it") from reason


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise DocumentError(f"key {shown(key)} is given twice")
            seen.add(key)
    return values


def _whole_number(text: str) -> int:
    _check_length(text)
    return int(text)


def _number(text: str) -> float:
    _check_length(text)
    if math.isinf(value := float(text)):
        raise DocumentError(f"{text} is larger than a float64 can be")
    return value


def _check_length(text: str) -> None:
    if len(text) > MAX_NUMBER_CHARACTERS:
        raise DocumentError(f"a number of {len(text)} characters: {text[:20]}...")


def _refuse_constant(name: str) -> float:
    raise DocumentError(f"{name} is not JSON")
