"""Weights of a module: what of a checkpoint fills each of its parameters, as it is loaded and as it changes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol, TypeAlias

import torch
from torch import nn

from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.kernels.fp8_rows.reference import QuantizedRows
from diffusion_runtime.layers.eight_bit_linear import EightBitLinear, eight_bit_layers, quantized_weights
from diffusion_runtime.layers.stored_linear import PackedRows, StoredLinear, StoredPart
from diffusion_runtime.weights.checkpoint import Checkpoint, Piece, TensorSource
from diffusion_runtime.weights.parallel_reads import Finish
from diffusion_runtime.weights.stored_formats.plain_numbers import PlainNumbers
from diffusion_runtime.weights.stored_tensors import StoredRows, some_rows
from diffusion_runtime.weights.tensor_part import TensorPart
from diffusion_runtime.weights.weight_files import listed


class MakeEmpty(Protocol):
    """A tensor to be filled, where weights shall lie."""

    def __call__(self, shape: torch.Size, *, dtype: torch.dtype) -> torch.Tensor: ...


# (module, name of a parameter, its values): changes the values in place.
Arrange: TypeAlias = Callable[[nn.Module, str, torch.Tensor], None]


def stored_weight(
    checkpoint: TensorSource, pieces: Mapping[str, tuple[Piece, ...]], name: str
) -> tuple[StoredRows, ...]:
    """The rows of our parameter `name` as they are stored, where all are quantised; empty otherwise."""
    several = [checkpoint.quantized(piece.name) for piece in pieces[name] if piece.name in checkpoint.shapes]
    whole = len(several) == len(pieces[name]) and all(several)
    return tuple(row for rows in several for row in rows) if whole else ()


def expect_stored(
    module: nn.Module, checkpoint: TensorSource, pieces: Mapping[str, tuple[Piece, ...]], dtype: torch.dtype
) -> None:
    """Give the layers of an empty module whose weights stay as they are stored the bytes that loading gives them.
    dtype: of rows that a change adds to."""
    for name, layer in _stored_layers(module).items():
        parts: list[StoredPart] = []
        for piece in pieces[name]:
            if checkpoint.is_changed(piece.name):
                plain = PlainNumbers(dtype)
                heads = plain.heads(piece.shape[0], math.prod(piece.shape[1:]))
                parts.append(StoredPart(plain, piece.shape[0], heads))
            else:
                parts += [row.packed_part for row in checkpoint.quantized(piece.name)]
        layer.expect(parts)


def load_weights(
    module: nn.Module,
    checkpoint: TensorSource,
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
        nothing reads. arrange: changes what was read to what our layers have, such as the order of rows. make_empty:
        makes the parameters, where they shall lie; None for `device`, where 8-bit weights are quantised in any case.

    Raises ModelLoadError that lists what is missing, unexpected or of another shape.
    """
    check_names(module, checkpoint, pieces, ignored)
    state = read_weights(module, checkpoint, pieces, device, dtype, stays_float32, arrange, make_empty)
    module.load_state_dict(state, assign=True)
    module.requires_grad_(False).eval()


@torch.no_grad()
def read_weights(
    module: nn.Module,
    checkpoint: TensorSource,
    pieces: Mapping[str, tuple[Piece, ...]],
    device: torch.device,
    dtype: torch.dtype,
    stays_float32: Callable[[str], bool] = lambda _: False,
    arrange: Arrange | None = None,
    make_empty: MakeEmpty | None = None,
    only: Collection[str] | None = None,
) -> dict[str, torch.Tensor]:
    """The values that `load_weights` gives the parameters of a module, by name; the module stays as it is. only: of
    these, None for all; the scale of an 8-bit weight comes with it."""
    scale_of, of_rows = quantized_weights(module), eight_bit_layers(module)
    parameters = {
        name: value
        for name, value in module.state_dict().items()
        if name not in scale_of.values() and (only is None or name in only)
    }
    of_file = _stored_layers(module)
    state = {}
    # Read in the background, in this order.
    begun: list[tuple[str, torch.Tensor, Finish]] = []
    on_device: MakeEmpty = functools.partial(torch.empty, device=device)
    for name, parameter in parameters.items():
        if name in scale_of:
            order = _row_order(module, name, parameter.shape[0], arrange)
            rows = _quantized_rows(of_rows[name.rpartition(".")[0]], checkpoint, pieces[name], device, order)
            for own, values in zip((name, scale_of[name]), rows, strict=True):
                state[own] = (
                    values if make_empty is None else make_empty(values.shape, dtype=values.dtype).copy_(values)
                )
            continue
        if name in of_file:
            layer = of_file[name]
            packed = _packed_rows(layer, module, name, checkpoint, pieces[name], dtype, arrange)
            state[name] = layer.pack(packed, functools.partial(make_empty or on_device, dtype=torch.uint8))
            continue
        floating = torch.float32 if stays_float32(name) else dtype
        stored_dtype = floating if parameter.is_floating_point() else parameter.dtype
        target = (make_empty or on_device)(parameter.shape, dtype=stored_dtype)
        begun.append((name, target, _begin_fill(target, name, checkpoint, pieces[name])))
        state[name] = target
    for name, target, finish in begun:
        finish()
        if arrange is not None:
            arrange(module, name, target)
    return state


@torch.no_grad()
def rewrite_weights(
    module: nn.Module,
    checkpoint: Checkpoint,
    pieces: Mapping[str, tuple[Piece, ...]],
    changed: Collection[str],
    dtype: torch.dtype,
    arrange: Arrange | None = None,
) -> None:
    """Fill the parameters of a loaded module that hold any of the checkpoint's tensors `changed`, one after the other
    and in place, with what `load_weights` would put there. dtype: of the model."""
    scale_of, of_rows, of_file = quantized_weights(module), eight_bit_layers(module), _stored_layers(module)
    parameters = module.state_dict(keep_vars=True)
    for name, parameter in parameters.items():
        if name in scale_of.values() or not any(piece.name in changed for piece in pieces[name]):
            continue
        if name in scale_of:
            order = _row_order(module, name, parameter.shape[0], arrange)
            own = of_rows[name.rpartition(".")[0]]
            rows = _quantized_rows(own, checkpoint, pieces[name], parameter.device, order)
            # In its place, which may be that of an offloaded weight; a change may give it another 8-bit dtype.
            place = parameter.data.view(torch.uint8).copy_(rows.values.view(torch.uint8))
            parameter.data = place.view(rows.values.dtype)
            parameters[scale_of[name]].copy_(rows.scales)
            continue
        if name in of_file:
            layer = of_file[name]
            layer.hold(_packed_rows(layer, module, name, checkpoint, pieces[name], dtype, arrange), parameter.device)
            continue
        target = torch.empty_like(parameter)
        _fill(target, name, checkpoint, pieces[name])
        if arrange is not None:
            arrange(module, name, target)
        parameter.copy_(target)


def _quantized_rows(
    layer: EightBitLinear,
    checkpoint: TensorSource,
    pieces: Sequence[Piece],
    device: torch.device,
    order: torch.Tensor | None,
) -> QuantizedRows:
    """Read the weight of an 8-bit layer: rows that are stored as it holds them as they are, the others quantised.
    order: of the rows, None as they come."""
    stored = [() if checkpoint.is_changed(piece.name) else checkpoint.quantized(piece.name) for piece in pieces]
    read = [
        [each.quantized_rows() for each in some_rows(rows, piece.part)] if _fit(rows, layer) else []
        for piece, rows in zip(pieces, stored, strict=True)
    ]
    # One dtype for a whole layer: the file's where all rows have it, else the one that rows are quantised to.
    dtypes = {rows.values.dtype for several in read for rows in several} if all(read) else set()
    wanted = dtypes.pop() if len(dtypes) == 1 else layer.weight_dtype
    parts = []
    for piece, several in zip(pieces, read, strict=True):
        if several and all(rows.values.dtype == wanted for rows in several):
            parts += [QuantizedRows(*(each.to(device) for each in rows)) for rows in several]
            continue
        # From float32, so that a checkpoint with a LoRA is rounded once. Rows are quantised whole, so that a process
        # that keeps some of their columns has the numbers, and the scales, that one process alone has.
        rows_of_all = TensorPart(rows=piece.part.rows)
        target = torch.empty(rows_of_all.shape_of(piece.shape), dtype=torch.float32, device=device)
        checkpoint.copy_into(piece.name, target, rows_of_all)
        quantized = layer.quantize_weight(target)
        if piece.part.columns is not None:
            columns = TensorPart(columns=piece.part.columns)
            values = columns.of(quantized.values.view(torch.uint8)).view(quantized.values.dtype)
            quantized = QuantizedRows(values, quantized.scales)
        parts.append(quantized)
    values = torch.cat([part.values.view(torch.uint8) for part in parts]) if len(parts) > 1 else parts[0].values
    scales = torch.cat([part.scales for part in parts])
    if order is not None:
        values, scales = values.view(torch.uint8)[order.to(device)], scales[order.to(device)]
    return QuantizedRows(values.view(parts[0].values.dtype), scales)


def _fit(rows: Sequence[StoredRows], layer: EightBitLinear) -> bool:
    """Return whether rows are stored as an 8-bit layer holds them."""
    return bool(rows) and all(row.format is not None and row.format.eight_bits == layer.kind for row in rows)


def _stored_layers(module: nn.Module) -> dict[str, StoredLinear]:
    """Return the layers whose weights stay as they are stored, by the name of their weight."""
    return {f"{name}.weight": layer for name, layer in module.named_modules() if isinstance(layer, StoredLinear)}


def _packed_rows(
    layer: StoredLinear,
    module: nn.Module,
    name: str,
    checkpoint: TensorSource,
    pieces: Sequence[Piece],
    dtype: torch.dtype,
    arrange: Arrange | None,
) -> list[PackedRows]:
    """Read the rows of a layer as they are stored; those that a change adds to in the model's dtype, as there is no
    way back."""
    parts: list[PackedRows] = []
    for piece in pieces:
        assert piece.part.is_whole, (
            "weights that stay as they are stored are not shared by processes (models/family.py)"
        )
        if checkpoint.is_changed(piece.name):
            target = torch.empty(piece.shape, dtype=dtype)
            checkpoint.copy_into(piece.name, target)
            parts.append(PackedRows(PlainNumbers(dtype), (target.flatten(1),)))
        else:
            parts += [row.packed() for row in checkpoint.quantized(piece.name)]
    order = _row_order(module, name, layer.out_features, arrange)
    return parts if order is None else _in_order(parts, order)


def _in_order(parts: Sequence[PackedRows], order: torch.Tensor) -> list[PackedRows]:
    """order: of all rows; one that takes no row from one part to another, as parts are whole projections."""
    moved, start = [], 0
    for part in parts:
        stop = start + part.tensors[0].shape[0]
        own = order[start:stop] - start
        assert int(own.min()) >= 0
        assert int(own.max()) < stop - start
        moved.append(part.some(own))
        start = stop
    return moved


def _row_order(module: nn.Module, name: str, num_rows: int, arrange: Arrange | None) -> torch.Tensor | None:
    """Return the order into which `arrange` brings the rows; None where they stay."""
    if arrange is None:
        return None
    order = torch.arange(num_rows)
    arrange(module, name, order)
    return order


def _fill(target: torch.Tensor, name: str, checkpoint: TensorSource, pieces: Sequence[Piece]) -> None:
    _begin_fill(target, name, checkpoint, pieces)()


def _begin_fill(target: torch.Tensor, name: str, checkpoint: TensorSource, pieces: Sequence[Piece]) -> Finish:
    flat, start, parts = target.view(-1), 0, []
    for piece in pieces:
        stop = start + math.prod(piece.read_shape)
        parts.append(checkpoint.begin_copy(piece.name, flat[start:stop].view(piece.read_shape), piece.part))
        start = stop
    assert start == target.numel(), f"{name}: its pieces hold {start} numbers, it has {target.numel()}"

    def finish() -> None:
        for part in parts:
            part()

    return finish


def own_pieces(module: nn.Module) -> dict[str, tuple[Piece, ...]]:
    """Pieces for a module whose names are the checkpoint's."""
    return {name: (Piece(name, tuple(tensor.shape)),) for name, tensor in module.state_dict().items()}


def check_parts(module: nn.Module, checkpoint: Checkpoint, pieces: Mapping[str, tuple[Piece, ...]]) -> None:
    """Raise ModelLoadError where a loaded module has parts that a LoRA file alone gave, such as gates, and no file
    gives now, or lacks those that one gives."""
    scales = quantized_weights(module).values()
    wanted = {piece.name for name in module.state_dict() if name not in scales for piece in pieces[name]}
    lost = [name for name in wanted if name not in checkpoint.shapes]
    if lost:
        raise ModelLoadError(
            f"lora: {len(lost)} weights of the loaded model come from a LoRA file alone, which is not among the files "
            f"now: {listed(sorted(lost))}. Load the model again to run it without that file"
        )
    placeless = sorted(checkpoint.given - wanted)
    if placeless:
        raise ModelLoadError(
            f"lora: {len(placeless)} weights are new to the loaded model: {listed(placeless)}. Give the file when the "
            "model is loaded, by --lora"
        )


def check_names(
    module: nn.Module,
    checkpoint: TensorSource,
    pieces: Mapping[str, tuple[Piece, ...]],
    ignored: Callable[[str], bool] = lambda _: False,
) -> None:
    """Raises what load_weights raises for tensors that are missing, unexpected or of another shape."""
    scales = quantized_weights(module).values()
    expected = [piece for name in module.state_dict() if name not in scales for piece in pieces[name]]
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
        place, whose, advice = (
            (checkpoint.folder, "beside them", "Download the folder again")
            if checkpoint.elsewhere is None
            else (checkpoint.elsewhere, "of the model's folder", "Use weights that were made for this model")
        )
        text = ". ".join([*problems, advice])
        raise ModelLoadError(f"{place}: the weights do not fit config.json {whose}. {text}")
