"""Merging: attention to keys that are seen in parts, put together by the log-sum-exp of each part (online softmax,
Milakov and Gimelshein, arXiv:1805.02867)."""

from __future__ import annotations

import torch


class PartialAttention:
    """The result over the keys added so far. out: [batch, seq_q, heads, head_dim]; lse: [batch, heads, seq_q]."""

    def __init__(self) -> None:
        self._out: torch.Tensor | None = None
        self._lse: torch.Tensor | None = None

    def add(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Merge the result over further keys. lse: float32, natural log, -inf for rows that see none of them."""
        working = torch.promote_types(out.dtype, torch.float32)
        if self._out is None or self._lse is None:
            # A copy for float32 too: what follows is done in place.
            self._out, self._lse = out.to(working, copy=True), lse.to(working)
            return
        lse = lse.to(working)
        # -inf minus -inf: neither part holds a key, both results are 0 and any weight does.
        weight = torch.sigmoid(lse - self._lse).nan_to_num_(nan=0.0)
        self._out.lerp_(out.to(working), weight.transpose(1, 2)[..., None])
        self._lse = torch.logaddexp(self._lse, lse)

    @property
    def lse(self) -> torch.Tensor | None:
        """The log-sum-exp over the keys added so far; None before any were."""
        return self._lse

    def result(self, like: torch.Tensor) -> torch.Tensor:
        """Return the result in the dtype of `like`; zeros in its shape when no keys were added."""
        return torch.zeros_like(like) if self._out is None else self._out.to(like.dtype)
