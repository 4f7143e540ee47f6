"""LoRA files of a diffusers pipeline, by diffusers' own loader: adapters next to the weights, every key accounted for.

diffusers converts the names of many trainers and drops some keys on the way. Dropped keys are found by following the
tensors of a file through its conversion, and reported with every generation; a key that no module takes is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from diffusion_runtime.config import LoraConfig
from diffusion_runtime.errors import ConfigError, ModelLoadError, first_line
from diffusion_runtime.layers.weight_range import unusable_numbers
from diffusion_runtime.models.lora_sources import waits_on_hub
from diffusion_runtime.weights.lora.reading import lora_file
from diffusion_runtime.weights.lora.settings import CONFIG_FILE, METADATA_KEY, read_settings
from diffusion_runtime.weights.lora.shipped import lora_path
from diffusion_runtime.weights.tensor_files import read_tensors
from diffusion_runtime.weights.weight_files import DAMAGED, listed

_SECOND = "transformer_2"
_DENOISERS = ("transformer", "unet")
# Where the module name ends in a key of diffusers or peft.
_ADAPTER_PART = re.compile(r"(?:\.lora_|_lora\.|\.lora\.|\.lokr_|\.dora_scale|\.alpha$|\.processor\.(?=to_)).*")
_DOWN = re.compile(r"\.lora_(?:A|down)\.")
_TEXT_LEVEL = "text_model"
# Parts of text encoders in diffusers' older files, and transformers' names for them.
_OLD_TEXT_KEY = re.compile(r"\b(to_q|to_k|to_v|to_out)_lora\.(down|up)\.weight$")
_TEXT_PARTS = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out": "out_proj"}


@dataclass(frozen=True)
class PlannedLora:
    """A file that the conversion of a pipeline's class takes. modules: by component, those it changes there. dropped:
    keys that the conversion leaves out. destinations: whether each transformer it goes into is the second."""

    config: LoraConfig
    path: Path
    modules: Mapping[str, frozenset[str]]
    dropped: tuple[str, ...]
    destinations: tuple[bool, ...]

    @property
    def remarks(self) -> tuple[str, ...]:
        if not self.dropped:
            return ()
        return (
            f"{self.path}: diffusers left out {len(self.dropped)} of its keys: {listed(self.dropped)}. A native model "
            "applies every key",
        )


def plan_loras(
    pipeline_class: Any, configs: Sequence[LoraConfig], models: Mapping[str, torch.nn.Module]
) -> tuple[PlannedLora, ...]:
    """Read and convert the files, before any weight of the pipeline is read. models: of the pipeline, with or without
    weights.

    Raises ConfigError for a pipeline that loads none, and for a file that does not name which of two transformers it is
    for; ModelLoadError for files that are missing, damaged or without numbers, or that diffusers cannot convert for
    this pipeline.
    """
    if configs and not callable(getattr(pipeline_class, "load_lora_weights", None)):
        raise ConfigError(
            f"lora: {pipeline_class.__name__} of diffusers loads no LoRA files; leave it out, or use a native model"
        )
    if configs and find_spec("peft") is None:
        raise ConfigError("lora: diffusers loads LoRA files with peft, which is not installed: pip install peft")
    return tuple(_plan(pipeline_class, config, models) for config in configs if not waits_on_hub(config))


def load_loras(pipeline: Any, loras: Sequence[PlannedLora]) -> None:
    """Load these files in place of all earlier ones.

    Raises ModelLoadError for keys that match no module of the pipeline.
    """
    try:
        pipeline.unload_lora_weights()
        for index, lora in enumerate(loras):
            for into_second in lora.destinations:
                _load(pipeline, lora, f"lora_{index}{'_2' if into_second else ''}", into_second)
        if loras:
            names = list(dict.fromkeys(name for model in models_of(pipeline).values() for name in _adapters(model)))
            strengths = {f"lora_{index}": lora.config.scale for index, lora in enumerate(loras)}
            pipeline.set_adapters(names, [strengths[name.removesuffix("_2")] for name in names])
    except (ConfigError, ModelLoadError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # diffusers and peft raise a dozen kinds between them
        which = ", ".join(str(lora.path) for lora in loras)
        raise ModelLoadError(f"{which}: diffusers cannot load it: {first_line(error)}") from error


def remarks_of(loras: Sequence[PlannedLora]) -> tuple[str, ...]:
    """Return the parts of the files that were not applied."""
    return tuple(remark for lora in loras for remark in lora.remarks)


def _plan(pipeline_class: Any, config: LoraConfig, models: Mapping[str, torch.nn.Module]) -> PlannedLora:
    path = lora_file(config.path, "lora.path")
    tensors, metadata = read_tensors(path, "lora.path")
    _refuse_unread_settings(path, tensors, metadata, in_folder=path != lora_path(config.path))
    for key, tensor in tensors.items():
        wrong = unusable_numbers(tensor)
        if wrong is not None:
            raise ModelLoadError(f"{path}: tensor {key} {wrong}. {DAMAGED}")
    used: set[str] = set()
    try:
        traced = {key: _Traced.of(tensor, key, used) for key, tensor in tensors.items()}
        converted = pipeline_class.lora_state_dict(traced)
    except Exception as error:  # any error a conversion raises for keys that it was not written for
        raise ModelLoadError(
            f"{path}: diffusers cannot convert this LoRA for {pipeline_class.__name__}: {first_line(error)}. Use a "
            "file that was made for this model"
        ) from error
    found = converted[0] if isinstance(converted, tuple) else converted
    for alphas in (part for part in (converted if isinstance(converted, tuple) else ()) if isinstance(part, Mapping)):
        used.update(key.removeprefix("transformer.") for key in alphas)
    modules: dict[str, set[str]] = {}
    for key, tensor in found.items():
        used |= getattr(tensor, "origins", set())
        component, _, rest = key.partition(".")
        modules.setdefault(component, set()).add(_module(rest))
    dropped = [key for key, tensor in tensors.items() if key not in used and bool(tensor.any())]
    planned = {component: frozenset(names) for component, names in modules.items()}
    destinations = _destinations(config, path, models)
    there = {component: frozenset(dict(model.named_modules())) for component, model in models.items()}
    for into_second in destinations:
        _refuse_missing(path, pipeline_class.__name__, planned, there, into_second, components=_DENOISERS)
    return PlannedLora(config, path, planned, tuple(dropped), destinations)


def _refuse_unread_settings(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], *, in_folder: bool
) -> None:
    """Check that a file has no strength that diffusers would ignore: it reads alphas only from keys and METADATA_KEY.
    Raises ModelLoadError."""
    if METADATA_KEY in metadata:
        return
    settings = read_settings(path, metadata, in_folder=in_folder).of("")
    ranks = [tensor.shape[0] for key, tensor in tensors.items() if _DOWN.search(key) and tensor.dim()]
    wrong = [rank for rank in ranks if rank and settings.scale(settings.alpha or rank, rank) != 1]
    if wrong:
        where = CONFIG_FILE if (path.parent / CONFIG_FILE).exists() else "its metadata"
        raise ModelLoadError(
            f"{path}: {where} says alpha {settings.alpha or wrong[0]:g}{', rslora' if settings.use_rslora else ''} for "
            f"rank {wrong[0]}, which diffusers does not read: it would be applied with another strength. Use a native "
            "model, or save the file with diffusers or with .alpha keys"
        )


def _destinations(config: LoraConfig, path: Path, models: Mapping[str, torch.nn.Module]) -> tuple[bool, ...]:
    component = config.component
    if _SECOND not in models:
        if component in (_SECOND, "both"):
            raise ConfigError(f"lora.component: {component}: this pipeline has no {_SECOND}; leave the component out")
        return (False,)
    if component == "auto":
        raise ConfigError(
            f"{path}: this pipeline has two transformers: give component transformer (high noise), {_SECOND} (low "
            f"noise) or both, as in --lora {_SECOND}=FILE"
        )
    return {"transformer": (False,), _SECOND: (True,), "both": (False, True)}[component]


def _load(pipeline: Any, lora: PlannedLora, name: str, into_second: bool) -> None:
    where = {"load_into_transformer_2": True} if into_second else {}
    models, convert = models_of(pipeline), type(pipeline).lora_state_dict
    # What `load_lora_weights` calls.
    pipeline.lora_state_dict = lambda *args, **kwargs: _converted(convert(*args, **kwargs), models)
    try:
        pipeline.load_lora_weights(
            str(lora.path), adapter_name=name, local_files_only=True, use_safetensors=True, **where
        )
    finally:
        del pipeline.lora_state_dict
    there = {component: _changed(model, name) for component, model in models.items()}
    modules = {
        component: frozenset(_in_transformers_names(f"{component}.{each}", models).partition(".")[2] for each in names)
        for component, names in lora.modules.items()
    }
    _refuse_missing(lora.path, type(pipeline).__name__, modules, there, into_second)


def _converted(found: Any, models: Mapping[str, torch.nn.Module]) -> Any:
    """Give what `lora_state_dict` returns the installed transformers' names of text encoders: version 5 has CLIP's
    layers without `text_model.`, which files and diffusers' conversions have."""
    if isinstance(found, tuple):
        return tuple(_converted(each, models) for each in found)
    if not isinstance(found, Mapping):
        return found
    return {_in_transformers_names(key, models): value for key, value in found.items()}


def _in_transformers_names(key: str, models: Mapping[str, torch.nn.Module]) -> str:
    component, _, rest = key.partition(".")
    model = models.get(component)
    if model is None or not component.startswith("text_encoder"):
        return key
    # diffusers knows these older names again only where a file has those of `to_out` too.
    rest = _OLD_TEXT_KEY.sub(lambda old: f"{_TEXT_PARTS[old[1]]}.lora_{'A' if old[2] == 'down' else 'B'}.weight", rest)
    return f"{component}.{rest if hasattr(model, _TEXT_LEVEL) else rest.removeprefix(f'{_TEXT_LEVEL}.')}"


def _refuse_missing(
    path: Path,
    pipeline: str,
    modules: Mapping[str, frozenset[str]],
    there: Mapping[str, frozenset[str]],
    into_second: bool,
    components: Sequence[str] = (),
) -> None:
    """Check that a file's modules are `there`. Raises ModelLoadError for those that are not. components: those to
    check, where they are known; empty for all."""
    missing = []
    for component, wanted in modules.items():
        place = _SECOND if into_second and component == "transformer" else component
        if not components or (component in components and place in there):
            missing += [f"{component}.{module}" for module in sorted(wanted - there.get(place, frozenset()))]
    if missing:
        raise ModelLoadError(
            f"{path}: this LoRA is for another model than {pipeline}'s: {len(missing)} of its modules are not in it: "
            f"{listed(missing)}. Use a file that was made for this model"
        )


def models_of(pipeline: Any) -> dict[str, torch.nn.Module]:
    """Return the components of a pipeline that have weights, by name."""
    return {name: part for name, part in pipeline.components.items() if isinstance(part, torch.nn.Module)}


def _adapters(model: torch.nn.Module) -> Iterator[str]:
    yield from getattr(model, "peft_config", {})


def _changed(model: torch.nn.Module, name: str) -> frozenset[str]:
    """Return the modules that an adapter of peft's changes."""
    from peft import get_peft_model_state_dict

    if name not in _adapters(model):
        return frozenset()
    return frozenset(_module(key) for key in get_peft_model_state_dict(model, adapter_name=name))


def _module(key: str) -> str:
    """Return the module of a key, in peft's names and in those of diffusers' older files."""
    old = re.search(r"\.(?:processor\.)?(to_\w+?)_lora\.", key)
    if old is None:
        return _ADAPTER_PART.sub("", key)
    part = _TEXT_PARTS.get(old[1], old[1]) if "self_attn" in key else old[1]
    return f"{key[: old.start()]}.{'to_out.0' if part == 'to_out' else part}"


class _Traced(torch.Tensor):
    """A tensor that knows the keys of a file that it was made from. used: keys whose number was taken out, such as an
    alpha."""

    origins: set[str]
    used: set[str]
    is_whole: bool

    @staticmethod
    def of(tensor: torch.Tensor, key: str, used: set[str]) -> _Traced:
        traced = tensor.as_subclass(_Traced)
        traced.origins, traced.used, traced.is_whole = {key}, used, True
        return traced

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        parents = [part for part in _flat([*args, *(kwargs or {}).values()]) if "origins" in vars(part)]
        if func in (torch.Tensor.item, torch.Tensor.__float__, torch.Tensor.__int__):
            for part in parents:
                if part.is_whole:
                    part.used |= part.origins
            return result
        for part in _flat([result]):
            if "origins" not in vars(part) and parents:
                part.origins = set().union(*(parent.origins for parent in parents))
                part.used, part.is_whole = parents[0].used, False
        return result


def _flat(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, _Traced):
            yield value
        elif isinstance(value, list | tuple):
            yield from _flat(value)
