"""Prompts of a command line: typed, from files and standard input."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence

from diffusion_runtime.cli.prompt_rows import PromptRow, has_rows, parse_rows
from diffusion_runtime.cli.prompts import MAX_ITEMS
from diffusion_runtime.errors import MAX_SHOWN_CHARACTERS, ConfigError, RequestError, shown
from diffusion_runtime.untrusted.files import read_file

MAX_PROMPT_FILE_BYTES = 16 * 1024 * 1024


def collect_prompts(
    positional: Sequence[str], flags: Sequence[str], file: str | None, dotted: Sequence[str] = ()
) -> list[str | PromptRow]:
    """The prompts of the command line, in that order; empty when there are none. dotted: PATH=VALUE of the flags with a
    path in their name, whose value may have been taken for a prompt.

    Raises RequestError for an empty prompt and for an unquoted one, ConfigError for an unreadable or empty file, and
    either for a row of a file that cannot be used.
    """
    if len(positional) > 1:
        together = shlex.quote(" ".join(positional)[:MAX_SHOWN_CHARACTERS])
        taken = "".join(
            f"; the value of {path} was read as {shown(value)}, after the first '='"
            for path, _, value in (entry.partition("=") for entry in dotted)
        )
        # Words of one prompt hold no space; each of several that were quoted does.
        if all(" " in prompt.strip() for prompt in positional) and not taken:
            several = " ".join(f"--prompt {shlex.quote(prompt[:MAX_SHOWN_CHARACTERS])}" for prompt in positional[:3])
            raise RequestError(
                f"expected one prompt, got {len(positional)}; several are given by a flag each: {several}, or "
                "one per line in a file by --prompt-file"
            )
        if os.path.isdir(positional[-1]):
            taken += f"; the folder of a model is given by a flag: --model-path {shlex.quote(positional[-1])}"
        raise RequestError(
            f"expected one prompt in quotes, got {len(positional)} words: put them in quotes, "
            f"as in {together}, or give --prompt for each of several prompts{taken}"
        )
    prompts: list[str | PromptRow] = [*positional, *flags]
    for prompt in (*positional, *flags):
        if not prompt.strip():
            raise RequestError("prompt: expected at least one word, got an empty prompt")
    return prompts if file is None else [*prompts, *read_prompt_file(file)]


def read_prompt_file(file: str) -> Sequence[str | PromptRow]:
    """One prompt per line; blank lines and lines that start with # are skipped; `-` is standard input. A row of request
    fields per prompt from a file that ends in .jsonl, .ndjson or .csv (prompt_rows.py)."""
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
