"""Flags with a path in their name, and another project's spellings, rewritten to flags that the parser knows.

`--request.height 128` becomes `--set request.height=128`, `--attention-config.per_role.cross.backend fa` becomes
`--dotted-attention per_role.cross.backend=fa`. A path may be anything, so no parser can list these flags.
"""

from __future__ import annotations

from collections.abc import Sequence

from diffusion_runtime.errors import ConfigError, nearest

# First part of the name -> the flag that takes PATH=VALUE, and whether the first part stays in the path.
_TARGETS = {
    "request": ("--set", True),
    "runtime": ("--set", True),
    "attention-config": ("--dotted-attention", False),
    "diffusion-attention-config": ("--dotted-attention", False),
}
# vLLM-Omni's spellings of flags without a path.
_PEER_SPELLINGS = {
    "--diffusion-attention-backend": "--attention-backend",
    "--diffusion-attention-config": "--attention-config",
}


def rewrite_dotted_flags(arguments: Sequence[str]) -> list[str]:
    """`arguments` with every dotted flag, in both forms (`--flag value`, `--flag=value`), rewritten.

    Raises ConfigError for a dotted flag of an unknown section, and for one without a value.
    """
    rewritten: list[str] = []
    waiting = list(arguments)
    while waiting:
        argument = waiting.pop(0)
        if argument == "--":
            return [*rewritten, argument, *waiting]
        name, equals, value = argument.partition("=")
        head, dot, path = name.removeprefix("--").partition(".")
        if not name.startswith("--") or not dot or any(character.isspace() for character in name):
            rewritten.append(_PEER_SPELLINGS.get(name, name) + equals + value)
            continue
        if head not in _TARGETS:
            raise ConfigError(f"no such option: {name}.{nearest(head, _TARGETS).replace(chr(39), '')}")
        if not path or path.endswith("."):
            raise ConfigError(f"{name}: the name of a value is missing after the dot")
        if not equals:
            if not waiting:
                raise ConfigError(f"{name} needs a value")
            value = waiting.pop(0)
        target, keeps_head = _TARGETS[head]
        rewritten += [target, f"{head}.{path}={value}" if keeps_head else f"{path}={value}"]
    return rewritten
