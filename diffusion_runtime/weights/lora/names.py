"""LoraNames: what a family's authors call the modules of its transformer, in addition to diffusers' names."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

# A number that stands alone between separators: the index of a block, in dotted and in flattened names.
_NUMBER = re.compile(r"(?<![^._])\d+(?![^._])")


@dataclass(frozen=True)
class Rows:
    """Rows of a module of a diffusers checkpoint: part `index` of `of` equal parts.

    module: its name, with `{}` for the index of a block.
    """

    module: str
    index: int = 0
    of: int = 1

    def at(self, block: str) -> Rows:
        return Rows(self.module.replace("{}", block), self.index, self.of)


# The authors' name of a module -> diffusers' module, or the modules whose rows it holds.
Originals: TypeAlias = Mapping[str, str | tuple[str | Rows, ...]]


@dataclass(frozen=True)
class LoraNames:
    """The names that LoRA files of a family give its modules; `{}` is the index of a block.

    title: the family's name, for messages. same: modules that the authors and diffusers call alike. originals: the
    authors' name of a module -> diffusers' module, or the ones whose rows it holds, one after the other. absent:
    modules of diffusers' that other models of the family have -> which those are; a file for them is applied without
    them. resized: modules whose inputs are not as wide in all models of the family -> what such a module of another
    width is; a file for that is applied without it. components: the names of other components that files for the
    transformer change too. widths, num_blocks: of the published models, the width of the
    transformer and how many blocks it has of the kind that it has most of, or of another kind; they tell families apart
    that use the same names. shares_names_of: the title of another family, for which files are taken that may be for
    either. undecided: the authors' modules of q, k and v whose rows published weights have in two orders.
    """

    title: str
    same: tuple[str, ...] = ()
    originals: Originals = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    resized: Mapping[str, str] = field(default_factory=dict)
    components: Mapping[str, LoraNames] = field(default_factory=dict)
    widths: frozenset[int] = frozenset()
    num_blocks: frozenset[int] = frozenset()
    shares_names_of: str = ""
    undecided: tuple[str, ...] = ()

    def find(self, name: str, *, flattened: bool) -> tuple[Rows, ...]:
        """The modules of diffusers that a module in a file denotes; empty for an unknown name.

        flattened: the dots of the name are underscores, as kohya's trainers write it.
        """
        table = self._flattened if flattened else self._dotted
        if name in table:
            return table[name]
        match = _NUMBER.search(name)
        if match is None:
            return ()
        template = f"{name[: match.start()]}{{}}{name[match.end() :]}"
        return tuple(rows.at(match[0]) for rows in table.get(template, ()))

    def refusal(self, keys: Iterable[str]) -> str | None:
        """Return why it cannot be told what the keys of a file change; None where it can. Files of DiffSynth-Studio,
        whose adapters have a name, are made of weights in either order of `undecided`."""
        for name in self.undecided:
            if any(key.endswith(f".{name}.lora_B.default.weight") for key in keys):
                return (
                    f"its {name} is of DiffSynth-Studio (lora_B.default), whose rows are q, k and v one after the "
                    "other where it was trained on a single file, and interleaved by head where it was trained on the "
                    "authors' shards; the file does not say which. Write q, k and v apart, as attn.to_q.lora_B.weight "
                    "and so on"
                )
        return None

    def reason_absent(self, module: str) -> str | None:
        """Which models have this module of diffusers', where the family declares it; None otherwise."""
        return self.absent.get(module) or self.absent.get(_NUMBER.sub("{}", module, count=1))

    def reason_resized(self, module: str) -> str | None:
        """Return what this module of diffusers' is in a model whose inputs are of another width, where the family
        declares it; None otherwise."""
        return self.resized.get(module) or self.resized.get(_NUMBER.sub("{}", module, count=1))

    @functools.cached_property
    def _dotted(self) -> dict[str, tuple[Rows, ...]]:
        table = {name: _rows(targets) for name, targets in self.originals.items()}
        theirs = [rows.module for several in table.values() for rows in several]
        for name in (*self.same, *theirs):
            table.setdefault(name, (Rows(name),))
        return table

    @functools.cached_property
    def _flattened(self) -> dict[str, tuple[Rows, ...]]:
        return {name.replace(".", "_"): rows for name, rows in self._dotted.items()}


def each(blocks: str, names: Iterable[str]) -> tuple[str, ...]:
    """`blocks.{}` with each of the names behind it."""
    return tuple(f"{blocks}.{name}" for name in names)


def block_names(theirs: str, ours: str, names: Originals) -> Originals:
    """Originals of one kind of block. theirs, ours: the authors' and diffusers' prefix, with `{}`; names: behind
    them."""

    def behind(target: str | tuple[str | Rows, ...]) -> str | tuple[str | Rows, ...]:
        if isinstance(target, str):
            return f"{ours}.{target}"
        return tuple(f"{ours}.{part}" if isinstance(part, str) else part for part in target)

    return {f"{theirs}.{name}": behind(target) for name, target in names.items()}


def swapped_halves(module: str) -> tuple[Rows, ...]:
    """The authors' shift and scale of the last layer, which diffusers has as scale and shift."""
    return Rows(module, 1, 2), Rows(module, 0, 2)


def _rows(targets: str | tuple[str | Rows, ...]) -> tuple[Rows, ...]:
    several = (targets,) if isinstance(targets, str) else targets
    return tuple(Rows(target) if isinstance(target, str) else target for target in several)
