"""Checkpoints: the weights of a model: safetensors alone, one file or sharded, read tensor by tensor.

A pickle (.bin, .pt, .ckpt) can run code when it is opened, so none is ever read.
"""

from __future__ import annotations

import contextlib
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TypeAlias

import torch
from torch import nn

from diffusion_runtime.errors import ModelLoadError, first_line
from diffusion_runtime.kernels.fp8_rows.api import quantize_rows
from diffusion_runtime.layers.fp8_linear import quantized_weights
from diffusion_runtime.layers.weight_range import unusable_numbers
from diffusion_runtime.models.weight_files import (
    DAMAGED,
    check_whole,
    find_weight_files,
    listed,
    refuse_quantised,
)
from diffusion_runtime.untrusted.files import check_file

if TYPE_CHECKING:
    from safetensors import safe_open


@dataclass(frozen=True)
class Piece:
    """A tensor of a checkpoint: its name and the shape it must have."""

    name: str
    shape: tuple[int, ...]


class MakeEmpty(Protocol):
    """A tensor to be filled, where weights shall lie."""

    def __call__(self, shape: torch.Size, *, dtype: torch.dtype) -> torch.Tensor: ...


# (module, name of a parameter, its values): changes the values in place.
Arrange: TypeAlias = Callable[[nn.Module, str, torch.Tensor], None]


class WeightChange(ABC):
    """Something that is added to a checkpoint's weights while they are read, such as a LoRA."""

    @abstractmethod
    def check(self, component: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Whether it fits the tensors of a component (`transformer`), by name. Raises ModelLoadError that names what
        does not."""

    @abstractmethod
    def changed(self, component: str) -> frozenset[str]:
        """The tensors of a component that it changes, by name."""

    @abstractmethod
    def delta(self, component: str, name: str, weight: torch.Tensor) -> torch.Tensor | None:
        """What is added to tensor `name` of a component, in float32; None where nothing changes. weight: the tensor
        without any change, in float32."""


class Checkpoint:
    """The tensors of a component's folder. Close it, or use it as a context manager.

    folder: holds `{stem}.safetensors`, `{stem}.safetensors.index.json` with its shards, or a variant of either such as
    `{stem}.fp16.safetensors`. shapes: of every tensor, by name. changes: made to the tensors as they are read: each
    adds to the tensor as it is in the file, and the sum is rounded once. kept: tensors as they are in the file, which
    is not read for them again; those that are read are added.

    Raises ModelLoadError for files that are missing, truncated, damaged, pickled, quantised, or Git-LFS pointers.
    """

    def __init__(
        self,
        folder: Path,
        stem: str = "diffusion_pytorch_model",
        *,
        changes: Sequence[WeightChange] = (),
        kept: dict[str, torch.Tensor] | None = None,
    ) -> None:
        self.folder = folder
        self._changes = changes
        self._changed = frozenset().union(*(change.changed(folder.name) for change in changes))
        self._kept = kept
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._file_of: dict[str, tuple[Path, safe_open]] = {}
        self._stack = contextlib.ExitStack()
        try:
            for path in find_weight_files(folder, stem):
                self._open(path)
            for change in changes:
                change.check(folder.name, self.shapes)
        except BaseException:
            self.close()
            raise

    def copy_into(self, name: str, target: torch.Tensor) -> None:
        """Write tensor `name` into `target`, of the same shape, converting its dtype and device.

        Raises ModelLoadError for numbers that nothing can be computed with (layers/weight_range.py).
        """
        source = self._source(name, target.dtype)
        component = self.folder.name
        if name not in self._changed:
            target.copy_(source)
            return
        base = source.float()
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
        target.copy_(total)

    def _source(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Tensor `name` as it is in its file."""
        if self._kept is not None and name in self._kept:
            return self._kept[name]
        path, file = self._file_of[name]
        source: torch.Tensor = file.get_tensor(name)  # type: ignore[no-untyped-call]
        wrong = unusable_numbers(source, dtype)
        if wrong is not None:
            raise ModelLoadError(f"{path}: tensor {name} {wrong}. {DAMAGED}")
        if self._kept is not None:
            self._kept[name] = source
        return source

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        check_whole(path)
        try:
            file = self._stack.enter_context(safe_open(path, framework="pt"))
            dtypes: dict[str, str] = {}
            for name in file.keys():  # noqa: SIM118 - it is not a mapping
                tensor = file.get_slice(name)
                self.shapes[name], dtypes[name] = tuple(tensor.get_shape()), tensor.get_dtype()
                self._file_of[name] = path, file
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(
                f"{path} is damaged or not a whole safetensors file ({first_line(error)}); copy or download it again"
            ) from error
        refuse_quantised(path, dtypes)


def load_weights(
    module: nn.Module,
    checkpoint: Checkpoint,
    pieces: Mapping[str, tuple[Piece, ...]],
    device: torch.device,
    dtype: torch.dtype,
    stays_float32: Callable[[str], bool] = lambda _: False,
    ignored: Callable[[str], bool] = lambda _: False,
    arrange: Arrange | None = None,
    make_empty: MakeEmpty | None = None,
) -> None:
    """Fill `module` in place, each parameter once, on its device and in its dtype, without gradients.

    pieces: at least every parameter and buffer of the state dict -> the checkpoint's tensors that fill it, in order.
    Weights of 8-bit layers are quantised one after the other, on the device.
    stays_float32: parameters that are not converted to `dtype`; integers never are. ignored: checkpoint tensors that
        nothing reads. arrange: puts the rows of a parameter in the order that our layers have. make_empty: makes the
        parameters, where they shall lie; None for `device`. 8-bit weights are quantised on `device` in any case.

    Raises ModelLoadError that lists what is missing, unexpected or of another shape.
    """
    scale_of = quantized_weights(module)
    parameters = {name: value for name, value in module.state_dict().items() if name not in scale_of.values()}
    _check_names(checkpoint, [piece for name in parameters for piece in pieces[name]], ignored)
    state = {}
    on_device: MakeEmpty = functools.partial(torch.empty, device=device)
    for name, parameter in parameters.items():
        if name in scale_of:
            # From float32, so that a checkpoint with a LoRA is rounded once.
            target = torch.empty(parameter.shape, dtype=torch.float32, device=device)
            _fill(target, name, checkpoint, pieces[name])
            if arrange is not None:
                arrange(module, name, target)
            for own, values in zip((name, scale_of[name]), quantize_rows(target), strict=True):
                state[own] = (
                    values if make_empty is None else make_empty(values.shape, dtype=values.dtype).copy_(values)
                )
            continue
        floating = torch.float32 if stays_float32(name) else dtype
        stored_dtype = floating if parameter.is_floating_point() else parameter.dtype
        target = (make_empty or on_device)(parameter.shape, dtype=stored_dtype)
        _fill(target, name, checkpoint, pieces[name])
        if arrange is not None:
            arrange(module, name, target)
        state[name] = target
    module.load_state_dict(state, assign=True)
    module.requires_grad_(False).eval()


@torch.no_grad()
def rewrite_weights(
    module: nn.Module,
    checkpoint: Checkpoint,
    pieces: Mapping[str, tuple[Piece, ...]],
    changed: Collection[str],
    arrange: Arrange | None = None,
) -> None:
    """Fill the parameters of a loaded module that hold any of the checkpoint's tensors `changed`, one after the other
    and in place, with what `load_weights` would put there."""
    scale_of = quantized_weights(module)
    parameters = module.state_dict(keep_vars=True)
    for name, parameter in parameters.items():
        if name in scale_of.values() or not any(piece.name in changed for piece in pieces[name]):
            continue
        target = torch.empty_like(parameter, dtype=torch.float32 if name in scale_of else parameter.dtype)
        _fill(target, name, checkpoint, pieces[name])
        if arrange is not None:
            arrange(module, name, target)
        if name in scale_of:
            target, scales = quantize_rows(target)
            parameters[scale_of[name]].copy_(scales)
        parameter.copy_(target)


def _fill(target: torch.Tensor, name: str, checkpoint: Checkpoint, pieces: Sequence[Piece]) -> None:
    flat, start = target.view(-1), 0
    for piece in pieces:
        stop = start + math.prod(piece.shape)
        checkpoint.copy_into(piece.name, flat[start:stop].view(piece.shape))
        start = stop
    assert start == target.numel(), f"{name}: its pieces hold {start} numbers, it has {target.numel()}"


def read_tensors(path: Path, key: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Every tensor of one safetensors file, on the CPU, and its metadata. key: what named it.

    Raises ConfigError for a path that is no file's, ModelLoadError for a file that is missing, damaged, or of another
    kind.
    """
    from safetensors import SafetensorError, safe_open

    check_file(path, key, missing=ModelLoadError)
    if path.suffix != ".safetensors":
        raise ModelLoadError(f"{path}: expected a .safetensors file; a pickle can run code when it is opened")
    check_whole(path)
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is not a mapping
            return tensors, dict(file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path} is damaged or not a whole safetensors file ({first_line(error)})") from error


def own_pieces(module: nn.Module) -> dict[str, tuple[Piece, ...]]:
    """Pieces for a module whose names are the checkpoint's."""
    return {name: (Piece(name, tuple(tensor.shape)),) for name, tensor in module.state_dict().items()}


def _check_names(checkpoint: Checkpoint, expected: list[Piece], ignored: Callable[[str], bool]) -> None:
    shapes = checkpoint.shapes
    wanted = {piece.name for piece in expected}
    problems = []
    missing = [piece.name for piece in expected if piece.name not in shapes]
    if missing:
        problems.append(f"{len(missing)} of {len(expected)} tensors are missing: {listed(missing)}")
    unexpected = [name for name in shapes if name not in wanted and not ignored(name)]
    if unexpected:
        problems.append(f"{len(unexpected)} tensors are unexpected: {listed(unexpected)}")
    reshaped = [
        f"{piece.name} is {list(shapes[piece.name])}, expected {list(piece.shape)}"
        for piece in expected
        if piece.name in shapes and shapes[piece.name] != piece.shape
    ]
    if reshaped:
        problems.append(f"{len(reshaped)} tensors have another shape than config.json says: {listed(reshaped)}")
    if problems:
        raise ModelLoadError(
            f"{checkpoint.folder}: the weights do not fit config.json beside them. " + ". ".join(problems)
        )
