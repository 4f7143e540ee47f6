"""Recipes and sidecars: the JSON inside a media file, and the JSON file next to it, with size limits.

A recipe is a mapping with a `schema` of RECIPE_SCHEMA; a sidecar holds a recipe and measurements: `{"schema", "file",
"recipe", "attention_report", "timings", "peak_memory"}`. Both may be untrusted: they are parsed as JSON and as nothing
else.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffusion_runtime.errors import OutputError
from diffusion_runtime.untrusted.document import DocumentError
from diffusion_runtime.untrusted.files import read_file
from diffusion_runtime.untrusted.json_text import parse_json

RECIPE_SCHEMA = "diffusion_runtime.recipe/1"
SIDECAR_SCHEMA = "diffusion_runtime.sidecar/1"

# The key under which a PNG carries its recipe; the other formats have one place for a comment and need no key.
RECIPE_KEY = "diffusion_runtime"

# A longer recipe stays in the sidecar alone: an argument of a command line may have 128 KiB on Linux, and a comment of
# that size is of no use to a reader of the file.
MAX_EMBEDDED_CHARACTERS = 100_000
MAX_SIDECAR_BYTES = 8 * 1024 * 1024


def sidecar_path(path: Path) -> Path:
    """Return the path of a sidecar: `out.json` for `out.mp4`."""
    return path.with_suffix(".json")


def to_json(value: Mapping[str, Any], *, indent: int | None = None) -> str:
    """Pure ASCII JSON on one line (or indented). Raises OutputError for values that JSON does not have."""
    try:
        return json.dumps(value, ensure_ascii=True, allow_nan=False, indent=indent)
    except (TypeError, ValueError) as error:
        raise OutputError(
            f"a recipe holds plain JSON values (text, finite numbers, lists, mappings): {error}"
        ) from error


def embedded_recipe(recipe: Mapping[str, Any]) -> str | None:
    """Return the recipe as a media file carries it, or None if it is too long. Raises what to_json raises."""
    text = to_json(recipe)
    return text if len(text) <= MAX_EMBEDDED_CHARACTERS else None


def parse_json_mapping(text: str | bytes) -> dict[str, Any] | None:
    """Parse the JSON object in `text`; None when it is anything else, however it is broken."""
    try:
        value = parse_json(text)
    except DocumentError:
        return None
    return value if isinstance(value, dict) else None


def parse_recipe(text: str | bytes | None) -> dict[str, Any] | None:
    """Parse the recipe in a file's comment; None when the comment is missing or something else."""
    if text is None or len(text) > MAX_EMBEDDED_CHARACTERS:
        return None
    value = parse_json_mapping(text)
    return value if value is not None and value.get("schema") == RECIPE_SCHEMA else None


def read_sidecar(path: Path) -> dict[str, Any] | None:
    """Read the sidecar at `path`; None if there is none or it is something else. Raises OutputError if unreadable."""
    try:
        state = os.stat(path)
    except OSError as error:
        # A media file's name may be so long that its sidecar's would be too long.
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
            return None
        raise OutputError(f"cannot read {path}: {error.strerror}") from error
    if not stat.S_ISREG(state.st_mode) or state.st_size > MAX_SIDECAR_BYTES:
        return None
    value = parse_json_mapping(read_file(path, max_bytes=MAX_SIDECAR_BYTES, error=OutputError))
    return value if value is not None and value.get("schema") == SIDECAR_SCHEMA else None


def sidecar_of(
    *,
    file: Mapping[str, Any],
    recipe: Mapping[str, Any],
    attention_report: Mapping[str, Any],
    timings: Mapping[str, float],
    peak_memory: Mapping[str, int],
    **further: Mapping[str, Any],
) -> dict[str, Any]:
    """Return a sidecar's contents. file: the format, and the size of the result; further: more sections by name."""
    return {
        "schema": SIDECAR_SCHEMA,
        "file": dict(file),
        "recipe": dict(recipe),
        "attention_report": dict(attention_report),
        "timings": finite_seconds(timings),
        "peak_memory": dict(peak_memory),
        **further,
    }


def finite_seconds(timings: Mapping[str, float]) -> dict[str, float]:
    """Timings for the sidecar: seconds, rounded to a tenth of a millisecond."""
    return {name: round(seconds, 4) for name, seconds in timings.items() if math.isfinite(seconds)}
