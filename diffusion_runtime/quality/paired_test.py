"""McNemar's test: whether two settings that were judged on the same prompts differ in how many they get right."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PairedTest:
    """only_first, only_second: prompts that one of the two gets right. p: of the exact two-sided binomial test."""

    only_first: int
    only_second: int
    p: float


def mcnemar(first: Sequence[bool], second: Sequence[bool]) -> PairedTest:
    """first, second: right or wrong, prompt by prompt, in one order.

    McNemar, "Note on the sampling error of the difference between correlated proportions" (1947); the exact form, as
    few prompts are discordant. Raises ValueError for other lengths.
    """
    pairs = list(zip(first, second, strict=True))
    only_first = sum(one and not other for one, other in pairs)
    only_second = sum(other and not one for one, other in pairs)
    discordant = only_first + only_second
    tail = sum(math.comb(discordant, count) for count in range(min(only_first, only_second) + 1))
    return PairedTest(only_first, only_second, min(1.0, 2 * tail / 2**discordant))
