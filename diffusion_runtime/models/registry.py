"""Which model families there are: transformer class name -> family, imported when a folder asks for it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from diffusion_runtime.attention.roles import register_role
from diffusion_runtime.errors import ModelLoadError, nearest
from diffusion_runtime.models.folder import component_class

if TYPE_CHECKING:
    from diffusion_runtime.models.interface import ModelFamily


def _wan() -> ModelFamily:
    family: ModelFamily = importlib.import_module("diffusion_runtime.models.wan.family").WanFamily()
    return family


_creators: dict[str, Callable[[], ModelFamily]] = {"WanTransformer3DModel": _wan}


def register_family(transformer_class: str, create: Callable[[], ModelFamily]) -> None:
    """Make `create` responsible for folders whose model_index.json names `transformer_class`."""
    _creators[transformer_class] = create


def supported_transformer_classes() -> tuple[str, ...]:
    """The class names that a folder's transformer may have."""
    return tuple(_creators)


def is_supported(transformer_class: str) -> bool:
    return transformer_class in _creators


def family_for_folder(folder: Path) -> ModelFamily:
    """The family that loads a diffusers folder; its attention roles are known from then on.

    Raises ModelLoadError when the folder is not a model's, or its transformer is of a class that no family loads.
    """
    library, name = component_class(folder, "transformer")
    if name not in _creators:
        raise ModelLoadError(
            f"{folder}: the transformer is a {library} {name}, which this runtime has no native model for."
            f"{nearest(name, _creators)} Supported: {', '.join(_creators)}"
        )
    family = _creators[name]()
    for role, category in family.roles:
        register_role(role, category)
    return family
