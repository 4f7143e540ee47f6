"""Write the grids of ggml's IQ formats into diffusion_runtime/kernels/gguf_grids.py, as the `gguf` package has them.

    python scripts/write_gguf_grids.py

The grids are part of the file format: which vectors of 4 or 8 magnitudes an index of a block stands for.
"""

from __future__ import annotations

import base64
from pathlib import Path

import numpy
from gguf import quants

TARGET = Path(__file__).parents[1] / "diffusion_runtime" / "kernels" / "gguf_grids.py"
# Names of a grid, and the bits of a number of it in this package's file.
KINDS = {"IQ2_XXS": 2, "IQ2_XS": 2, "IQ2_S": 2, "IQ3_XXS": 4, "IQ3_S": 4, "IQ1_S": 2, "IQ4_NL": 4}
HEAD = '''"""Grids of ggml's IQ formats: which vectors of magnitudes the indices of a block stand for.

Facts of the file format, written by scripts/write_gguf_grids.py. A grid is packed: `bits` per number, the first
number of a vector in the lowest bits, and counts which of `levels` it is.
"""

from __future__ import annotations

import base64
import functools
from typing import NamedTuple

import torch


class _Grid(NamedTuple):
    levels: tuple[int, ...]
    width: int
    bits: int
    packed: str


def grid_of(kind: str, device: torch.device) -> torch.Tensor:
    """Return the vectors of a format, float32 [vectors, numbers of each], on a device. Of at most 64 KiB, copied per
    call; from pinned memory, which a CUDA graph may read as it is captured."""
    is_pinned = device.type == "cuda"
    return _grid(kind, is_pinned).to(device, non_blocking=is_pinned)


@functools.cache
def _grid(kind: str, is_pinned: bool) -> torch.Tensor:
    levels, width, bits, packed = _GRIDS[kind]
    data = torch.frombuffer(bytearray(base64.b85decode(packed)), dtype=torch.uint8)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device="cpu")
    indices = ((data[:, None] >> shifts) & (2**bits - 1)).view(-1, width)
    grid = torch.tensor(levels, dtype=torch.float32, device="cpu")[indices.long()]
    return grid.pin_memory() if is_pinned else grid


_GRIDS = {
'''


def levels_and_indices(kind: str) -> tuple[list[int], numpy.ndarray]:
    """The magnitudes of a grid, and which of them each number is, [vectors, numbers of each]."""
    made = getattr(quants, kind)
    if hasattr(made, "kvalues"):
        # One number for each index.
        return list(made.kvalues), numpy.arange(len(made.kvalues), dtype=numpy.uint8).reshape(-1, 1)
    made.init_grid()
    levels = list(made.grid_map)
    return levels, numpy.searchsorted(levels, made.grid.reshape(made.grid_shape)).astype(numpy.uint8)


def main() -> None:
    text = HEAD
    for kind, bits in KINDS.items():
        levels, indices = levels_and_indices(kind)
        by_byte = indices.reshape(-1, 8 // bits)
        shifts = numpy.arange(0, 8, bits, dtype=numpy.uint8)
        packed = numpy.bitwise_or.reduce(by_byte << shifts, axis=1).astype(numpy.uint8)
        code = base64.b85encode(packed.tobytes()).decode()
        lines = [code[start : start + 108] for start in range(0, len(code), 108)]
        text += f'    "{kind}": _Grid(\n        {tuple(levels)},\n        {indices.shape[1]},\n        {bits},\n'
        text += "".join(f'        "{line}"\n' for line in lines[:-1]) + f'        "{lines[-1]}",\n    ),\n'
    TARGET.write_text(text + "}\n")


if __name__ == "__main__":
    main()
