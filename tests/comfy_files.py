"""Weights in the formats that ComfyUI's files mark (`comfy_quant`), by numpy, and the numbers that they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch

Tensors = dict[str, torch.Tensor]
Numbers = numpy.ndarray[Any, Any]
E2M1 = numpy.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


@dataclass(frozen=True)
class Stored:
    """tensors: by suffix, `weight` among them; mark: of the layer; meant: float64 numbers, [rows, columns]."""

    tensors: Tensors
    mark: dict[str, Any]
    meant: Numbers


def hadamard(size: int) -> Numbers:
    of_four = numpy.array([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], dtype=numpy.float64)
    matrix: Numbers = numpy.ones((1, 1))
    while len(matrix) < size:
        matrix = numpy.kron(matrix, of_four)
    normalised: Numbers = matrix / numpy.sqrt(size)
    return normalised


def rotated(numbers: Numbers, group: int) -> Numbers:
    groups = numbers.reshape(len(numbers), -1, group) if group else numbers
    return (groups @ hadamard(group)).reshape(numbers.shape) if group else numbers


def int8(numbers: Numbers, group: int = 0, *, by_row: bool = True) -> Stored:
    turned = rotated(numbers, group)
    scale = numpy.abs(turned).max(axis=1 if by_row else None, keepdims=True).astype(numpy.float32) / numpy.float32(127)
    codes = numpy.rint(turned / scale).clip(-127, 127)
    mark = {"format": "int8_tensorwise", **({"convrot": True, "convrot_groupsize": group} if group else {})}
    stored_scale = torch.from_numpy(scale) if by_row else torch.tensor(float(scale[0, 0]))
    tensors = {"weight": torch.from_numpy(codes.astype(numpy.int8)), "weight_scale": stored_scale}
    return Stored(tensors, mark, rotated(codes * scale.astype(numpy.float64), group))


def int4_codes(numbers: Numbers) -> tuple[Numbers, torch.Tensor]:
    """Whole numbers from -7 to 7 of each row, and packed, the first of two in the lower half."""
    codes = numpy.rint(numbers).clip(-7, 7).astype(numpy.int64)
    packed = (codes[:, 0::2] & 15) | ((codes[:, 1::2] & 15) << 4)
    return codes, torch.from_numpy(packed.astype(numpy.uint8)).view(torch.int8)


def convrot_w4a4(numbers: Numbers, group: int = 16) -> Stored:
    turned = rotated(numbers, group)
    scale = (numpy.abs(turned).max(axis=1, keepdims=True) / 7).astype(numpy.float32)
    codes, packed = int4_codes(turned / scale)
    tensors = {"weight": packed, "weight_scale": torch.from_numpy(scale[:, 0].copy())}
    meant = rotated(codes * scale.astype(numpy.float64), group)
    return Stored(tensors, {"format": "convrot_w4a4", "convrot_groupsize": group}, meant)


def tiled(scales: Numbers, dtype: torch.dtype) -> torch.Tensor:
    """Scales of blocks, bytes [rows, blocks], in cuBLAS's tiles: byte by byte, from its documentation."""
    rows, columns = scales.shape
    wide = -(-columns // 4) * 4
    flat = numpy.zeros(-(-rows // 128) * 128 * wide, dtype=numpy.uint8)
    for row in range(rows):
        for column in range(columns):
            tile = (row // 128) * (wide // 4) + column // 4
            flat[tile * 512 + (row % 32) * 16 + (row % 128 // 32) * 4 + column % 4] = scales[row, column]
    return torch.from_numpy(flat.reshape(-1, wide)).view(dtype)


def nvfp4(numbers: Numbers) -> Stored:
    blocks = numbers.reshape(len(numbers), -1, 16)
    of_tensor = numpy.float32(numpy.abs(numbers).max() / (448 * 6))
    scales = torch.from_numpy(numpy.abs(blocks).max(axis=2) / 6 / of_tensor).to(torch.float8_e4m3fn)
    factor = scales.double().numpy()[..., None] * numpy.float64(of_tensor)
    wanted = numpy.divide(blocks, factor, out=numpy.zeros_like(blocks), where=factor > 0)
    codes = numpy.abs(numpy.abs(wanted)[..., None] - E2M1).argmin(axis=-1)
    codes = numpy.where(wanted < 0, codes + 8, codes)
    meant = (numpy.concatenate([E2M1, -E2M1])[codes] * factor).reshape(numbers.shape)
    flat = codes.reshape(numbers.shape)
    packed = torch.from_numpy(((flat[:, 0::2] << 4) | flat[:, 1::2]).astype(numpy.uint8))
    of_blocks = tiled(scales.view(torch.uint8).numpy(), torch.float8_e4m3fn)
    tensors = {"weight": packed, "weight_scale": of_blocks, "weight_scale_2": torch.tensor(float(of_tensor))}
    return Stored(tensors, {"format": "nvfp4"}, meant)


def mxfp8(numbers: Numbers) -> Stored:
    blocks = numbers.reshape(len(numbers), -1, 32)
    exponents = numpy.ceil(numpy.log2(numpy.abs(blocks).max(axis=2) / 448)).clip(-127, 127)
    factor = numpy.exp2(exponents)[..., None]
    values = torch.from_numpy(blocks / factor).to(torch.float8_e4m3fn)
    meant = (values.double().numpy() * factor).reshape(numbers.shape)
    of_blocks = tiled((exponents + 127).astype(numpy.uint8), torch.uint8)
    return Stored({"weight": values.view(numbers.shape), "weight_scale": of_blocks}, {"format": "mxfp8"}, meant)


def svdquant_w4a4(numbers: Numbers, rank: int = 8) -> Stored:
    random = numpy.random.default_rng(3)
    rows, columns = numbers.shape
    smooth = as_bfloat16(random.uniform(0.5, 2, columns))
    up, down = (as_bfloat16(random.normal(0, 0.1, (size, rank))) for size in (rows, columns))
    rest = ((numbers - up @ down.T) * smooth).reshape(rows, -1, 64)
    scales = as_bfloat16(numpy.abs(rest).max(axis=2) / 7)
    codes, packed = int4_codes((rest / scales[..., None]).reshape(numbers.shape))
    meant = (codes.reshape(rest.shape) * scales[..., None]).reshape(numbers.shape) / smooth + up @ down.T
    tensors = {
        "weight": packed,
        "weight_scale": bfloat16(scales.T),
        "weight_smooth_factor": bfloat16(smooth),
        "weight_proj_up": bfloat16(up),
        "weight_proj_down": bfloat16(down),
    }
    return Stored(tensors, {"format": "svdquant_w4a4"}, meant)


def awq_w4a16(numbers: Numbers) -> Stored:
    groups = numbers.reshape(len(numbers), -1, 64)
    smallest, largest = groups.min(axis=2), groups.max(axis=2)
    scales = as_bfloat16((largest - smallest) / 15)
    offsets = as_bfloat16(smallest + 8 * scales)
    codes = numpy.rint((groups - offsets[..., None]) / scales[..., None] + 8).clip(0, 15)
    meant = ((codes - 8) * scales[..., None] + offsets[..., None]).reshape(numbers.shape)
    flat = codes.reshape(numbers.shape).astype(numpy.uint8)
    packed = torch.from_numpy(flat[:, 0::2] | (flat[:, 1::2] << 4)).view(torch.int8)
    tensors = {"weight": packed, "weight_scale": bfloat16(scales.T), "weight_zeros": bfloat16(offsets.T)}
    return Stored(tensors, {"format": "awq_w4a16"}, meant)


def as_bfloat16(numbers: Numbers) -> Numbers:
    return torch.from_numpy(numbers).bfloat16().double().numpy()


def bfloat16(numbers: Numbers) -> torch.Tensor:
    return torch.from_numpy(numpy.ascontiguousarray(numbers)).bfloat16()


Writer = Callable[[Numbers], Stored]
WRITERS: Mapping[str, Writer] = {
    "int8, a scale per tensor": lambda numbers: int8(numbers, by_row=False),
    "int8, a scale per row": int8,
    "int8 ConvRot 16": lambda numbers: int8(numbers, 16),
    "int8 ConvRot 64": lambda numbers: int8(numbers, 64),
    "int8 ConvRot 256": lambda numbers: int8(numbers, 256),
    "int8 ConvRot 16, a scale per tensor": lambda numbers: int8(numbers, 16, by_row=False),
    "nvfp4": nvfp4,
    "mxfp8": mxfp8,
    "convrot_w4a4": convrot_w4a4,
    "svdquant_w4a4": svdquant_w4a4,
    "awq_w4a16": awq_w4a16,
}


def mark_of(settings: Mapping[str, Any]) -> torch.Tensor:
    return torch.tensor(list(json.dumps(settings).encode()), dtype=torch.uint8)


def quantised(
    tensors: Mapping[str, torch.Tensor], write: Writer, takes: Callable[[str], bool]
) -> tuple[Tensors, Tensors]:
    """(a file's tensors, the float32 numbers they stand for). takes: names of weights that are quantised; the others
    are bfloat16."""
    stored: Tensors = {}
    meant: Tensors = {}
    for name, tensor in tensors.items():
        if not takes(name):
            stored[name] = tensor.bfloat16()
            meant[name] = stored[name].float()
            continue
        made, layer = write(tensor.double().numpy()), name.removesuffix(".weight")
        stored |= {f"{layer}.{suffix}": each.contiguous() for suffix, each in made.tensors.items()}
        stored[f"{layer}.comfy_quant"] = mark_of(made.mark)
        meant[name] = torch.from_numpy(made.meant).float()
    return stored, meant
