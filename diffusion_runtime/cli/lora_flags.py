"""--lora, and --lora-path with --lora-scale, as values of RuntimeConfig.lora."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

from diffusion_runtime.config import LORA_COMPONENTS
from diffusion_runtime.errors import UsageError


def parse_lora(text: str) -> dict[str, Any]:
    """Parse `[COMPONENT=]FILE[@STRENGTH]`, such as `transformer_2=low_noise.safetensors@0.8`, or with `:STRENGTH`,
    before which the hub's `ORG/NAME/FILE@REVISION` may stand. What is before `=` and behind `@` or `:` and is neither a
    component nor a number belongs to the file's name."""
    values: dict[str, Any] = {}
    component, _, rest = text.partition("=")
    if component in LORA_COMPONENTS and rest:
        values["component"] = component
        text = rest
    for mark in ":@":
        path, _, strength = text.rpartition(mark)
        with contextlib.suppress(ValueError):
            if path and not os.path.exists(text):
                return {"path": path, **values, "scale": float(strength)}
    return {"path": text, **values}


def pair_loras(paths: Sequence[str], scales: Sequence[float], loras: Sequence[str] = ()) -> list[dict[str, Any]] | None:
    """Each file with the scale that was given in its place, 1 without one, then those of --lora; None when there is no
    file.

    Raises UsageError for more scales than files.
    """
    if len(scales) > len(paths):
        raise UsageError(
            f"--lora-scale is given {len(scales)} times for {len(paths)} --lora-path; give one per file, in order, "
            "or --lora FILE@STRENGTH"
        )
    padded = [*scales, *[1.0] * (len(paths) - len(scales))]
    paired = [{"path": path, "scale": scale} for path, scale in zip(paths, padded, strict=True)]
    return [*paired, *map(parse_lora, loras)] or None
