"""Copies between a forward pass and a cache: runs of tokens instead of an index, so that each is one plain copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


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
