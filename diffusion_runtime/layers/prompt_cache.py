"""What a transformer makes of the text alone, once a request and guidance branch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.step_info import LayerInfo

T = TypeVar("T")


@dataclass(frozen=True)
class _Kept(Generic[T]):
    """made: out of embeddings."""

    embeddings: torch.Tensor
    made: T


def cached_for_prompt(name: str, embeddings: torch.Tensor, context: AttentionContext, make: Callable[[], T]) -> T:
    """What `make` returns, kept under `name` for the other steps of the request; not to be written to.

    embeddings: the text it is made of; another tensor in the same request and branch is made anew.
    """
    place = LayerInfo(role="text", name=name)
    kept = context.state.get_or_create(name, place, context.step, lambda: _Kept(embeddings, make()))
    if kept.embeddings is not embeddings:
        kept = _Kept(embeddings, make())
        context.state.put(name, place, context.step, kept)
    return kept.made
