"""`--prompt-set shapes:64`, or `emoji:64` where its judge is: seeded prompts, and what their clips must show."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from diffusion_runtime.cli.settings import Flags
from diffusion_runtime.errors import ConfigError, shown
from diffusion_runtime.request.generation_request import GenerationRequest

MAX_PROMPTS = 4096
_SET = re.compile(r"(shapes|emoji):([1-9][0-9]{0,5})(?::([0-9]{1,6}))?")
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


def requests_of_set(
    requests: Sequence[GenerationRequest], prompt_set: str | None, model: str
) -> tuple[GenerationRequest, ...]:
    """Return the requests that `without_prompts` led to, once per prompt of the set, with its seed; unchanged without a
    set. model: that will make them.

    Raises ConfigError for a set that cannot be judged here, and for one of other words than an embedded model knows.
    """
    if prompt_set is None:
        return tuple(requests)
    if [(request.prompt, request.seed) for request in requests] != [(_ANY, 0)]:
        raise ConfigError("--prompt-set: a setting has a prompt or seed of its own; leave it out")
    from diffusion_runtime.quality.worlds import WORLDS

    world, count, seed = _parsed(prompt_set)
    lacks = WORLDS[world].lacks()
    if lacks is not None:
        raise ConfigError(
            f"--prompt-set: {world}: clips of it cannot be judged here: {lacks}. Use --prompt-set shapes:{count}"
        )
    own = WORLDS.get(model)
    if own is not None and own.name != WORLDS[world].name:
        raise ConfigError(
            f"--prompt-set: {world}:{count} is of words that {model} was not trained on; use --prompt-set "
            f"{own.name}:{count}, or --model-path {world}"
        )
    return tuple(
        dataclasses.replace(request, prompt=prompt.text, seed=prompt.seed)
        for request in requests
        for prompt in WORLDS[world].prompt_set(count, seed)
    )


def _parsed(text: str) -> tuple[str, int, int]:
    match = _SET.fullmatch(text.strip())
    if match is None or int(match[2]) > MAX_PROMPTS:
        from diffusion_runtime.quality.worlds import WORLDS

        # Those alone whose clips can be judged in this installation; shapes always can.
        first, *others = [name for name, world in WORLDS.items() if world.lacks() is None]
        same = f", or the same of {' or '.join(others)}" if others else ""
        raise ConfigError(
            f"--prompt-set: expected {first}:COUNT or {first}:COUNT:SEED{same}, up to {MAX_PROMPTS} prompts, got "
            f"{shown(text)}"
        )
    return match[1], int(match[2]), _DEFAULT_SEED if match[3] is None else int(match[3])
