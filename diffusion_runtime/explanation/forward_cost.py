"""Floating-point operations of one forward pass, by part, counted on the meta device: no weight is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from diffusion_runtime.attention.backends.interface import KnownCall
from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.attention.layers import AttentionLayer
from diffusion_runtime.core.token_layout import TokenLayout
from diffusion_runtime.explanation.counted_operations import CountedOperations
from diffusion_runtime.explanation.products import PRODUCTS


@dataclass(frozen=True)
class AttentionCost:
    """Calls of one attention layer in one forward pass of one guidance branch.

    index: of the layer within its role. num_pairs: pairs of a query and a key that the layout leaves visible, of one
    sample. operations: of dense attention, 4 x pairs x heads x head_dim, of all calls together. call: the largest.
    in_commits: whether commits run it; those of a video leave the last layer's keys without attending to any.
    """

    layer: AttentionLayer
    num_calls: int
    num_pairs: int
    operations: float
    call: KnownCall
    in_commits: bool = True

    @property
    def layout(self) -> TokenLayout | None:
        """Layout of the largest call; None if the layer is not told its tokens."""
        return self.call.layout

    @property
    def role(self) -> str:
        return self.layer.layer.role

    @property
    def index(self) -> int:
        return self.layer.layer.index


@dataclass(frozen=True)
class ForwardCost:
    """One forward pass. products: operations of linear layers and convolutions; attention: by layer, in the order in
    which they run."""

    products: float
    attention: tuple[AttentionCost, ...]


def sum_of(costs: Sequence[tuple[float, ForwardCost]]) -> ForwardCost:
    """Return the sum of several forward passes of one model, each weighted by its count; layouts and pairs are those of
    the pass with the most pairs. A layer that some of them leave out is not in commits."""
    by_layer: dict[AttentionLayer, list[tuple[float, AttentionCost]]] = {}
    for times, cost in costs:
        for each in cost.attention:
            by_layer.setdefault(each.layer, []).append((times, each))
    attention = []
    for of_layer in by_layer.values():
        largest = max((each for _, each in of_layer), key=lambda each: each.num_pairs)
        operations = sum(times * each.operations for times, each in of_layer)
        in_commits = len(of_layer) == len(costs)
        attention.append(dataclasses.replace(largest, operations=operations, in_commits=in_commits))
    return ForwardCost(sum(times * cost.products for times, cost in costs), tuple(attention))


def count_forward(modules: Iterable[nn.Module], run: Callable[[], object]) -> ForwardCost:
    """Count what `run`, one forward pass on the meta device, computes. modules: owners of the counted attention
    layers."""
    calls: dict[AttentionLayer, list[tuple[int, float, KnownCall]]] = {}
    layers = [layer for module in modules for layer in module.modules() if isinstance(layer, AttentionLayer)]
    handles = [
        layer.register_forward_pre_hook(lambda of, given, named: _note(calls, of, named, *given), with_kwargs=True)
        for layer in layers
    ]
    try:
        with CountedOperations() as counted:
            run()
    finally:
        for handle in handles:
            handle.remove()
    return ForwardCost(float(sum(counted.counts[name] for name in PRODUCTS)), tuple(_costs(calls)))


def _note(calls: dict[Any, list[Any]], layer: Any, named: Mapping[str, Any], *given: Any) -> None:
    q, k = given[:2]
    found = (*given, *named.values())
    context = next((each for each in found if isinstance(each, AttentionContext)), None)
    layout = None if context is None else context.layout
    _, num_queries, num_heads, head_dim = q.shape
    # Of keys: with normalized attention guidance each query attends to two texts.
    batch = len(k)
    keys: float = sum(_num_keys(layout, sample, k.shape[1]) for sample in range(batch))
    if layer.cached_keys and context is not None and context.cache is not None:
        keys = batch * context.cache.plan.num_keys
    elif layer.cached_keys and context is not None and context.prefix is not None:
        keys += sum(context.prefix.lengths or (context.prefix.num_tokens,) * batch)
    elif layer.causal:
        keys = (keys + batch) / 2
    pairs = int(num_queries * keys / batch)
    mask = named.get("mask")
    call = KnownCall(
        q.dtype,
        (batch, *q.shape[1:]),
        tuple(k.shape),
        layout,
        None if mask is None else (tuple(mask.shape), mask.dtype),
        named.get("gate") is not None,
    )
    calls.setdefault(layer, []).append((pairs, 4.0 * num_queries * keys * num_heads * head_dim, call))


def _num_keys(layout: TokenLayout | None, sample: int, num_keys: int) -> int:
    if layout is None:
        return num_keys
    return sum(stop - start for start, stop in layout.key_ranges(sample))


def _costs(calls: dict[AttentionLayer, list[tuple[int, float, KnownCall]]]) -> Iterable[AttentionCost]:
    for layer, found in calls.items():
        largest = max(found, key=lambda call: call[0])
        yield AttentionCost(layer, len(found), largest[0], sum(call[1] for call in found), largest[2])
