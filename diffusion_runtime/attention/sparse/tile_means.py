"""Means of tiles, by which methods choose among them, from the pass that packs the kernel's rows where there is one."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from diffusion_runtime.attention.backends.interface import AttentionCall
from diffusion_runtime.attention.sparse.interface import plan_of_call
from diffusion_runtime.attention.sparse.tiles import text_lengths_of
from diffusion_runtime.core.block_geometry import BlockGeometry
from diffusion_runtime.core.packed_tokens import PackedTokens
from diffusion_runtime.kernels.block_means import block_means
from diffusion_runtime.kernels.block_packing import Averaged, pack_tokens
from diffusion_runtime.kernels.block_sparse.api import reads_packed_rows
from diffusion_runtime.kernels.block_sparse.plan import SparsePlan
from diffusion_runtime.kernels.block_sparse.pooled_tail import BlockMeans


@dataclass(frozen=True)
class TileMeans:
    """float32 [B, heads, N, head_dim]; v: None where the selection alone is wanted."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor | None

    @property
    def of_keys(self) -> BlockMeans | None:
        """Return the means that a pooled tail reads; None without values."""
        return None if self.v is None else BlockMeans(self.k, self.v)


def tile_means(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, geometry: BlockGeometry) -> TileMeans:
    """q: [B, seq, H, head_dim]; k, v: [B, seq, kv_heads, head_dim]; geometry: the tiles, shared by all heads."""
    v_means = None if v is None else block_means(v, geometry)
    return TileMeans(block_means(q, geometry), block_means(k, geometry), v_means)


def read_tiles(
    call: AttentionCall, geometry: BlockGeometry, averaged: Averaged
) -> tuple[TileMeans, PackedTokens | None]:
    """Return the means of a call's tiles and, from the same pass, the kernel's rows where it reads any. averaged: `qk`,
    or `qkv` for those of values too."""
    packed = call.packed if call.packed is not None and call.packed.q_geometry is geometry else None
    num_grid_tokens, pools = call.grid_layout.num_grid_tokens, call.options.tail == "pooled"
    if packed is None and not reads_packed_rows(call.q, call.k, call.v, geometry, geometry, num_grid_tokens, pools):
        return tile_means(call.q, call.k, call.v if averaged == "qkv" else None, geometry), None
    if packed is None:
        packed = pack_tokens(
            call.q,
            call.k,
            call.v,
            geometry,
            geometry,
            num_grid_tokens=num_grid_tokens,
            text_lengths=text_lengths_of(call),
            averaged=averaged,
        )
    assert packed.q_means is not None
    assert packed.k_means is not None
    return TileMeans(packed.q_means, packed.k_means, packed.v_means), packed


def num_kept_tiles(sparsity: float, num_tiles: int) -> int:
    """Return how many key tiles a query tile keeps: the share 1 - sparsity, rounded up, at least one."""
    # (1 - 0.7) * 10 is a little more than 3 in floating point, and must not become 4.
    return min(max(math.ceil((1.0 - sparsity) * num_tiles - 1e-6), 1), num_tiles)


def plan_of_lists(
    method: str, call: AttentionCall, geometry: BlockGeometry, kept: torch.Tensor, *, is_dense: bool
) -> SparsePlan:
    """Return the plan whose tiles of queries list equally many tiles. kept: int32 [1 or B * H, tiles, kept tiles],
    ascending."""
    num_rows, num_tiles, num_kept = kept.shape
    group_of, kv_count = call.state.request.compute_once(
        _lists_of_heads, call.batch, call.num_heads, num_rows, num_tiles, num_kept, kept.device
    )
    return plan_of_call(
        method,
        call,
        q=geometry,
        kv=geometry,
        group_of=group_of,
        kv_count=kv_count,
        kv_index=kept,
        is_dense=is_dense,
    )


def _lists_of_heads(
    batch: int, num_heads: int, num_rows: int, num_tiles: int, num_kept: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """group_of and kv_count of a plan whose lists are all of one length."""
    rows = torch.arange(batch * num_heads, dtype=torch.int32, device=device)
    counts = torch.full((num_rows, num_tiles), num_kept, dtype=torch.int32, device=device)
    return (rows % num_rows).view(batch, num_heads), counts
