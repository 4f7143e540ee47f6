"""Online softmax merge: attention over parts of the keys, combined by their log-sum-exps, in float32.

With out_a, lse_a over some keys and out_b, lse_b over others, attention over both is out_a + w (out_b - out_a) with w =
exp(lse_b) / (exp(lse_a) + exp(lse_b)) = sigmoid(lse_b - lse_a) (Liu et al., arXiv:2310.01889; with causal blocks and
this form, arXiv:2411.01783). A row that sees no key of a part has -inf there and weight 0.
"""

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

    def result(self, like: torch.Tensor) -> torch.Tensor:
        """The result in the dtype of `like`; zeros in its shape when no keys were added."""
        return torch.zeros_like(like) if self._out is None else self._out.to(like.dtype)
