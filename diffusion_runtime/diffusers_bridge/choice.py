"""Chooses between native and passthrough for a model folder: our own transformer, or diffusers' own pipeline."""

from __future__ import annotations

import logging
from pathlib import Path

from diffusion_runtime.errors import MAX_SHOWN_CHARACTERS
from diffusion_runtime.model_folder import INDEX_FILE, read_json
from diffusion_runtime.models.registry import is_supported

_logger = logging.getLogger("diffusion_runtime.diffusers_bridge")


def is_passthrough(backend: str, folder: Path) -> bool:
    """Whether diffusers' own pipeline runs a folder. backend: of RuntimeConfig; with `auto` the choice is logged.

    Raises ModelLoadError when there is no model_index.json, or one that cannot be read.
    """
    if backend != "auto":
        return backend == "diffusers"
    index = read_json(folder / INDEX_FILE)
    # A folder without either is broken, which our own loading reports better.
    entry = index.get("transformer") or index.get("unet")
    if not isinstance(entry, list) or len(entry) != 2 or entry[0] != "diffusers" or is_supported(str(entry[1])):
        return False
    model, pipeline = (str(name)[:MAX_SHOWN_CHARACTERS] for name in (entry[1], index.get("_class_name")))
    _logger.info("%s: no native model for %s; diffusers' own %s runs it", folder, model, pipeline)
    return True
