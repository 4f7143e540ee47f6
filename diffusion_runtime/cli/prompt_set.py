"""`--prompt-set shapes:64`: seeded prompts of which it is known what a clip must show."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from diffusion_runtime.cli.settings import Flags
from diffusion_runtime.errors import ConfigError, shown
from diffusion_runtime.request.generation_request import GenerationRequest

MAX_PROMPTS = 4096
_SET = re.compile(r"shapes:([1-9][0-9]{0,5})(?::([0-9]{1,6}))?")
_DEFAULT_SEED = 2026
# Stands for the prompts of the set while flags are resolved.
_ANY = "a prompt of the set"


def without_prompts(flags: Flags, prompt_set: str | None) -> Flags:
    """The flags with a prompt that stands for those of the set. Raises ConfigError for prompts or seeds beside it."""
    if prompt_set is None:
        return flags
    _parsed(prompt_set)
    if flags.prompts or flags.seeds or flags.repeat:
        raise ConfigError(
            "--prompt-set: its prompts have seeds of their own; leave out prompts, --prompt-file, --seed and --from"
        )
    return dataclasses.replace(flags, prompts=(_ANY,), seeds=("0",))


def requests_of_set(requests: Sequence[GenerationRequest], prompt_set: str | None) -> tuple[GenerationRequest, ...]:
    """Return the requests that `without_prompts` led to, once per prompt of the set, with its seed; unchanged without a
    set."""
    if prompt_set is None:
        return tuple(requests)
    if [(request.prompt, request.seed) for request in requests] != [(_ANY, 0)]:
        raise ConfigError("--prompt-set: a setting has a prompt or seed of its own; leave it out")
    from diffusion_runtime.quality.shapes.prompts import prompt_set as make_prompts

    return tuple(
        dataclasses.replace(request, prompt=prompt.text, seed=prompt.seed)
        for request in requests
        for prompt in make_prompts(*_parsed(prompt_set))
    )


def _parsed(text: str) -> tuple[int, int]:
    match = _SET.fullmatch(text.strip())
    if match is None or int(match[1]) > MAX_PROMPTS:
        raise ConfigError(
            f"--prompt-set: expected shapes:COUNT or shapes:COUNT:SEED, up to {MAX_PROMPTS} prompts, got {shown(text)}"
        )
    return int(match[1]), _DEFAULT_SEED if match[2] is None else int(match[2])
