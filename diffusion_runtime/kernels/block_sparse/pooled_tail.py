"""Pooled tail: a block of keys that a query does not see is one key of it, so that no key leaves the softmax.

The key is the mean of the block's n keys, its score is raised by log(n), and its value is the mean of the values: what
exact attention gives where the keys of a block are equal. Sol-Attn (arXiv:2607.24027) adds such terms to the blocks
that it selects; here every plan may have them. Queries of text see every key itself, and text is in no block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch

from diffusion_runtime.core.block_geometry import BlockGeometry
from diffusion_runtime.core.packed_tokens import PackedTokens
from diffusion_runtime.kernels.block_means import block_means
from diffusion_runtime.kernels.block_packing import row_width
from diffusion_runtime.kernels.block_sparse.plan import SparsePlan


@dataclass(frozen=True)
class PooledKeys:
    """The keys that stand for blocks, of the n heads that are computed together; of the specification.

    k, v: [n, blocks, head_dim]; log_sizes: [1 or queries, blocks], -inf where a query has no such key.
    """

    k: torch.Tensor
    v: torch.Tensor
    log_sizes: torch.Tensor

    def left_out(self, seen: torch.Tensor) -> Self:
        """Return the keys without those of the blocks that are seen. seen: bool [1 or queries, blocks]."""
        return replace(self, log_sizes=self.log_sizes.masked_fill(seen, float("-inf")))

    def scores(self, q: torch.Tensor, scale: float) -> torch.Tensor:
        """Return the scores of queries [n, queries, head_dim], with the logarithms of the sizes: [n, queries,
        blocks]."""
        scores = scale * q @ self.k.transpose(1, 2) + self.log_sizes
        # A key that is not there may be NaN.
        return scores.masked_fill(self.log_sizes == float("-inf"), float("-inf"))


def pooled_keys(k: torch.Tensor, v: torch.Tensor, order: torch.Tensor, offsets: torch.Tensor) -> PooledKeys:
    """k, v: [n, seq, head_dim] in the working precision; order: int64 [S], the grid's tokens block by block; offsets:
    int32 [blocks + 1]."""
    sizes = offsets.diff().to(k.dtype)
    offsets = offsets.long().expand(k.shape[0], -1).contiguous()
    k_means, v_means = (
        torch.segment_reduce(x[:, order], "sum", offsets=offsets, axis=1, unsafe=True, initial=0)
        / sizes.clamp(min=1)[:, None]
        for x in (k, v)
    )
    return PooledKeys(k_means, v_means, sizes.log()[None])


class BlockMeans(NamedTuple):
    """Means of the blocks of keys, and of their values, float32 [B, kv_heads, blocks, head_dim], as block_means gives
    them."""

    k: torch.Tensor
    v: torch.Tensor


def means_of(packed: PackedTokens | None) -> BlockMeans | None:
    """Return the means that were computed while tokens were packed, where they were."""
    if packed is None or packed.k_means is None or packed.v_means is None:
        return None
    return BlockMeans(packed.k_means, packed.v_means)


class TailRows(NamedTuple):
    """Pooled keys as the kernels read them.

    k, v: [B * kv_heads * blocks, W] in the dtype of the queries; columns past head_dim are 0. log2_sizes: float32 [1 or
    B * kv_heads, blocks], -inf for an empty block.
    """

    k: torch.Tensor
    v: torch.Tensor
    log2_sizes: torch.Tensor


def tail_rows(k: torch.Tensor, v: torch.Tensor, kv: BlockGeometry, means: BlockMeans | None) -> TailRows:
    """k, v: [B, seq, kv_heads, head_dim]; means: of the blocks of `kv`, where a planner has them."""
    means = BlockMeans(block_means(k, kv), block_means(v, kv)) if means is None else means
    padding = (0, row_width(k.shape[3]) - k.shape[3])
    rows = [torch.nn.functional.pad(x.to(k.dtype).flatten(0, 2), padding).contiguous() for x in means]
    return TailRows(rows[0], rows[1], kv.sizes.float().log2())


def listed_words(plan: SparsePlan) -> torch.Tensor:
    """int32 [R, q blocks, words]: bit b of word w: whether a q block lists the key block 32 w + b; in Triton."""
    from diffusion_runtime.kernels.block_sparse import triton_kernels as kernels

    rows, num_q_blocks, capacity = plan.kv_index.shape
    num_words = -(-plan.kv.num_blocks // 32)
    words = torch.empty(rows, num_q_blocks, num_words, dtype=torch.int32, device=plan.device)
    kernels.mark_listed[(num_q_blocks, rows)](
        plan.kv_count,
        plan.kv_index,
        words,
        num_q_blocks,
        capacity,
        num_words,
        BLOCK=32,
        WORDS=max(2, 1 << (num_words - 1).bit_length()),
        num_warps=1,
    )
    return words
