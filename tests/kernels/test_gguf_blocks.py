"""Dequantised GGUF blocks are those of the format's own package, bit for bit."""

from __future__ import annotations

import numpy
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from tables import table

from diffusion_runtime.kernels.gguf_blocks import KINDS, dequantize_blocks
from diffusion_runtime.untrusted.gguf_header import TYPES


@table("kind", KINDS)
def test_every_bit_pattern_gives_the_numbers_of_gguf(kind: str) -> None:
    """Random bytes, less the float16 scales that would be infinite or NaN."""
    number = GGMLQuantizationType[kind]
    block, num_bytes = GGML_QUANT_SIZES[number]
    assert TYPES[int(number)] == (kind, block, num_bytes)
    data = numpy.random.default_rng(0).integers(0, 256, (5, 7 * num_bytes), dtype=numpy.uint8)
    expected = dequantize(data, number)
    assert expected.shape == (5, 7 * block)
    found = dequantize_blocks(torch.from_numpy(data), kind).numpy()
    is_number = numpy.isfinite(expected)
    assert is_number.mean() > 0.5
    assert numpy.array_equal(found[is_number], expected[is_number])
    assert numpy.array_equal(numpy.isnan(found), numpy.isnan(expected))
