"""Checkpoints: the weights of a model: safetensors alone, one file or sharded, read tensor by tensor.

A pickle (.bin, .pt, .ckpt) can run code when it is opened, so none is ever read.
"""

from __future__ import annotations

import contextlib
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, TypeAlias

import torch

from diffusion_runtime.core.model_folder import part_prefix
from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.layers.weight_range import unusable_numbers
from diffusion_runtime.weights.parallel_reads import Finish, ParallelReads
from diffusion_runtime.weights.stored_tensors import Rows, StoredRows, plain_rows, some_rows, stored_rows
from diffusion_runtime.weights.tensor_files import SafetensorsFile, TensorFile
from diffusion_runtime.weights.tensor_part import WHOLE, TensorPart
from diffusion_runtime.weights.weight_files import (
    DAMAGED,
    find_weight_files,
    of_component,
    refuse_quantised,
    refuse_unmarked,
)


@dataclass(frozen=True)
class Piece:
    """A tensor of a checkpoint: its name and the shape it must have. part: what of it is read."""

    name: str
    shape: tuple[int, ...]
    part: TensorPart = WHOLE

    @property
    def read_shape(self) -> tuple[int, ...]:
        """The shape of what is read."""
        return self.part.shape_of(self.shape)

    def some(self, part: TensorPart) -> Piece:
        """The same, of which a part is read."""
        return dataclasses.replace(self, part=part)


# Opens files, which are closed with the stack, and gives their tensors by name.
Source: TypeAlias = Callable[[contextlib.ExitStack], Rows]


class TensorSource(Protocol):
    """The source of a component's parameters: its checkpoint, or numbers of another origin. folder: for messages;
    shapes: of every tensor, by name; elsewhere: the other file or folder that they come from, None for the model's
    own."""

    @property
    def folder(self) -> Path: ...

    @property
    def elsewhere(self) -> Path | None: ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def copy_into(self, name: str, target: torch.Tensor, part: TensorPart = WHOLE) -> None:
        """Write a part of tensor `name` into `target`, of the part's shape."""

    def begin_copy(self, name: str, target: torch.Tensor, part: TensorPart = WHOLE) -> Finish:
        """Begin `copy_into` in the background; calling the result waits for its end and raises its errors."""

    def is_changed(self, name: str) -> bool:
        """Return whether a change adds to tensor `name`."""

    def quantized(self, name: str) -> tuple[StoredRows, ...]:
        """The rows of tensor `name` as they are stored, where all are quantised; empty otherwise."""


class WeightChange(ABC):
    """Something that is added to a checkpoint's weights while they are read, such as a LoRA."""

    @abstractmethod
    def check(self, component: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check that it fits the tensors of a component (`transformer`), by name. Raises ModelLoadError that names what
        does not."""

    @abstractmethod
    def changed(self, component: str) -> frozenset[str]:
        """The tensors of a component that it changes, by name."""

    @abstractmethod
    def delta(self, component: str, name: str, weight: torch.Tensor) -> torch.Tensor | None:
        """Return what is added to tensor `name` of a component, in float32; None where nothing changes. weight: the
        tensor without any LoRA's, in float32, with what replaces it."""

    def replaced(self, component: str) -> Mapping[str, tuple[int, ...]]:  # noqa: ARG002
        """Return the shapes of the tensors of a component that it replaces whole; the files need not have these."""
        return {}

    def base(self, component: str, name: str, weight: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """Return tensor `name` with the rows that it replaces. weight: the tensor in the file, float32."""
        return weight


class Checkpoint:
    """The tensors of a component. Close it, or use it as a context manager.

    folder: of the component; holds `{stem}.safetensors`, `{stem}.safetensors.index.json` with its shards, or a variant
    of either such as `{stem}.fp16.safetensors`. shapes: of every tensor, by name. changes: made to the tensors as they
    are read: each adds to the tensor as it is in the file, and the sum is rounded once. kept: tensors as they are in
    the file, which is not read for them again; those that are read, and are not quantised, are added. reads_quantized:
    whether weights may be quantised with scales (stored_formats). given: tensors that are in no file, and that a change
    gives whole. source: opens the tensors where they are in other
    files, at `place`. renamed: gives the tensors of a file other names.

    Raises ModelLoadError for files that are missing, truncated, damaged, pickled, quantised otherwise, or Git-LFS
    pointers.
    """

    def __init__(
        self,
        folder: Path,
        stem: str = "diffusion_pytorch_model",
        *,
        changes: Sequence[WeightChange] = (),
        kept: dict[str, torch.Tensor] | None = None,
        reads_quantized: bool = False,
        source: Source | None = None,
        place: Path | None = None,
        renamed: Callable[[Path, Rows], Rows] | None = None,
    ) -> None:
        self.folder = folder
        self.elsewhere = place
        self._changes = changes
        self._changed = frozenset().union(*(change.changed(folder.name) for change in changes))
        self._kept = kept
        self._stack = contextlib.ExitStack()
        # Closed before the files.
        self._reads = ParallelReads()
        try:
            if source is None:
                paths = find_weight_files(folder, stem)
                if paths[0].parent != folder:
                    self.elsewhere = paths[0] if len(paths) == 1 else paths[0].parent
                files = [self._open(path, reads_quantized, part_prefix(folder)) for path in paths]
                self._rows = stored_rows(files) if reads_quantized else plain_rows(files)
                if renamed is not None:
                    self._rows = renamed(paths[0], self._rows)
            else:
                self._rows = source(self._stack)
            for file in {id(row.file): row.file for rows in self._rows.values() for row in rows}.values():
                if isinstance(file, SafetensorsFile):
                    file.reads = self._reads
            self.shapes = {name: _shape(rows) for name, rows in self._rows.items()}
            self.given = frozenset(
                name for change in changes for name in change.replaced(folder.name) if name not in self.shapes
            )
            for change in changes:
                self.shapes = {**change.replaced(folder.name), **self.shapes}
            for change in changes:
                change.check(folder.name, self.shapes)
        except BaseException:
            self.close()
            raise

    def copy_into(self, name: str, target: torch.Tensor, part: TensorPart = WHOLE) -> None:
        """Write a part of tensor `name` into `target`, of the part's shape, converting its dtype and device. Of a
        tensor that is neither changed nor kept, the part alone is read from the file.

        Raises ModelLoadError for numbers that nothing can be computed with (layers/weight_range.py).
        """
        if part.is_zero:
            target.zero_()
            return
        if name not in self._changed:
            self.begin_copy(name, target, part)()
            return
        # A change may depend on all of a tensor, such as the lengths of its rows (DoRA).
        source = torch.zeros(self.shapes[name]) if name in self.given else self._source(name, target.dtype)
        component = self.folder.name
        base = source.float()
        for change in self._changes:
            base = change.base(component, name, base)
        total = base.clone()
        for change in self._changes:
            delta = change.delta(component, name, base)
            if delta is not None:
                total += delta
        wrong = unusable_numbers(total, target.dtype)
        if wrong is not None:
            raise ModelLoadError(
                f"{self.folder}: tensor {name} with its LoRA {wrong}: use a smaller scale, or dtype bfloat16 or float32"
            )
        target.copy_(part.of(total))

    def begin_copy(self, name: str, target: torch.Tensor, part: TensorPart = WHOLE) -> Finish:
        """`copy_into`, in the background where the file's bytes are the numbers; do not touch `target` before the
        result is called, which raises what copy_into raises."""
        if part.is_zero:
            target.zero_()
            return lambda: None
        if self.is_changed(name):
            self.copy_into(name, target, part)
            return lambda: None
        rows = some_rows(self._rows[name], part)
        stored = [each.stored_bytes() for each in rows]
        places = [each for each in stored if each is not None]
        if self._kept is not None or len(places) < len(stored) or not self._reads.can_fill(target):
            target.copy_(self._source(name, target.dtype, part))
            return lambda: None
        flat, start, reads = target.view(-1), 0, []
        for place in places:
            stop = start + place.num_bytes // place.dtype.itemsize
            reads.append(self._reads.into(place, flat[start:stop]))
            start = stop

        def finish() -> None:
            for read in reads:
                read()
            wrong = unusable_numbers(target)
            if wrong is not None:
                # As they are stored they may be another thing: numbers that the target's dtype cannot hold.
                self._source(name, target.dtype, part)
                raise ModelLoadError(f"{self.folder}: tensor {name} {wrong} on {target.device}. {DAMAGED}")

        return finish

    def quantized(self, name: str) -> tuple[StoredRows, ...]:
        """The rows of tensor `name` as they are stored, one after the other, where all of it is quantised in the file,
        and can stay so; empty otherwise."""
        rows = self._rows.get(name, ())
        return rows if all(each.can_stay for each in rows) else ()

    def is_changed(self, name: str) -> bool:
        """Return whether a change adds to tensor `name`."""
        return name in self._changed

    def expect(self, names: Collection[str]) -> None:
        """Tell the system that these tensors are read next, so that it fetches them while others compute."""
        for name in names:
            for rows in self._rows.get(name, ()):
                stored = rows.file.stored_bytes(rows.name, rows.rows)
                if stored is not None:
                    # An unreadable tensor raises when it is read.
                    with contextlib.suppress(OSError):
                        stored.expect()

    def _source(self, name: str, dtype: torch.dtype, part: TensorPart = WHOLE) -> torch.Tensor:
        """A part of tensor `name` as it is in its file."""
        if self._kept is not None and name in self._kept:
            return part.of(self._kept[name])
        rows = self._rows[name]
        if self._kept is None:
            rows, part = some_rows(rows, part), WHOLE
        # What is kept for later is for the system to take back.
        parts = [each.numbers(dtype, mapped=self._kept is not None) for each in rows]
        source = parts[0] if len(parts) == 1 else torch.cat(parts)
        if self._kept is not None and not any(each.is_quantized for each in rows):
            self._kept[name] = source
        return part.of(source)

    def close(self) -> None:
        self._reads.close()
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, path: Path, reads_quantized: bool, prefix: str) -> TensorFile:
        file = SafetensorsFile(path, prefix)
        self._stack.callback(file.close)
        kinds = {name: head.kind for name, head in file.heads.items()}
        (refuse_unmarked if reads_quantized else refuse_quantised)(path, of_component(self.folder.name, kinds))
        return file


def _shape(rows: Sequence[StoredRows]) -> tuple[int, ...]:
    first = rows[0].shape
    return first if len(rows) == 1 else (sum(each.shape[0] for each in rows), *first[1:])
