"""Detects the model family of a LoRA file: by the names of its modules, then by widths and numbers of blocks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from diffusion_runtime.models.lora.names import LoraNames
from diffusion_runtime.models.lora.reading import ModuleChange

_BLOCK = re.compile(r"(?:^|[._])(?:blocks|layers)[._](\d{1,4})[._]")


def families_of(modules: Sequence[ModuleChange], known: Iterable[LoraNames]) -> tuple[str, ...]:
    """Titles of the families that the file may be for, one where names and sizes tell; empty where no family has its
    names."""
    counted = [(names, _num_found(modules, names)) for names in known]
    most = max((count for _, count in counted), default=0)
    candidates = [names for names, count in counted if count == most and count]
    for fits in (_fits_blocks, _is_whole, _fits_width):
        kept = [names for names in candidates if fits(modules, names)]
        candidates = kept or candidates
    return tuple(names.title for names in candidates)


def _num_found(modules: Sequence[ModuleChange], names: LoraNames) -> int:
    return sum(bool(names.find(module.name, flattened=module.flattened)) for module in modules)


def _fits_blocks(modules: Sequence[ModuleChange], names: LoraNames) -> bool:
    return _num_blocks(modules) <= max(names.num_blocks, default=0)


def _is_whole(modules: Sequence[ModuleChange], names: LoraNames) -> bool:
    """Most files change every block."""
    return _num_blocks(modules) in names.num_blocks


def _num_blocks(modules: Sequence[ModuleChange]) -> int:
    return 1 + max((int(match[1]) for module in modules if (match := _BLOCK.search(module.name))), default=-1)


def _fits_width(modules: Sequence[ModuleChange], names: LoraNames) -> bool:
    widths = {adapter.columns for module in modules for adapter in module.weight}
    return not names.widths.isdisjoint(widths)
