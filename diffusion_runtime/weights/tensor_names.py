"""Tensor names of transformers in one file: diffusers', or those of the authors that ComfyUI's files keep.

What the authors call a module is known from LoRA files (LORA_NAMES of a family). Rows move with the names: a
fused projection holds the rows of several modules of diffusers', and the shift and scale of some last layers stand in
the other order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from diffusion_runtime.errors import ModelLoadError, shown_name
from diffusion_runtime.weights.lora.detection import families_of_names
from diffusion_runtime.weights.lora.names import LoraNames
from diffusion_runtime.weights.lora.names import Rows as ModuleRows
from diffusion_runtime.weights.stored_tensors import Rows, StoredRows
from diffusion_runtime.weights.weight_files import PREFIXES, listed, without_prefix

Shapes = Mapping[str, tuple[int, ...]]
# An untrusted name may have any length.
_MAX_NAME_CHARACTERS = 300
# What is behind the last dot of a parameter in the authors' files -> in diffusers'.
_LEAVES = {"weight": "weight", "bias": "bias", "scale": "weight"}


@dataclass(frozen=True)
class Expected:
    """The transformer that a file is for. shapes: of its tensors, by diffusers' names; names: what its authors call
    its modules; unread: names of tensors that nothing reads; known: the names of all families."""

    shapes: Shapes
    names: LoraNames
    known: Callable[[], Sequence[LoraNames]]
    unread: Callable[[str], bool] = lambda _: False


def by_diffusers_names(path: Path, rows: Rows, expected: Expected) -> Rows:
    """The rows of a file's tensors by diffusers' names; of a file that holds more than a transformer, what stands
    behind the transformer's prefix.

    Raises ModelLoadError for tensors that the model does not have, with the family that the file is for.
    """
    return _Renaming(path, expected).renamed(rows)


def transformer_tensors(names: Sequence[str]) -> tuple[str, ...]:
    """Return a file's tensors that belong to a transformer: all, or those behind a prefix where any has one."""
    return tuple(name for name in names if name.startswith(PREFIXES)) or tuple(names)


def families_of_tensors(shapes: Shapes, known: Sequence[LoraNames]) -> tuple[str, ...]:
    """Titles of the families whose transformer has tensors of these names; empty where none has. shapes: by the file's
    own names."""
    modules = {_split(without_prefix(name))[0]: shape for name, shape in shapes.items()}
    widths = {shape[1] for shape in modules.values() if len(shape) == 2}
    return families_of_names([(name, False) for name in modules], widths, known)


class _Renaming:
    def __init__(self, path: Path, expected: Expected) -> None:
        self.path, self.expected = path, expected
        # By diffusers' name: parts of it by their place among equal parts, and how many these are.
        self.parts: dict[str, tuple[int, dict[int, StoredRows]]] = {}
        self.misfits: list[str] = []

    def renamed(self, rows: Rows) -> Rows:
        unmatched = []
        for name in transformer_tensors(tuple(rows)):
            if not self._place(without_prefix(name), rows[name][0]):
                unmatched.append(name)
        if unmatched:
            raise self._foreign(rows, unmatched)
        if self.misfits:
            raise ModelLoadError(
                f"{self.path}: {len(self.misfits)} of {len(rows)} tensors have other sizes than this model: "
                f"{listed(self.misfits)}. Use a file that was made for this model and its size"
            )
        incomplete = [name for name, (of, placed) in self.parts.items() if len(placed) != of]
        if incomplete:
            raise ModelLoadError(f"{self.path}: only parts of these tensors are there: {listed(incomplete)}")
        return {name: tuple(placed[index] for index in sorted(placed)) for name, (_, placed) in self.parts.items()}

    def _place(self, name: str, stored: StoredRows) -> bool:
        """Give the rows of a tensor to tensors of the model; return False for a name that no tensor or rule expects."""
        shapes = self.expected.shapes
        targets = [(name, ModuleRows(name))] if name in shapes else self._targets(name)
        if not targets:
            return self.expected.unread(name)
        sizes = [shapes[target][0] // part.of if shapes[target] else 1 for target, part in targets]
        is_whole = len(targets) == 1 and targets[0][1].of == 1
        if is_whole:
            self._put(targets[0][0], targets[0][1], stored.as_shape(shapes[targets[0][0]]))
            return True
        found, wanted = stored.shape, (sum(sizes), *shapes[targets[0][0]][1:])
        if found != wanted:
            parts = listed(dict.fromkeys(target for target, _ in targets))
            self.misfits.append(
                f"{shown_name(stored.name)} is {list(found)}, expected {list(wanted)} (the rows of {parts})"
            )
            return True
        start = 0
        for (target, part), size in zip(targets, sizes, strict=True):
            self._put(target, part, stored.some(start, start + size))
            start += size
        return True

    def _targets(self, name: str) -> list[tuple[str, ModuleRows]]:
        """The tensors of the model that one of the authors' holds the rows of, one after the other."""
        if len(name) > _MAX_NAME_CHARACTERS:
            return []
        shapes = self.expected.shapes
        module, leaf = _split(name)
        found = [(f"{rows.module}{leaf}", rows) for rows in self.expected.names.find(module, flattened=False)]
        return found if all(target in shapes for target, _ in found) else []

    def _put(self, target: str, part: ModuleRows, stored: StoredRows) -> None:
        of, placed = self.parts.setdefault(target, (part.of, {}))
        if of != part.of or part.index in placed:
            other = next(iter(placed.values())).name
            raise ModelLoadError(
                f"{self.path}: {shown_name(other)} and {shown_name(stored.name)} are both for {target}; the file holds "
                "the transformer twice"
            )
        placed[part.index] = stored

    def _foreign(self, rows: Rows, unmatched: Sequence[str]) -> ModelLoadError:
        names = self.expected.names
        reasons = {names.reason_absent(module) for name in unmatched for module in self._modules(name)}
        families = families_of_tensors(
            {name: rows[name][0].shape for name in transformer_tensors(tuple(rows))}, self.expected.known()
        )
        others = [family for family in families if family != names.title]
        if None not in reasons and reasons:
            reason = f"the file has tensors for {' and '.join(map(str, reasons))}, which this model does not have"
        elif others:
            reason = f"the file is for {' or '.join(others)}, and the model is {names.title}"
        elif families:
            reason = f"the file is for another {names.title} model"
        else:
            reason = f"the file is for another model than {names.title}, of no family that is known here"
        return ModelLoadError(
            f"{self.path}: {reason}: {len(unmatched)} of {len(rows)} tensors are not in this model: "
            f"{listed(map(shown_name, unmatched))}. Use a file that was made for this model"
        )

    def _modules(self, name: str) -> list[str]:
        """The modules of diffusers' that an unmatched tensor is of; a name of none, as it is."""
        module, _ = _split(without_prefix(name)[:_MAX_NAME_CHARACTERS])
        return [rows.module for rows in self.expected.names.find(module, flattened=False)] or [module]


def _split(name: str) -> tuple[str, str]:
    """(module, what diffusers has behind it): a table of scales and shifts has nothing."""
    module, _, leaf = name.rpartition(".")
    return (module, f".{_LEAVES[leaf]}") if module and leaf in _LEAVES else (name, "")
