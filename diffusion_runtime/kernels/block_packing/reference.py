"""The specification of packing into block order, in torch, on any device."""

from __future__ import annotations

import torch

from diffusion_runtime.kernels.block_means.reference import block_means_reference
from diffusion_runtime.kernels.block_packing.tokens import TAIL_ROWS, Averaged, PackedTokens, row_width
from diffusion_runtime.kernels.block_sparse.geometry import BlockGeometry


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
    """As pack_tokens."""
    return PackedTokens(
        _pack(q, q_geometry, num_grid_tokens, text_lengths),
        _pack(k, kv_geometry, num_grid_tokens, text_lengths),
        _pack(v, kv_geometry, num_grid_tokens, text_lengths),
        q_geometry,
        kv_geometry,
        block_means_reference(q, q_geometry) if averaged != "none" else None,
        block_means_reference(k, kv_geometry) if averaged != "none" else None,
        block_means_reference(v, kv_geometry) if averaged == "qkv" else None,
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
