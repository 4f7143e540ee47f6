"""Dequantised GGUF blocks are those of the format's own package, bit for bit."""

from __future__ import annotations

import numpy
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from gguf.quants import dequantize
from tables import table

from diffusion_runtime.kernels.gguf_blocks import KINDS, PLAIN_KINDS, block_scales, dequantize_blocks
from diffusion_runtime.kernels.gguf_grids import grid_of
from diffusion_runtime.untrusted.gguf_header import TYPES


@table("kind", KINDS)
def test_every_bit_pattern_gives_the_numbers_of_gguf(kind: str) -> None:
    """Random bytes, less the float16 scales that would be infinite or NaN."""
    number = GGMLQuantizationType[kind]
    block, num_bytes = GGML_QUANT_SIZES[number]
    assert TYPES[int(number)] == (kind, block, num_bytes)
    data = numpy.random.default_rng(0).integers(0, 256, (5, 7 * num_bytes), dtype=numpy.uint8)
    with numpy.errstate(invalid="ignore", over="ignore"):
        expected = dequantize(data, number)
    assert expected.shape == (5, 7 * block)
    found = dequantize_blocks(torch.from_numpy(data), kind).numpy()
    is_number = numpy.isfinite(expected)
    assert is_number.mean() > 0.5
    assert numpy.array_equal(found[is_number], expected[is_number])
    assert numpy.array_equal(numpy.isnan(found), numpy.isnan(expected))
    if kind not in PLAIN_KINDS:
        # A file is judged by its scales alone (StoredRows.blocks).
        scales = block_scales(torch.from_numpy(data), kind).isfinite().view(35, -1).all(dim=1).numpy()
        assert numpy.array_equal(scales, is_number.reshape(35, -1).all(axis=1))


def test_every_type_that_gguf_knows_is_read_but_those_of_language_models() -> None:
    """MXFP4, NVFP4 and the ternary types are of language models; the others are no types of files."""
    others = {"Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4", "Q1_0"}
    assert {kind.name for kind in GGMLQuantizationType} - set(KINDS) <= others
    assert {name for name, _, _ in TYPES.values()} == set(KINDS)


def test_the_grids_are_those_of_gguf() -> None:
    for kind in ("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"):
        made = getattr(quants, kind)
        made.init_grid()
        expected = made.grid.reshape(made.grid_shape)
        found = grid_of(kind, torch.device("cpu")).numpy()
        assert numpy.array_equal(found, expected), f"{kind}: python scripts/write_gguf_grids.py"
