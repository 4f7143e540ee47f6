"""Copies between a forward pass and a cache: runs of tokens instead of an index, so that each is one plain copy; and
by an index on the device where a CUDA graph replays them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class TokenCopy(NamedTuple):
    """here: tokens of the pass; cached: as many of the cache."""

    here: slice
    cached: slice


def copies_of(slots: Sequence[int], tokens_per_frame: int) -> tuple[TokenCopy, ...]:
    """Frames 0, 1, ... here, and the slot of each in the cache, as few copies as there are runs of slots."""
    starts = [place for place in range(len(slots)) if place == 0 or slots[place] != slots[place - 1] + 1]
    copies = []
    for start, stop in zip(starts, [*starts[1:], len(slots)][: len(starts)], strict=True):
        length = (stop - start) * tokens_per_frame
        here, cached = start * tokens_per_frame, slots[start] * tokens_per_frame
        copies.append(TokenCopy(slice(here, here + length), slice(cached, cached + length)))
    return tuple(copies)


def run_of(slots: Sequence[int], tokens_per_frame: int) -> slice | None:
    """The tokens of all the slots as one run of the cache's; None where they are several."""
    copies = copies_of(slots, tokens_per_frame)
    return copies[0].cached if len(copies) == 1 else None


def put_tokens(cached: torch.Tensor, index: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """cached, [batch, seq, heads, head_dim], with `tokens` at the places of `index`, int64 [tokens], in place.

    Moved in words of 8 bytes where the tensors allow it: torch's kernel takes as long per number whatever its size
    (4,680 tokens of 12 heads of 128 in bfloat16 on an H200: 24 us, and 11 in words). Raises what `index_copy_` raises.
    """
    if cached.dtype == tokens.dtype and _lies_in_words(cached) and _lies_in_words(tokens):
        cached.view(_WORD).index_copy_(1, index, tokens.view(_WORD))
    else:
        cached.index_copy_(1, index, tokens)
    return cached


_WORD = torch.int64


def _lies_in_words(x: torch.Tensor) -> bool:
    if x.requires_grad or x.element_size() >= _WORD.itemsize:
        return False
    per_word = _WORD.itemsize // x.element_size()
    *strides, last = x.stride()
    places = (x.shape[-1], x.storage_offset(), *strides)
    return last == 1 and not any(place % per_word for place in places)
