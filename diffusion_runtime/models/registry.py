"""Which model families there are: transformer class name -> family, imported when a folder asks for it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from diffusion_runtime.errors import ModelLoadError, nearest
from diffusion_runtime.model_folder import INDEX_FILE, component_class, read_json

if TYPE_CHECKING:
    from diffusion_runtime.models.interface import ModelFamily
    from diffusion_runtime.models.published import PublishedModel


def _in_folder(folder: str, name: str) -> Callable[[], ModelFamily]:
    """Creates class `name` of models/`folder`/family.py, which is imported then and not before."""

    def create() -> ModelFamily:
        family: ModelFamily = getattr(importlib.import_module(f"diffusion_runtime.models.{folder}.family"), name)()
        return family

    return create


_creators: dict[str, Callable[[], ModelFamily]] = {
    "WanTransformer3DModel": _in_folder("wan", "WanFamily"),
    "FluxTransformer2DModel": _in_folder("flux1", "Flux1Family"),
    "Flux2Transformer2DModel": _in_folder("flux2", "Flux2Family"),
    "QwenImageTransformer2DModel": _in_folder("qwen_image", "QwenImageFamily"),
    "HunyuanVideoTransformer3DModel": _in_folder("hunyuan_video", "HunyuanVideoFamily"),
    "HunyuanVideo15Transformer3DModel": _in_folder("hunyuan_video_15", "HunyuanVideo15Family"),
    "ZImageTransformer2DModel": _in_folder("z_image", "ZImageFamily"),
    "LTX2VideoTransformer3DModel": _in_folder("ltx2", "LTX2Family"),
}
# Folders whose published.py lists what others publish of that architecture.
_PUBLISHERS = ("wan", "z_image", "flux1", "flux2", "qwen_image", "hunyuan_video", "hunyuan_video_15", "ltx2")


def published_models() -> tuple[PublishedModel, ...]:
    """Every published model that a family here loads, the embedded one first. Imports no torch."""
    listed: list[PublishedModel] = []
    for folder in _PUBLISHERS:
        listed += importlib.import_module(f"diffusion_runtime.models.{folder}.published").PUBLISHED
    return tuple(listed)


def single_file_pipelines() -> tuple[str, ...]:
    """The pipelines of models here whose class in the installed diffusers has from_single_file; imports diffusers."""
    import diffusers

    names = [name for create in _creators.values() for name in create().pipeline_classes]
    return tuple(name for name in names if hasattr(getattr(diffusers, name, None), "from_single_file"))


def register_family(transformer_class: str, create: Callable[[], ModelFamily]) -> None:
    """Make `create` responsible for folders whose model_index.json names `transformer_class`."""
    _creators[transformer_class] = create


def supported_transformer_classes() -> tuple[str, ...]:
    """The class names that a folder's transformer may have."""
    return tuple(_creators)


def is_supported(transformer_class: str) -> bool:
    return transformer_class in _creators


def register_declared_roles() -> None:
    """Make the attention roles of every family known, whether or not a model of it is loaded."""
    for create in _creators.values():
        _register_roles(create())


def family_for_folder(folder: Path) -> ModelFamily:
    """The family that loads a diffusers folder; its attention roles are known from then on.

    Raises ModelLoadError when the folder is not a model's, or its transformer is of a class that no family loads.
    """
    # Models from before transformers have a UNet in its place.
    has_unet = read_json(folder / INDEX_FILE).keys() & {"transformer", "unet"} == {"unet"}
    library, name = component_class(folder, "unet" if has_unet else "transformer")
    if name not in _creators:
        kind = "UNet" if has_unet else "transformer"
        raise ModelLoadError(
            f"{folder}: the {kind} is a {library} {name}, which this runtime has no native model for."
            f"{nearest(name, _creators)} Supported: {', '.join(_creators)}. With --backend diffusers, diffusers' own "
            "pipeline runs it"
        )
    family = _creators[name]()
    _register_roles(family)
    return family


def _register_roles(family: ModelFamily) -> None:
    # Imported here: it brings torch along, which whoever asks what there is does not wait for.
    from diffusion_runtime.attention.roles import register_role

    for role, category in family.roles:
        register_role(role, category)
