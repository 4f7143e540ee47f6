"""The denoising models of a diffusers pipeline, with their device and dtype; those that torch.compile has compiled, and
graph breaks around our attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from diffusion_runtime.attention.backends.requirements import dtype_name
from diffusion_runtime.core.hardware import DTYPES, resolve_device
from diffusion_runtime.errors import ConfigError

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")


def outside_graphs(function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
    """Return the function with a graph break around it (torch.compiler.disable)."""
    disable: Any = torch.compiler.disable
    eager: Callable[Parameters, Returned] = disable(function)
    return eager


def uncompiled(part: Any) -> Any:
    """Return the module behind the result of torch.compile; anything else as it is."""
    return part._orig_mod if is_compiled_wrapper(part) else part


def is_compiled_wrapper(part: object) -> bool:
    """Return whether an object is the result of torch.compile for a module."""
    return isinstance(part, torch._dynamo.OptimizedModule)


class WholeGraphs:
    """The modules of a model, itself included, that contain `taken` ones and are compiled with fullgraph=True.

    breaking: modules whose calls or hooks no graph can hold. `set_aside` runs uncompiled the modules that contain one
    of them; len() counts those. The others stay compiled.
    """

    def __init__(self, model: nn.Module, taken: Set[nn.Module], breaking: Set[nn.Module]) -> None:
        compiled = [module for module in model.modules() if _is_whole_graph(module)]
        holding = [(module, (taken | breaking) & set(module.modules())) for module in compiled]
        self._modules = [module for module, held in holding if held & breaking]
        kept = [held for module, held in holding if module not in self._modules]
        self._held = frozenset[nn.Module]().union(*kept)
        self._before: list[tuple[nn.Module, str, Any]] = []

    def __len__(self) -> int:
        return len(self._modules)

    def holds(self, module: nn.Module) -> bool:
        """Return whether a taken module is a part of a graph that stays as it is."""
        return module in self._held

    def set_aside(self) -> None:
        """Run them uncompiled until `give_back`."""
        for module in self._modules:
            name, value = (
                ("forward", uncompiled(module).__call__) if is_compiled_wrapper(module) else (_IMPLEMENTATION, None)
            )
            self._before.append((module, name, module.__dict__[name]))
            module.__dict__[name] = value

    def give_back(self) -> None:
        """Run them compiled again. Idempotent."""
        for module, name, value in self._before:
            module.__dict__[name] = value
        self._before = []


# Where nn.Module.compile keeps the compiled call.
_IMPLEMENTATION = "_compiled_call_impl"


def _is_whole_graph(module: nn.Module) -> bool:
    if is_compiled_wrapper(module):
        return _asks_for_whole_graph(module.dynamo_ctx)
    return any(map(_asks_for_whole_graph, _held_by(module.__dict__.get(_IMPLEMENTATION))))


def _held_by(function: Any) -> Iterator[object]:
    # A compiled function holds its settings only in its closure.
    yield from (cell.cell_contents for cell in getattr(function, "__closure__", None) or ())


def _asks_for_whole_graph(settings: object) -> bool:
    return isinstance(settings, torch._dynamo.eval_frame.OptimizeContext) and bool(settings.fullgraph)


# The modules of diffusers that define denoising models.
_DENOISER_PACKAGES = ("transformers", "unets", "controlnets")


def denoisers_of(model_or_pipeline: Any) -> dict[str, nn.Module]:
    """Return the denoising models, by component name, compiled ones as they are. Raises ConfigError."""
    if isinstance(model_or_pipeline, nn.Module):
        return {type(uncompiled(model_or_pipeline)).__name__: model_or_pipeline}
    components = getattr(model_or_pipeline, "components", None)
    if not isinstance(components, dict):
        raise ConfigError(
            f"attach: expected a diffusers pipeline or a torch module, got {type(model_or_pipeline).__name__}"
        )
    parts = {name: part for name, part in components.items() if isinstance(part, nn.Module)}
    chosen = {name: part for name, part in parts.items() if denoises(name, type(uncompiled(part)))}
    if not chosen:
        raise ConfigError(
            f"attach: {type(model_or_pipeline).__name__} has no transformer and no UNet; it has "
            f"{', '.join(components)}. Attach to the model itself"
        )
    return chosen


def denoises(name: str, kind: type) -> bool:
    """Return whether a component of a pipeline denoises: by the class of its model, and by its name for a class that is
    not diffusers'."""
    package = kind.__module__.split(".")
    if package[:2] == ["diffusers", "models"]:
        return package[2] in _DENOISER_PACKAGES
    return name.startswith(("transformer", "unet"))


def device_of(model_or_pipeline: Any, model: nn.Module, device: str | torch.device | None) -> torch.device:
    """Return the device a model will run on. device: by the caller, if known."""
    if device is not None:
        return resolve_device(str(device))
    # Offloaded models wait on the CPU and run elsewhere; the pipeline has the execution device.
    place = getattr(model_or_pipeline, "_execution_device", None)
    if isinstance(place, torch.device) and place.type != "meta":
        return place
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the compute dtype. Quantised weights do not show it; bfloat16 is their usual one."""
    dtypes = [parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()]
    known = (*DTYPES, "float64")
    return next((dtype for dtype in dtypes if dtype_name(dtype) in known), torch.bfloat16)
