"""Named ranges of a forward pass for torch.profiler: the guidance branch, and attention by role, layer and backend.

They are hooks, installed while a step is recorded: a forward pass that is not profiled runs none of this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.profiler import record_function

from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.attention.layers import AttentionLayer
from diffusion_runtime.models.interface import DiffusionTransformer

# (module, positional arguments, keyword arguments) of a call -> the name of its range.
_NameOf: TypeAlias = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], str]


@contextmanager
def forward_ranges(transformer: DiffusionTransformer) -> Iterator[None]:
    """Context manager: mark calls of the transformer and of its attention layers as ranges, such as `forward cond` and
    `attention self, layer 3, fa`."""
    with ExitStack() as stack:
        _name_calls(stack, transformer, _name_of_pass)
        for layer in transformer.attention_layers():
            _name_calls(stack, layer, _name_of_attention)
        yield


def _name_calls(stack: ExitStack, module: nn.Module, name_of: _NameOf) -> None:
    """Calls of `module` are ranges until the stack ends."""
    begun: list[record_function] = []

    def begin(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # torch.compile traces hooks; the operator that stands for attention in its graph calls them when it runs.
        if not torch.compiler.is_compiling():
            begun.append(record_function(name_of(called, args, kwargs)))
            begun[-1].__enter__()  # type: ignore[no-untyped-call]

    def end(*_: object) -> None:
        if begun and not torch.compiler.is_compiling():
            begun.pop().__exit__(None, None, None)

    def end_all() -> None:
        # What an exception left open.
        while begun:
            end()

    stack.callback(end_all)
    stack.callback(module.register_forward_pre_hook(begin, with_kwargs=True).remove)
    stack.callback(module.register_forward_hook(end).remove)


def _name_of_pass(_: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    context: AttentionContext = args[3] if len(args) > 3 else kwargs["context"]
    expert = f", expert {context.step.expert}" if context.step.expert else ""
    return f"forward {context.step.branch}{expert}"


def _name_of_attention(layer: AttentionLayer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    context = args[3] if len(args) > 3 else kwargs.get("context")
    inputs = {name: kwargs.get(name) for name in ("gate", "mask", "block_mask")}
    backend = layer.backend_of(args[0] if args else kwargs["q"], context, **inputs)
    return f"attention {layer.layer.role}, layer {layer.layer.index}, {backend}"
