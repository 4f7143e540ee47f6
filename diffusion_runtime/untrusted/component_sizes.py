"""Bounds on the sizes in a component's config: libraries would build any size, so these are checked before."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffusion_runtime.errors import ModelLoadError, shown

# Of the published models the deepest has 94 layers.
MAX_LAYERS = 1000
_MAX_NUMBER = 2**31 - 1
_IS_LAYER_COUNT = re.compile(r"(num_.*|n_|.*_|^)(layers|blocks|depth)(_per_.*)?")


def check_sizes(values: Mapping[str, Any], path: Path) -> None:
    """Raises ModelLoadError for an implausible number of layers, and for integers that torch cannot hold.

    values: a config.json as parsed; path: of the file, for messages. A list of numbers is checked item by item.
    """
    for key, value in values.items():
        most = MAX_LAYERS if _IS_LAYER_COUNT.fullmatch(key) else _MAX_NUMBER
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int) and abs(number) > most:
                raise ModelLoadError(f"{path}: key {shown(key)}: expected at most {most}, got {shown(number)}")
        if isinstance(value, Mapping):
            check_sizes(value, path)
