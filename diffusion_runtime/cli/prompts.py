"""Negative prompts and seeds of the command line and of files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from diffusion_runtime.errors import RequestError, shown

# Upper bound of seeds per range; a larger range is almost certainly a typo.
MAX_SEEDS = 10_000
# Weeks of work for the fastest model; a list of more is a file of something else.
MAX_ITEMS = 50_000

_SEED = re.compile(r"[0-9]{1,19}")
_SEED_RANGE = re.compile(r"([0-9]{1,19})-([0-9]{1,19})")


def match_negative_prompts(num_prompts: int, negative_prompts: Sequence[str]) -> Sequence[str | None]:
    """One for each prompt: one alone is everybody's, none at all leaves it to the model.

    Raises RequestError for any other number.
    """
    if not negative_prompts:
        return [None] * num_prompts
    if len(negative_prompts) not in (1, num_prompts):
        raise RequestError(
            f"negative_prompt: {len(negative_prompts)} negative prompts for {num_prompts} "
            f"prompt{'s' if num_prompts > 1 else ''}; give one for all, or one for each prompt, in their order"
        )
    return list(negative_prompts) * (num_prompts if len(negative_prompts) == 1 else 1)


def parse_seeds(values: Iterable[Any]) -> list[int]:
    """`["1,2", "5-7", 9]` as [1, 2, 5, 6, 7, 9], each once. Raises RequestError."""
    seeds: dict[int, None] = {}
    for value in values:
        for part in str(value).split(",") if not isinstance(value, bool) else ["a boolean"]:
            for seed in _parse_part(part.strip(), value):
                seeds[seed] = None
                if len(seeds) > MAX_SEEDS:
                    raise RequestError(f"seed: {shown(value)} makes more than {MAX_SEEDS} seeds")
    return list(seeds)


def _parse_part(part: str, value: Any) -> Iterable[int]:
    match = _SEED_RANGE.fullmatch(part)
    if match is not None:
        first, last = int(match[1]), int(match[2])
        if last < first:
            raise RequestError(f"seed: the range {part} ends before it starts; write {last}-{first}")
        return range(first, last + 1)
    if _SEED.fullmatch(part) is None or int(part) >= 2**63:
        raise RequestError(f"seed: expected numbers from 0 to 2**63 - 1 such as 7, 1,2 or 1-4, got {shown(value)}")
    return [int(part)]
