"""Kernel: dequantises blocks of GGUF files (ggml's formats Q4_0 to Q8_0, Q4_K to Q6_K) with torch, on any device.

A block of 32 numbers has a float16 scale, and an offset in the formats that end in 1. A block of 256 (the K formats)
has one of either for eight or sixteen parts, whose own scales are 6 or 8 bits. Products and sums are rounded one after
the other in float32, as ggml's reference does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

# Bits of a K format's packed scales, and what is left above them.
_LOW_6, _LOW_4 = 0x3F, 0x0F


def dequantize_blocks(data: torch.Tensor, kind: str) -> torch.Tensor:
    """float32 [rows, numbers per row] of uint8 [rows, bytes per row], whole blocks. kind: a name of `KINDS`."""
    if kind in PLAIN_KINDS:
        return data.contiguous().view(PLAIN_KINDS[kind]).float()
    numbers_of, num_bytes, _ = _BLOCKS[kind]
    return numbers_of(data.reshape(-1, num_bytes)).reshape(data.shape[0], -1)


def block_scales(data: torch.Tensor, kind: str) -> torch.Tensor:
    """float32: the scales and offsets of all blocks. Where they are finite, so are the numbers. kind: of blocks."""
    _, num_bytes, starts = _BLOCKS[kind]
    blocks = data.reshape(-1, num_bytes)
    return torch.cat([_float16(blocks, start) for start in starts], dim=-1)


def _float16(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The float16 at byte `start` of every block, as float32 [blocks, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _halves(packed: torch.Tensor) -> torch.Tensor:
    """The low four bits of all bytes of a row, then the high ones."""
    return torch.cat([packed & _LOW_4, packed >> 4], dim=-1)


def _bits(packed: torch.Tensor) -> torch.Tensor:
    """The bits of [blocks, bytes], lowest first: [blocks, 8 * bytes]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed[..., None] >> shifts) & 1).flatten(1)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _float16(blocks, 0) * (_halves(blocks[:, 2:]).to(torch.int8) - 8).float()


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _float16(blocks, 0) * _halves(blocks[:, 4:]).float() + _float16(blocks, 2)


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    numbers = _halves(blocks[:, 6:]) | (_bits(blocks[:, 2:6]) << 4)
    return _float16(blocks, 0) * (numbers.to(torch.int8) - 16).float()


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    numbers = _halves(blocks[:, 8:]) | (_bits(blocks[:, 4:8]) << 4)
    return _float16(blocks, 0) * numbers.float() + _float16(blocks, 2)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return _float16(blocks, 0) * blocks[:, 2:].contiguous().view(torch.int8).float()


def _k_scales(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and offsets, 6 bits each, of the eight parts of a block: uint8 [blocks, 12] to two of [blocks, 8]."""
    first, second, mixed = packed.view(-1, 3, 4).unbind(1)
    scales = torch.cat([first & _LOW_6, (mixed & _LOW_4) | ((first >> 2) & 0x30)], dim=-1)
    offsets = torch.cat([second & _LOW_6, (mixed >> 4) | ((second >> 2) & 0x30)], dim=-1)
    return scales, offsets


def _k_numbers(blocks: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """numbers: [blocks, 8, 32], of parts with the scales and offsets at the start of the block."""
    scales, offsets = _k_scales(blocks[:, 4:16].contiguous())
    scale = (_float16(blocks, 0) * scales.float())[..., None]
    offset = (_float16(blocks, 2) * offsets.float())[..., None]
    return scale * numbers.float() - offset


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    return _k_numbers(blocks, _halves(blocks[:, 16:].view(-1, 4, 32)).view(-1, 8, 32))


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device).view(1, 8, 1)
    high = (blocks[:, None, 16:48] >> shifts) & 1
    low = _halves(blocks[:, 48:].view(-1, 4, 32)).view(-1, 8, 32)
    return _k_numbers(blocks, low | (high << 4))


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    low = _halves(blocks[:, :128].view(-1, 2, 64)).view(-1, 2, 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device).view(1, 1, 4, 1)
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    numbers = ((low | (high << 4)).to(torch.int8) - 32).view(-1, 16, 16)
    scales = _float16(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    return scales[..., None] * numbers.float()


PLAIN_KINDS: Mapping[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# By format: blocks [blocks, bytes] to numbers, the bytes of a block, and where its float16 numbers stand.
_BLOCKS: Mapping[str, tuple[Callable[[torch.Tensor], torch.Tensor], int, tuple[int, ...]]] = {
    "Q4_0": (_q4_0, 18, (0,)),
    "Q4_1": (_q4_1, 20, (0, 2)),
    "Q5_0": (_q5_0, 22, (0,)),
    "Q5_1": (_q5_1, 24, (0, 2)),
    "Q8_0": (_q8_0, 34, (0,)),
    "Q4_K": (_q4_k, 144, (0, 2)),
    "Q5_K": (_q5_k, 176, (0, 2)),
    "Q6_K": (_q6_k, 210, (208,)),
}
KINDS = (*PLAIN_KINDS, *_BLOCKS)
