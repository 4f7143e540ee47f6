"""Registry of model families: transformer class name -> family, imported when a folder needs it."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from diffusion_runtime.core.model_folder import AnyFolder, component_class, read_index
from diffusion_runtime.errors import ModelLoadError, nearest

if TYPE_CHECKING:
    from diffusion_runtime.models.family import ModelFamily
    from diffusion_runtime.weights.lora.names import LoraNames


@dataclass(frozen=True)
class _Registered:
    """An entry of the registry. load: imports the family. lora_names: names of its modules in LoRA files, without all
    else of the family."""

    load: Callable[[], ModelFamily[Any, Any]]
    lora_names: Callable[[], LoraNames]


def _in_folder(folder: str) -> _Registered:
    """Return FAMILY of models/`folder`/family.py and LORA_NAMES of weights.py next to it, each imported on first use.

    The names of a family without that file, which stands on another one, are those of its FAMILY.
    """
    package = f"diffusion_runtime.models.{folder}"

    def load() -> ModelFamily[Any, Any]:
        family: ModelFamily[Any, Any] = importlib.import_module(f"{package}.family").FAMILY
        return family

    def lora_names() -> LoraNames:
        if importlib.util.find_spec(f"{package}.weights") is None:
            return load().weights.lora_names
        names: LoraNames = importlib.import_module(f"{package}.weights").LORA_NAMES
        return names

    return _Registered(load, lora_names)


_families: dict[str, _Registered] = {
    "WanTransformer3DModel": _in_folder("wan"),
    "WanVACETransformer3DModel": _in_folder("wan"),
    "CausalWanTransformer3DModel": _in_folder("wan"),
    "AnyFlowTransformer3DModel": _in_folder("wan"),
    "AnyFlowFARTransformer3DModel": _in_folder("wan"),
    "FAR_Wan_Transformer3DModel": _in_folder("wan"),
    "WanAnimate2Transformer3DModel": _in_folder("wan_animate_2"),
    "SCAIL2Model": _in_folder("scail_2"),
    "FluxTransformer2DModel": _in_folder("flux1"),
    "LongCatImageTransformer2DModel": _in_folder("longcat_image"),
    "Flux2Transformer2DModel": _in_folder("flux2"),
    "Flux3Transformer2DModel": _in_folder("flux3"),
    "QwenImageTransformer2DModel": _in_folder("qwen_image"),
    "QwenImage21Transformer2DModel": _in_folder("qwen_image_21"),
    "HunyuanVideoTransformer3DModel": _in_folder("hunyuan_video"),
    "HunyuanVideo15Transformer3DModel": _in_folder("hunyuan_video_15"),
    "ZImageTransformer2DModel": _in_folder("z_image"),
    "Krea2Transformer2DModel": _in_folder("krea2"),
    "CosmosTransformer3DModel": _in_folder("anima"),
    "MOSSImageTransformer": _in_folder("moss_image"),
    "LTX2VideoTransformer3DModel": _in_folder("ltx2"),
    "LTXVideoTransformer3DModel": _in_folder("ltx_video"),
    "MiniMaxH3Transformer3DModel": _in_folder("minimax_h3"),
    "SeedVR2Transformer3DModel": _in_folder("seedvr2"),
}


def register_family(transformer_class: str, load: Callable[[], ModelFamily[Any, Any]]) -> None:
    """Make the family that `load` returns responsible for folders whose model_index.json names `transformer_class`."""
    _families[transformer_class] = _Registered(load, lambda: load().weights.lora_names)


def supported_transformer_classes() -> tuple[str, ...]:
    """Return the class names that a folder's transformer may have."""
    return tuple(_families)


def is_supported(transformer_class: str) -> bool:
    return transformer_class in _families


def lora_names_of_families() -> tuple[LoraNames, ...]:
    """Return the names of every family's modules in LoRA files; once for families that share their names."""
    by_title = {names.title: names for names in (registered.lora_names() for registered in _families.values())}
    return tuple(by_title.values())


def family_of_class(transformer_class: str) -> ModelFamily[Any, Any]:
    """Return the family that loads transformers of a supported class."""
    return _families[transformer_class].load()


def register_declared_roles() -> None:
    """Make the attention roles of every family known, whether or not a model of it is loaded."""
    for registered in _families.values():
        _register_roles(registered.load())


def family_for_folder(folder: AnyFolder) -> ModelFamily[Any, Any]:
    """Return the family that loads a diffusers folder; its attention roles are known from then on.

    Raises ModelLoadError when the folder is not a model's, or its transformer is of a class that no family loads.
    """
    # Models from before transformers have a UNet in its place.
    has_unet = read_index(folder).keys() & {"transformer", "unet"} == {"unet"}
    library, name = component_class(folder, "unet" if has_unet else "transformer")
    if name not in _families:
        kind = "UNet" if has_unet else "transformer"
        raise ModelLoadError(
            f"{folder}: the {kind} is a {library} {name}, which this runtime has no native model for."
            f"{nearest(name, _families)} Supported: {', '.join(_families)}. With --backend diffusers, diffusers' own "
            "pipeline runs it"
        )
    family = _families[name].load()
    _register_roles(family)
    return family


def _register_roles(family: ModelFamily[Any, Any]) -> None:
    # Imported here: it imports torch, which a listing of families should not wait for.
    from diffusion_runtime.attention.roles import register_role

    for role, category in family.roles:
        register_role(role, category)
