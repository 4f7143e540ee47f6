"""Detects the model family of a LoRA file: by the names of its modules, then by widths and numbers of blocks."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import TypeAlias

from diffusion_runtime.weights.lora.names import LoraNames
from diffusion_runtime.weights.lora.reading import ModuleChange

# Of modules: (name, whether its dots are underscores).
Names: TypeAlias = Sequence[tuple[str, bool]]
_BLOCK = re.compile(r"(?:^|[._])(?:blocks|layers)[._](\d{1,4})[._]")


def families_of(modules: Sequence[ModuleChange], known: Iterable[LoraNames]) -> tuple[str, ...]:
    """Titles of the families that the file may be for, one where names and sizes tell; empty where no family has its
    names."""
    widths = {adapter.columns for module in modules for adapter in module.weight}
    return families_of_names([(module.name, module.flattened) for module in modules], widths, known)


def families_of_names(names: Names, widths: Collection[int], known: Iterable[LoraNames]) -> tuple[str, ...]:
    """`families_of` for modules by their names. widths: of their inputs."""
    counted = [(family, _num_found(names, family)) for family in known]
    most = max((count for _, count in counted), default=0)
    candidates = [family for family, count in counted if count == most and count]
    num_blocks = _num_blocks(names)
    several = (
        [family for family in candidates if num_blocks <= max(family.num_blocks, default=0)],
        # Most files change every block.
        [family for family in candidates if num_blocks in family.num_blocks],
        [family for family in candidates if not family.widths.isdisjoint(widths)],
    )
    for fitting in several:
        candidates = [family for family in candidates if family in fitting] or candidates
    titles = {family.title for family in candidates}
    return tuple(family.title for family in candidates if family.shares_names_of not in titles)


def _num_found(names: Names, family: LoraNames) -> int:
    return sum(bool(family.find(name, flattened=flattened)) for name, flattened in names)


def _num_blocks(names: Names) -> int:
    return 1 + max((int(match[1]) for name, _ in names if (match := _BLOCK.search(name))), default=-1)
