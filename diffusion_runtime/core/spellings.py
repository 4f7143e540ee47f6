"""Spellings: names that people bring from SGLang, vLLM-Omni, diffusers, FastVideo, ComfyUI and others.

The table is spellings.yaml, read when a name that is not ours is first asked for: other commands do without.
A spelling stands for a name of ours, with a remark where that is not quite the same; or it has no counterpart here, and
the remark gives the reason. `scripts/write_spellings.py` writes docs/spellings.md from the same file.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from diffusion_runtime.errors import nearest, shown

FILE = Path(__file__).with_name("spellings.yaml")

# Attention backends; flags and verbs of the command; values of `dtype`, `quantization` and `sampler`; names of Python;
# shapes of `bench attention`.
Kind: TypeAlias = Literal["backend", "flag", "verb", "dtype", "quantization", "sampler", "name", "shape"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class Spelling(NamedTuple):
    """One name of another project.

    means: ours, for a flag with the value it has; empty without a counterpart. remark: what is different, or why there
    is none; a clause without a full stop. instead: the nearest of ours where `means` is empty, or what to write. value:
    of a flag whose value is taken apart, a pattern; {1} and {2} in `means` are its groups. example: a value for it.
    """

    spelling: str
    origin: str
    means: str = ""
    remark: str = ""
    instead: str = ""
    value: str = ""
    example: str = ""

    @property
    def refusal(self) -> str:
        """The message for a name without a counterpart: `--host: there is no server here; ...`."""
        return f"{self.spelling}: {self.remark}; {self.instead}"

    @property
    def is_complete(self) -> bool:
        """Return whether `means` is a flag with its value: the name is a switch then."""
        return not self.value and " " in self.means

    def taken_apart(self, value: str) -> list[str] | None:
        """Return the arguments that a flag with `value` stands for, or None if the value does not match its pattern."""
        match = re.fullmatch(self.value, value)
        if match is None:
            return None
        return self.means.format(match[0], *match.groups()).split(" ")


def resolve(kind: Kind, name: str) -> Spelling | None:
    """Look up what a name of another project is here; None for a name that the table does not have. Case and `-`/`_`
    do not matter, but in names of Python."""
    return table_of(kind).get(_plain(kind, name))


def own_name(kind: Kind, name: object, ours: Container[Any]) -> Any:
    """`name` where it is one of `ours`, or stands for none of them; else the one of ours that it stands for."""
    if not isinstance(name, str) or name in ours:
        return name
    row = resolve(kind, name)
    return row.means if row is not None and row.means else name


def unknown_value(kind: Kind, value: object, ours: Sequence[str]) -> str:
    """Return the message for a value not in `ours`, with the reason and what to write if the table has it."""
    row = resolve(kind, value) if isinstance(value, str) else None
    if row is not None:
        return f"{kind}: {row.refusal}"
    return f"{kind}: unknown value {shown(value)}.{nearest(value, ours)}"


@functools.cache
def table_of(kind: Kind) -> Mapping[str, Spelling]:
    """Return every spelling of a kind, by the form in which `resolve` compares it."""
    return {_plain(kind, row.spelling): row for row in _rows()[kind]}


@functools.cache
def _rows() -> Mapping[Kind, tuple[Spelling, ...]]:
    """Read every row of the file. Raises TypeError for a row with an unknown column, KeyError for a kind without
    rows."""
    # PyYAML takes 0.02 s to import.
    from diffusion_runtime.untrusted.yaml_text import read_packaged_yaml

    content = read_packaged_yaml(FILE)
    return {kind: tuple(Spelling(**row) for row in content[kind]) for kind in KINDS}


def _plain(kind: Kind, name: str) -> str:
    if kind == "name":
        return name
    if kind == "flag":
        dashes = "--" if name.startswith("--") or len(name) > 2 else "-"
        return dashes + name.lstrip("-").lower().replace("_", "-")
    return name.strip().lower().replace("-", "_")
