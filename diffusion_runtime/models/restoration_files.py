"""The file of a model that restores videos, where none is named: looked for in ComfyUI's folders."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path

from diffusion_runtime.core.memory_size import size_text
from diffusion_runtime.errors import DiffusionRuntimeError, ModelLoadError
from diffusion_runtime.models.comfyui_folders import MAX_DEPTH, TRANSFORMERS, files_in, model_roots
from diffusion_runtime.models.model_sources import addresses_of
from diffusion_runtime.models.published import published_models
from diffusion_runtime.models.recognised_files import published_of, recognise_transformer
from diffusion_runtime.weights.weight_files import listed

_logger = logging.getLogger("diffusion_runtime.loading")

# What models that restore videos make, as published.yaml says.
MAKES = "video restored"
# Where ComfyUI often is.
_PLACES = ("ComfyUI/models", "models", "~/ComfyUI/models")
# In names of files, the one to take first: the smaller model, as it was published.
_PREFERRED = ("3b", "fp16", "fp8", "safetensors")


def find_restoration_model(file: str, models_dir: Sequence[str]) -> Path:
    """Return the file of such a model's transformer, and log which. file: that is to be restored, for the message.
    Raises ModelLoadError where there is none, which says where to get one."""
    roots = model_roots(None, models_dir)
    roots += [place for text in _PLACES if (place := Path(text).expanduser()).is_dir() and place not in roots]
    known = [model for model in published_models() if model.makes == MAKES]
    families, default = {model.family for model in known}, known[0].name
    places = [root / name for root in roots for name in TRANSFORMERS]
    named = [path for path in files_in(places, MAX_DEPTH) if any(name in path.name.lower() for name in families)]
    for path in sorted(named, key=lambda path: [word not in path.name.lower() for word in _PREFERRED]):
        if _is_of(path, families):
            others = [str(each) for each in named if each != path]
            also = f"; also there: {listed(others)}" if others else ""
            _logger.info(
                "model: %s, %s (found; --model-path names another%s)", path, size_text(path.stat().st_size), also
            )
            return path
    looked = f"looked in {listed(roots)}" if roots else f"none of {', '.join(_PLACES)} is here"
    addresses = "".join(f"\n  {address}" for address in addresses_of(default).values())
    raise ModelLoadError(
        f"model_path: no file of SeedVR2 was found ({looked}). Download these two into one folder, such as "
        f"ComfyUI/models/SEEDVR2:{addresses}\nthen type: diffusion-runtime upscale {shlex.quote(file)} --model-path "
        f"FOLDER/{addresses_of(default)['transformer'].rpartition('/')[2]}"
    )


def _is_of(path: Path, families: Collection[str]) -> bool:
    try:
        recognised = recognise_transformer(path)
    except DiffusionRuntimeError as error:
        _logger.debug("%s is left out: %s", path, error)
        return False
    published = None if recognised is None else published_of(recognised.name)
    return published is not None and published.family in families
