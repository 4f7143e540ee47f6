"""Per-request cache of prompt-only projections: what a transformer computes from the text alone, once per request and
guidance branch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.step_info import LayerInfo

T = TypeVar("T")


@dataclass(frozen=True)
class _Entry(Generic[T]):
    """value: computed from embeddings."""

    embeddings: torch.Tensor
    value: T


def cached_for_prompt(name: str, embeddings: torch.Tensor, context: AttentionContext, compute: Callable[[], T]) -> T:
    """The result of `compute`, cached under `name` for the other steps of the request; it must not be written to.

    embeddings: the text it is computed from; another tensor in the same request and branch replaces the entry.
    """
    layer = LayerInfo(role="text", name=name)
    entry = context.state.get_or_create(name, layer, context.step, lambda: _Entry(embeddings, compute()))
    if entry.embeddings is not embeddings:
        entry = _Entry(embeddings, compute())
        context.state.put(name, layer, context.step, entry)
    return entry.value
