"""Packing into block order: checks, and the choice of the implementation."""

from __future__ import annotations

import torch

from diffusion_runtime.errors import ConfigError
from diffusion_runtime.kernels.block_packing import triton
from diffusion_runtime.kernels.block_packing.reference import Averaged, PackedTokens, pack_tokens_reference
from diffusion_runtime.kernels.block_sparse.geometry import BlockGeometry


def pack_tokens(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_geometry: BlockGeometry,
    kv_geometry: BlockGeometry,
    *,
    num_grid_tokens: int,
    text_lengths: torch.Tensor | None = None,
    averaged: Averaged = "none",
) -> PackedTokens:
    """q, k and v as rows in the order of their blocks, and the means of the blocks from the same pass.

    q: [B, seq, H, head_dim]; k, v: [B, seq, kv_heads, head_dim]; the geometries are shared by all heads or have one row
    per head. text_lengths: int32 [B], how many text tokens are valid; None for all. averaged: which of the tensors get
    block means, summed in float32. Deterministic, and without a device synchronisation.

    Raises ConfigError when the tensors do not fit the geometries.
    """
    for name, x, geometry in (("q", q, q_geometry), ("k", k, kv_geometry), ("v", v, kv_geometry)):
        groups = x.shape[0] * x.shape[2]
        if x.shape[1] != geometry.num_tokens or geometry.num_groups not in (1, groups) or x.dtype != q.dtype:
            raise ConfigError(
                f"packing: expected {name} [batch, {geometry.num_tokens}, heads, head_dim] of {q.dtype} with batch * "
                f"heads {'of any number' if geometry.num_groups == 1 else geometry.num_groups}, got {tuple(x.shape)} "
                f"of {x.dtype}"
            )
    if k.shape != v.shape or q.shape[::3] != k.shape[::3]:
        raise ConfigError(
            f"packing: expected k and v of one shape, with q's batch and head_dim, got q {tuple(q.shape)}, "
            f"k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    pack = pack_tokens_reference if triton.refusal(q) is not None else triton.pack_tokens_triton
    return pack(
        q,
        k,
        v,
        q_geometry,
        kv_geometry,
        num_grid_tokens=num_grid_tokens,
        text_lengths=text_lengths,
        averaged=averaged,
    )
