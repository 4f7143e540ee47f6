"""PackedTokens: the result of packing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from diffusion_runtime.kernels.block_sparse.geometry import BlockGeometry

# Rows after the last head's that a bulk copy may read.
TAIL_ROWS = 128

Averaged = Literal["none", "qk", "qkv"]


@dataclass(frozen=True)
class PackedTokens:
    """Tokens of every head in the order of its blocks. B batch, N tokens, W the width of row_width(head_dim).

    q: [B * H * N + TAIL_ROWS, W]; k, v: [B * kv_heads * N + TAIL_ROWS, W], in the inputs' dtype. Row
        (b * H + h) * N + p is the token at position p of the geometry's order. Columns past head_dim, rows of padded
        text and the last TAIL_ROWS rows are 0, because copies read them with weight 0.
    q_geometry, kv_geometry: the orders; a plan accepts only rows that were packed in its own geometries.
    q_means, k_means, v_means: float32 [B, heads, blocks, head_dim], as `block_means` gives; None where not asked for.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_geometry: BlockGeometry
    kv_geometry: BlockGeometry
    q_means: torch.Tensor | None = None
    k_means: torch.Tensor | None = None
    v_means: torch.Tensor | None = None


def row_width(head_dim: int) -> int:
    """Columns of a packed row: a power of two, and at least the smallest that a matrix unit accepts."""
    return max(16, 1 << (head_dim - 1).bit_length())
