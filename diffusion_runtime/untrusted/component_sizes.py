"""Numbers in the config of a component that a library builds, which builds whatever it is told: checked before."""

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
    """Raises ModelLoadError for a number of layers that no model has, and for integers that torch has no room for.

    values: a config.json as parsed; path: of the file, for messages. A list of numbers is looked at item by item.
    """
    for key, value in values.items():
        most = MAX_LAYERS if _IS_LAYER_COUNT.fullmatch(key) else _MAX_NUMBER
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int) and abs(number) > most:
                raise ModelLoadError(f"{path}: key {shown(key)}: expected at most {most}, got {shown(number)}")
        if isinstance(value, Mapping):
            check_sizes(value, path)
