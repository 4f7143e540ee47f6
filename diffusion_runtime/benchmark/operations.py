"""Floating-point operations of one forward pass: of its products, counted by torch, and of attention's valid pairs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.attention.layers import AttentionLayer
from diffusion_runtime.explanation.products import PRODUCTS, own_formulas


def count_operations(model: nn.Module, run: Callable[[], object]) -> float:
    """Operations of one forward pass of a transformer on our attention layers, as dense attention needs them. run: one
    pass of `model`."""
    attention = [0.0]
    handles = [
        layer.register_forward_pre_hook(lambda _, arguments: _count(attention, *arguments))
        for layer in model.modules()
        if isinstance(layer, AttentionLayer)
    ]
    try:
        with FlopCounterMode(display=False, custom_mapping=dict(own_formulas())) as counter:
            run()
    finally:
        for handle in handles:
            handle.remove()
    counts = counter.get_flop_counts().get("Global", {})
    return attention[0] + sum(float(count) for operator, count in counts.items() if _name(operator) in PRODUCTS)


def _count(total: list[float], *arguments: Any) -> None:
    q, k = arguments[:2]
    context = arguments[3] if len(arguments) > 3 else None
    total[0] += 4.0 * q.shape[1] * q.shape[2] * q.shape[3] * _valid_keys(k, context)


def _valid_keys(k: torch.Tensor, context: AttentionContext | None) -> int:
    """Count the valid keys of all samples together."""
    layout = None if context is None else context.layout
    if layout is None:
        return k.shape[0] * k.shape[1]
    return sum(stop - start for sample in range(k.shape[0]) for start, stop in layout.key_ranges(sample))


def _name(operator: Any) -> str:
    """`addmm` of aten.addmm."""
    return str(operator).rpartition(".")[2]
