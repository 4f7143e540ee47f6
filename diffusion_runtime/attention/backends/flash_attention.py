"""The base of all FlashAttention generations (Dao et al., arXiv:2205.14135, 2307.08691, 2407.08608).

Inputs are [batch, seq, heads, head_dim], grouped queries and a scale of one's own are native, the log-sum-exp is
natural, and a varlen form takes batches of unequal lengths.
"""

from __future__ import annotations

from abc import abstractmethod

import torch

from diffusion_runtime.attention.backends.interface import AttentionCall, AttentionResult, CallForm
from diffusion_runtime.attention.backends.key_ranges import PackedCall, attend_by_lengths
from diffusion_runtime.attention.backends.packages import PackageBackend

FLASH_DTYPES = frozenset({"bfloat16", "float16"})
FLASH_FEATURES = frozenset({"key_padding", "gqa", "causal", "scale", "lse", "cached_keys"})


class FlashAttention(PackageBackend):
    """One generation. Subclasses call their package; shapes as in key_ranges.Attend and packed_keys.AttendPacked."""

    def expected_implementation(self, form: CallForm) -> str | None:  # noqa: ARG002
        return self.distribution

    def run(self, call: AttentionCall) -> AttentionResult:
        return attend_by_lengths(call, self.attend, self.attend_packed)

    @abstractmethod
    def attend(
        self, call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
    ) -> AttentionResult:
        """Dense tensors."""

    @abstractmethod
    def attend_packed(self, call: AttentionCall, packed: PackedCall) -> AttentionResult:
        """Unequal lengths, not causal."""
