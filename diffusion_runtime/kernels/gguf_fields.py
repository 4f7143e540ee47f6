"""Fields of GGUF blocks: float16 numbers, and numbers of a few bits, out of [blocks, bytes] of uint8."""

from __future__ import annotations

import torch


def float16_at(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """Read the float16 at byte `start` of every block, as float32 [blocks, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def halves(packed: torch.Tensor) -> torch.Tensor:
    """Unpack the low four bits of all bytes of a row, then the high ones."""
    return torch.cat([packed & 0x0F, packed >> 4], dim=-1)


def bit_fields(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack numbers of `bits`, the lowest of every byte first: uint8 [blocks, bytes] to [blocks, 8 / bits * bytes]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return ((packed[..., None] >> shifts) & (1 << bits) - 1).flatten(1)


def words(packed: torch.Tensor, num_bytes: int) -> torch.Tensor:
    """Read little-endian numbers of 2 or 4 bytes, as int64 [blocks, words]: torch has few unsigned operations."""
    by_word = packed.reshape(packed.shape[0], -1, num_bytes).long()
    shifts = torch.arange(0, 8 * num_bytes, 8, device=packed.device)
    return (by_word << shifts).sum(-1)
