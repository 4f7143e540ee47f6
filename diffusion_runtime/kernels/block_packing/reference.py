"""The specification of packing into block order, in torch, on any device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from diffusion_runtime.kernels.block_means import block_means_reference
from diffusion_runtime.kernels.block_sparse.geometry import BlockGeometry

# Rows after the last head's that a bulk copy may read.
TAIL_ROWS = 128

# The tensors whose block means are computed, by their names.
Averaged = Literal["none", "k", "qk", "qkv"]


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

    def in_sequence(self, batch: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v without what surrounds them, [B, N, heads, head_dim]: tokens in the geometries' order."""
        q, k, v = (
            rows[:-TAIL_ROWS].view(batch, -1, geometry.num_tokens, rows.shape[1])[..., :head_dim].transpose(1, 2)
            for rows, geometry in ((self.q, self.q_geometry), (self.k, self.kv_geometry), (self.v, self.kv_geometry))
        )
        return q, k, v


class TokenBlocks(NamedTuple):
    """The blocks that a sparse layer's next call reads, where its tokens are in their order already; arguments of
    pack_tokens.

    geometry: of q and of k and v, `is_identity`; num_grid_tokens, text_lengths: as there; averaged: which parts' block
    means are read.
    """

    geometry: BlockGeometry
    num_grid_tokens: int
    text_lengths: torch.Tensor | None
    averaged: Averaged


def row_width(head_dim: int) -> int:
    """Columns of a packed row: a power of two, and at least the smallest that a matrix unit accepts."""
    return max(16, 1 << (head_dim - 1).bit_length())


def pack_tokens_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_geometry: BlockGeometry,
    kv_geometry: BlockGeometry,
    *,
    num_grid_tokens: int,
    text_lengths: torch.Tensor | None,
    averaged: Averaged,
) -> PackedTokens:
    """Implement pack_tokens in torch."""
    return PackedTokens(
        _pack(q, q_geometry, num_grid_tokens, text_lengths),
        _pack(k, kv_geometry, num_grid_tokens, text_lengths),
        _pack(v, kv_geometry, num_grid_tokens, text_lengths),
        q_geometry,
        kv_geometry,
        block_means_reference(q, q_geometry) if "q" in averaged else None,
        block_means_reference(k, kv_geometry) if "k" in averaged else None,
        block_means_reference(v, kv_geometry) if "v" in averaged else None,
    )


def _pack(
    x: torch.Tensor, geometry: BlockGeometry, num_grid_tokens: int, text_lengths: torch.Tensor | None
) -> torch.Tensor:
    """x: [B, N, heads, head_dim]. Returns [B * heads * N + TAIL_ROWS, W]."""
    batch, num_tokens, num_heads, head_dim = x.shape
    rows = x.transpose(1, 2).reshape(batch * num_heads, num_tokens, head_dim)
    rows = rows.gather(1, geometry.order.long().expand(len(rows), -1)[..., None].expand_as(rows))
    if text_lengths is not None:
        positions = torch.arange(num_tokens, device=x.device)
        padded = positions >= num_grid_tokens + text_lengths.repeat_interleave(num_heads)[:, None]
        rows = rows.masked_fill(padded[..., None], 0.0)
    return torch.nn.functional.pad(rows.flatten(0, 1), (0, row_width(head_dim) - head_dim, 0, TAIL_ROWS))
