"""Pooled tail: a block of keys that a query does not see is one key of it, so that no key leaves the softmax.

The key is the mean of the block's n keys, its score is raised by log(n), and its value is the mean of the values: what
exact attention gives where the keys of a block are equal. Sol-Attn (arXiv:2607.24027) adds such terms to the blocks
that it selects; here every plan may have them. Queries of text see every key itself, and text is in no block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch


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
