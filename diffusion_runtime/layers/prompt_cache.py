"""Prompt cache: what a transformer computes from the prompt alone, once per request and guidance branch; and what it
computes from sizes alone, such as rotary positions, once per request."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.attention.fixed_state import NOT_COPIED

T = TypeVar("T")


@dataclass(frozen=True)
class _Entry(Generic[T]):
    """value: computed from source."""

    # The inputs of a forward pass, which a CUDA graph has copied by itself.
    source: object = field(metadata=NOT_COPIED)
    value: T


def cached_for_prompt(name: str, source: object, context: AttentionContext, compute: Callable[[], T]) -> T:
    """Return the result of `compute`, cached under `name` for the other steps of the request; it must not be written
    to.

    source: the object it is computed from, such as the embeddings; another one in the same request and branch replaces
    the entry.
    """
    scope, key = context.state.of_branch(context.step), ("prompt", name)
    entry = scope.get_or_create(key, lambda: _Entry(source, compute()))
    if entry.source is not source:
        entry = _Entry(source, compute())
        scope.put(key, entry)
    return entry.value


def cached_for_request(name: str, sizes: Hashable, context: AttentionContext, compute: Callable[[], T]) -> T:
    """Return the result of `compute`, cached under `name` and `sizes` for the other steps of the request; it must not
    be written to.

    sizes: all that it depends on in addition to the model and the order of the tokens, such as the grid. Not a cache of
    the process: a table of rotary positions at 720p is 40 MB, and a server that makes many sizes would collect them.
    """
    return context.state.request.get_or_create(("sizes", name, sizes, context.sharding.tile), compute)
