"""torch.compile: compiled parts of a model, and graph breaks around our attention."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")


def outside_graphs(function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
    """The function with a graph break around it (torch.compiler.disable)."""
    disable: Any = torch.compiler.disable
    eager: Callable[Parameters, Returned] = disable(function)
    return eager


def uncompiled(part: Any) -> Any:
    """The module behind the result of torch.compile; anything else as it is."""
    return part._orig_mod if is_compiled_wrapper(part) else part


def is_compiled_wrapper(part: object) -> bool:
    """Whether an object is the result of torch.compile for a module."""
    return isinstance(part, torch._dynamo.OptimizedModule)


class WholeGraphs:
    """The modules of a model, itself included, that contain `taken` ones and are compiled with fullgraph=True.

    `set_aside` runs them uncompiled: our attention breaks the graph, which fullgraph=True refuses.
    """

    def __init__(self, model: nn.Module, taken: Collection[nn.Module]) -> None:
        compiled = [module for module in model.modules() if _is_whole_graph(module)]
        self._modules = [module for module in compiled if any(part in taken for part in module.modules())]
        self._before: list[tuple[nn.Module, str, Any]] = []

    def __len__(self) -> int:
        return len(self._modules)

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
    # A compiled function holds its settings in its closure alone.
    yield from (cell.cell_contents for cell in getattr(function, "__closure__", None) or ())


def _asks_for_whole_graph(settings: object) -> bool:
    return isinstance(settings, torch._dynamo.eval_frame.OptimizeContext) and bool(settings.fullgraph)
