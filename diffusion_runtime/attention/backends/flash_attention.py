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
from diffusion_runtime.attention.cache.stored import PageFormat, StoredKeys

FLASH_DTYPES = frozenset({"bfloat16", "float16"})
FLASH_FEATURES = frozenset({"key_padding", "gqa", "causal", "scale", "lse", "cached_keys"})


def lengths_of(call: AttentionCall, stored: StoredKeys) -> torch.Tensor:
    """Keys of each sample, int32 [batch] on the device, copied there once per request and length."""
    return call.state.request.compute_once(_lengths, call.batch, stored.form.num_keys, call.q.device)


def _lengths(batch: int, length: int, device: torch.device) -> torch.Tensor:
    return torch.full((batch,), length, dtype=torch.int32, device=device)


def codes_refusal(form: PageFormat) -> str | None:
    """Return why kernels that take queries and keys of one dtype cannot read pages; None for pages in 16 bits."""
    if form.dtype in (torch.bfloat16, torch.float16):
        return None
    return "its kernels take keys in 8 bits only with queries in 8 bits"


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
