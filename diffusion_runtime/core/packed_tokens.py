"""PackedTokens: q, k and v as rows in the order of their blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from diffusion_runtime.core.block_geometry import BlockGeometry

# Rows after the last head's that a bulk copy may read.
TAIL_ROWS = 128


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
