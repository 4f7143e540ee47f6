"""Which prompts and which seeds: from flags, files and standard input."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from diffusion_runtime.errors import ConfigError, RequestError

MAX_PROMPT_FILE_BYTES = 16 * 1024 * 1024
# More seeds than this in one range is a slip of the finger, not a wish.
MAX_SEEDS = 10_000

_SEED = re.compile(r"[0-9]{1,19}")
_SEED_RANGE = re.compile(r"([0-9]{1,19})-([0-9]{1,19})")


def collect_prompts(positional: Sequence[str], flags: Sequence[str], file: str | None) -> list[str]:
    """The prompts of the command line, in that order; empty when there are none.

    Raises RequestError for an empty prompt and for an unquoted one, ConfigError for an unreadable or empty file.
    """
    if len(positional) > 1:
        raise RequestError(
            f"expected one prompt in quotes, got {len(positional)} words: put them in quotes, "
            f'as in generate "{" ".join(positional)}", or give --prompt for each of several prompts'
        )
    prompts = [*positional, *flags]
    for prompt in prompts:
        if not prompt.strip():
            raise RequestError("prompt: expected at least one word, got an empty prompt")
    return prompts if file is None else [*prompts, *read_prompt_file(file)]


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


def read_prompt_file(file: str) -> list[str]:
    """One prompt a line; blank lines and lines that start with # are skipped; `-` is standard input."""
    name = "standard input" if file == "-" else file
    try:
        if file == "-":
            content = sys.stdin.read(MAX_PROMPT_FILE_BYTES + 1)
        else:
            with Path(file).open(encoding="utf-8-sig") as opened:
                content = opened.read(MAX_PROMPT_FILE_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"it is not UTF-8 text ({error.reason})"
        raise ConfigError(f"--prompt-file: cannot read {name}: {reason}") from error
    if len(content) > MAX_PROMPT_FILE_BYTES:
        raise ConfigError(f"--prompt-file: {name} is longer than {MAX_PROMPT_FILE_BYTES} characters")
    lines = [line.strip() for line in content.splitlines()]
    prompts = [line for line in lines if line and not line.startswith("#")]
    if not prompts:
        raise ConfigError(f"--prompt-file: {name} holds no prompt (blank lines and # comments do not count)")
    return prompts


def parse_seeds(values: Iterable[Any]) -> list[int]:
    """`["1,2", "5-7", 9]` as [1, 2, 5, 6, 7, 9], each once. Raises RequestError."""
    seeds: dict[int, None] = {}
    for value in values:
        for part in str(value).split(",") if not isinstance(value, bool) else ["a boolean"]:
            for seed in _parse_part(part.strip(), value):
                seeds[seed] = None
                if len(seeds) > MAX_SEEDS:
                    raise RequestError(f"seed: {value!r} makes more than {MAX_SEEDS} seeds")
    return list(seeds)


def _parse_part(part: str, value: Any) -> Iterable[int]:
    match = _SEED_RANGE.fullmatch(part)
    if match is not None:
        first, last = int(match[1]), int(match[2])
        if last < first:
            raise RequestError(f"seed: the range {part} ends before it starts; write {last}-{first}")
        return range(first, last + 1)
    if _SEED.fullmatch(part) is None or int(part) >= 2**63:
        raise RequestError(f"seed: expected numbers from 0 to 2**63 - 1 such as 7, 1,2 or 1-4, got {value!r}")
    return [int(part)]
