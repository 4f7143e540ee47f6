"""Kernel: dequantises blocks of GGUF files (ggml's Q4_0 to Q8_0, Q2_K to Q6_K and IQ formats) by torch, on any device.

A block of 32 numbers has a float16 scale, and an offset in the formats that end in 1. A block of 256 (the K formats)
has one of either for eight or sixteen parts, whose own scales are 4, 6 or 8 bits. The IQ formats are in gguf_iq.py.
Products and sums are rounded one after the other in float32, as ggml's reference does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from diffusion_runtime.kernels import gguf_iq
from diffusion_runtime.kernels.gguf_fields import bit_fields, float16_at, halves

# Bits of a K format's packed scales, and what is left above them.
_LOW_6, _LOW_4 = 0x3F, 0x0F


def dequantize_blocks(data: torch.Tensor, kind: str) -> torch.Tensor:
    """float32 [rows, numbers per row] of uint8 [rows, bytes per row], whole blocks. kind: a name of `KINDS`."""
    if kind in PLAIN_KINDS:
        return data.contiguous().view(PLAIN_KINDS[kind]).float()
    block = _BLOCKS[kind]
    return block.numbers(data.reshape(-1, block.num_bytes)).reshape(data.shape[0], -1)


def block_scales(data: torch.Tensor, kind: str) -> torch.Tensor:
    """float32: the scales and offsets of all blocks. Where they are finite, so are the numbers. kind: of blocks."""
    block = _BLOCKS[kind]
    return block.scales(data.reshape(-1, block.num_bytes))


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return float16_at(blocks, 0) * (halves(blocks[:, 2:]).to(torch.int8) - 8).float()


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return float16_at(blocks, 0) * halves(blocks[:, 4:]).float() + float16_at(blocks, 2)


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    numbers = halves(blocks[:, 6:]) | (bit_fields(blocks[:, 2:6], 1) << 4)
    return float16_at(blocks, 0) * (numbers.to(torch.int8) - 16).float()


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    numbers = halves(blocks[:, 8:]) | (bit_fields(blocks[:, 4:8], 1) << 4)
    return float16_at(blocks, 0) * numbers.float() + float16_at(blocks, 2)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return float16_at(blocks, 0) * blocks[:, 2:].contiguous().view(torch.int8).float()


def _k_scales(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and offsets, 6 bits each, of the eight parts of a block: uint8 [blocks, 12] to two of [blocks, 8]."""
    first, second, mixed = packed.view(-1, 3, 4).unbind(1)
    scales = torch.cat([first & _LOW_6, (mixed & _LOW_4) | ((first >> 2) & 0x30)], dim=-1)
    offsets = torch.cat([second & _LOW_6, (mixed >> 4) | ((second >> 2) & 0x30)], dim=-1)
    return scales, offsets


def _k_numbers(blocks: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """numbers: [blocks, 8, 32], of parts with the scales and offsets at the start of the block."""
    scales, offsets = _k_scales(blocks[:, 4:16].contiguous())
    scale = (float16_at(blocks, 0) * scales.float())[..., None]
    offset = (float16_at(blocks, 2) * offsets.float())[..., None]
    return scale * numbers.float() - offset


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    scale = (float16_at(blocks, 80) * (blocks[:, :16] & _LOW_4).float())[..., None]
    offset = (float16_at(blocks, 82) * (blocks[:, :16] >> 4).float())[..., None]
    return scale * _pairs_of_bits(blocks[:, 16:80]).view(-1, 16, 16).float() - offset


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    low = _pairs_of_bits(blocks[:, 32:96]).view(-1, 16, 16)
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device).view(1, 8, 1)
    # A bit that is set adds nothing: without it a number is 4 less.
    high = ((blocks[:, None, :32] >> shifts) & 1).view(-1, 16, 16)
    numbers = (low | (high << 2)).to(torch.int8) - 4
    upper = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device).view(1, 4, 1)
    packed = blocks[:, 96:108]
    scales = halves(packed[:, :8]) | (((packed[:, None, 8:] >> upper) & 3) << 4).flatten(1)
    scale = float16_at(blocks, 108) * (scales.to(torch.int8) - 32).float()
    return scale[..., None] * numbers.float()


def _pairs_of_bits(packed: torch.Tensor) -> torch.Tensor:
    """Unpack 2 bits each, of 32 bytes all lowest pairs, then all second ones: [blocks, 64] to [blocks, 2, 4, 32]."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=packed.device).view(1, 1, 4, 1)
    return (packed.reshape(-1, 2, 1, 32) >> shifts) & 3


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    return _k_numbers(blocks, halves(blocks[:, 16:].view(-1, 4, 32)).view(-1, 8, 32))


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device).view(1, 8, 1)
    high = (blocks[:, None, 16:48] >> shifts) & 1
    low = halves(blocks[:, 48:].view(-1, 4, 32)).view(-1, 8, 32)
    return _k_numbers(blocks, low | (high << 4))


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    low = halves(blocks[:, :128].view(-1, 2, 64)).view(-1, 2, 4, 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device).view(1, 1, 4, 1)
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    numbers = ((low | (high << 4)).to(torch.int8) - 32).view(-1, 16, 16)
    scales = float16_at(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    return scales[..., None] * numbers.float()


PLAIN_KINDS: Mapping[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class _Block(NamedTuple):
    """A format: its blocks [blocks, bytes] to numbers, the bytes of a block, and the float16 scales of its blocks."""

    numbers: Callable[[torch.Tensor], torch.Tensor]
    num_bytes: int
    scales: Callable[[torch.Tensor], torch.Tensor]


def _scales_at(*starts: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda blocks: torch.cat([float16_at(blocks, start) for start in starts], dim=-1)


_BLOCKS: Mapping[str, _Block] = {
    "Q4_0": _Block(_q4_0, 18, _scales_at(0)),
    "Q4_1": _Block(_q4_1, 20, _scales_at(0, 2)),
    "Q5_0": _Block(_q5_0, 22, _scales_at(0)),
    "Q5_1": _Block(_q5_1, 24, _scales_at(0, 2)),
    "Q8_0": _Block(_q8_0, 34, _scales_at(0)),
    "Q2_K": _Block(_q2_k, 84, _scales_at(80, 82)),
    "Q3_K": _Block(_q3_k, 110, _scales_at(108)),
    "Q4_K": _Block(_q4_k, 144, _scales_at(0, 2)),
    "Q5_K": _Block(_q5_k, 176, _scales_at(0, 2)),
    "Q6_K": _Block(_q6_k, 210, _scales_at(208)),
    "IQ1_S": _Block(gguf_iq.iq1_s, 50, _scales_at(0)),
    "IQ1_M": _Block(gguf_iq.iq1_m, 56, gguf_iq.iq1_m_scales),
    "IQ2_XXS": _Block(gguf_iq.iq2_xxs, 66, _scales_at(0)),
    "IQ2_XS": _Block(gguf_iq.iq2_xs, 74, _scales_at(0)),
    "IQ2_S": _Block(gguf_iq.iq2_s, 82, _scales_at(0)),
    "IQ3_XXS": _Block(gguf_iq.iq3_xxs, 98, _scales_at(0)),
    "IQ3_S": _Block(gguf_iq.iq3_s, 110, _scales_at(0)),
    "IQ4_NL": _Block(gguf_iq.iq4_nl, 18, _scales_at(0)),
    "IQ4_XS": _Block(gguf_iq.iq4_xs, 136, _scales_at(0)),
}
KINDS = (*PLAIN_KINDS, *_BLOCKS)
