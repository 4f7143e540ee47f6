"""Prompts and seeds: from flags, files and standard input."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from diffusion_runtime.errors import MAX_SHOWN_CHARACTERS, ConfigError, RequestError, shown
from diffusion_runtime.untrusted.files import read_file

if TYPE_CHECKING:
    from diffusion_runtime.cli.prompt_rows import PromptRow

MAX_PROMPT_FILE_BYTES = 16 * 1024 * 1024
# Upper bound of seeds per range; a larger range is almost certainly a typo.
MAX_SEEDS = 10_000
# Weeks of work for the fastest model; a list of more is a file of something else.
MAX_ITEMS = 50_000

_SEED = re.compile(r"[0-9]{1,19}")
_SEED_RANGE = re.compile(r"([0-9]{1,19})-([0-9]{1,19})")


def collect_prompts(
    positional: Sequence[str], flags: Sequence[str], file: str | None, dotted: Sequence[str] = ()
) -> list[str | PromptRow]:
    """The prompts of the command line, in that order; empty when there are none. dotted: PATH=VALUE of the flags with a
    path in their name, whose value may have been taken for a prompt.

    Raises RequestError for an empty prompt and for an unquoted one, ConfigError for an unreadable or empty file, and
    either for a row of a file that cannot be used.
    """
    if len(positional) > 1:
        together = " ".join(positional)[:MAX_SHOWN_CHARACTERS]
        taken = "".join(
            f"; the value of {path} was read as {shown(value)}, after the first '='"
            for path, _, value in (entry.partition("=") for entry in dotted)
        )
        raise RequestError(
            f"expected one prompt in quotes, got {len(positional)} words: put them in quotes, "
            f'as in generate "{together}", or give --prompt for each of several prompts{taken}'
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


def read_prompt_file(file: str) -> Sequence[str | PromptRow]:
    """One prompt per line; blank lines and lines that start with # are skipped; `-` is standard input. A row of request
    fields per prompt from a file that ends in .jsonl, .ndjson or .csv (prompt_rows.py)."""
    from diffusion_runtime.cli.prompt_rows import has_rows, parse_rows

    name = "standard input" if file == "-" else file
    try:
        if file == "-":
            content = sys.stdin.read(MAX_PROMPT_FILE_BYTES + 1)
        else:
            content = read_file(file, "--prompt-file", max_bytes=MAX_PROMPT_FILE_BYTES).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"it is not UTF-8 text ({error.reason})"
        raise ConfigError(f"--prompt-file: cannot read {name}: {reason}") from error
    if len(content) > MAX_PROMPT_FILE_BYTES:
        raise ConfigError(f"--prompt-file: {name} is longer than {MAX_PROMPT_FILE_BYTES} characters")
    if has_rows(file):
        rows = parse_rows(content, file)
        if not rows:
            raise ConfigError(f"--prompt-file: {name} holds no row with a prompt")
        return rows
    # Counted first: a million lines of one character take a hundred times their file's memory.
    if sum(content.count(end) for end in "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029") > MAX_ITEMS:
        raise ConfigError(f"--prompt-file: {name} has more than {MAX_ITEMS} lines, one prompt each")
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
