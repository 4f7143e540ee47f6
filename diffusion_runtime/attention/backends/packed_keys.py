"""Batches of unequal lengths for kernels with a varlen form: the keys of all samples in one row, with offsets."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from diffusion_runtime.attention.backends.interface import AttentionCall, AttentionResult
from diffusion_runtime.attention.backends.key_ranges import Attend, attend_by_ranges, keep_ranges


@dataclass(frozen=True)
class PackedCall:
    """One call without its padding: sample after sample, nothing between.

    q: [batch * seq_q, heads, head_dim]; k, v: [sum of lengths, kv_heads, head_dim]. lengths: keys of each sample, 0 for
    a sample that has none. q_offsets, k_offsets: int32 [batch + 1] on the device.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    seq_q: int
    lengths: tuple[int, ...]

    @property
    def q_lengths(self) -> tuple[int, ...]:
        return (self.seq_q,) * len(self.lengths)

    @property
    def q_offsets(self) -> torch.Tensor:
        return _offsets(self.q_lengths, self.q.device)

    @property
    def k_offsets(self) -> torch.Tensor:
        return _offsets(self.lengths, self.q.device)

    @property
    def max_length(self) -> int:
        return max(self.lengths)


# (call, packed) -> result with out [batch * seq_q, heads, head_dim] and lse [heads, batch * seq_q].
AttendPacked = Callable[[AttentionCall, PackedCall], AttentionResult]


def attend_by_lengths(call: AttentionCall, attend: Attend, attend_packed: AttendPacked) -> AttentionResult:
    """One call, padded or not: sliced keys where all samples are equal, one varlen call where they are not."""
    layout = call.layout
    if layout is None or not layout.has_padding:
        return attend(call, call.q, call.k, call.v, call.causal)
    batch = call.q.shape[0]
    ranges = [layout.key_ranges(sample) for sample in range(batch)]
    if call.causal or call.mask is not None or len(set(ranges)) == 1:
        return attend_by_ranges(call, attend)
    k, v = (
        torch.cat([keep_ranges(x[sample], ranges[sample], dim=0) for sample in range(batch) if ranges[sample]])
        for x in (call.k, call.v)
    )
    lengths = tuple(sum(stop - start for start, stop in of_sample) for of_sample in ranges)
    result = attend_packed(call, PackedCall(call.q.flatten(0, 1), k, v, call.q.shape[1], lengths))
    out, lse = unpack_rows(result, batch)
    for sample, length in enumerate(lengths):
        if length == 0:
            # Packages differ in what they write for a sample without keys.
            out[sample] = 0.0
            if lse is not None:
                lse[sample] = float("-inf")
    return AttentionResult(out, lse, result.implementation)


def unpack_rows(result: AttentionResult, batch: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """out [batch, seq_q, heads, head_dim] and lse [batch, heads, seq_q] of a result in packed rows."""
    rows, heads, head_dim = result.out.shape
    out = result.out.reshape(batch, rows // batch, heads, head_dim)
    if result.lse is None:
        return out, None
    return out, result.lse.reshape(heads, batch, rows // batch).transpose(0, 1).contiguous()


@functools.lru_cache(maxsize=64)
def _offsets(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Where each sample begins, and where the last one ends; copied to the device once."""
    return torch.tensor(list(itertools.accumulate(lengths, initial=0)), dtype=torch.int32, device=device)
