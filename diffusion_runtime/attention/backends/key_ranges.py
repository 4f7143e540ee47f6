"""Padding as lengths: attention on the keys that a sample really has, cut out for kernels that know neither masks nor
lengths, or packed in one row with offsets for kernels with a varlen form.

A dense mask costs more than it hides (measured on an H200 at 26k tokens: 400 TF/s with a broadcast mask, 560-680 with
the padding cut off), so keys are cut, and samples with equal ranges are computed together.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from diffusion_runtime.attention.backends.calling import no_visible_keys
from diffusion_runtime.attention.backends.interface import AttentionCall, AttentionResult
from diffusion_runtime.attention.context import RequestCache

Ranges = tuple[tuple[int, int], ...]

# (call, q, k, v, causal) -> result. q [batch, seq_q, heads, head_dim], k and v [batch, seq_k, kv_heads, head_dim] are
# dense, seq_q and seq_k are at least 1, and causal comes with seq_q == seq_k alone: query i sees keys 0..i. Where the
# call has a mask, it has been cut as q, k and v have been.
Attend = Callable[[AttentionCall, torch.Tensor, torch.Tensor, torch.Tensor, bool], AttentionResult]


def attend_by_ranges(call: AttentionCall, attend: Attend) -> AttentionResult:
    """One call, padded or not, by a kernel for dense tensors."""
    q, k, v, layout, *_ = call.inputs
    if layout is None or not layout.has_padding:
        return attend(call, q, k, v, call.causal)
    groups: dict[Ranges, list[int]] = {}
    for sample in range(q.shape[0]):
        groups.setdefault(layout.key_ranges(sample), []).append(sample)
    if len(groups) == 1:
        return _attend_ranges(call, q, k, v, next(iter(groups)), attend)
    out = torch.empty_like(q)
    lse = no_visible_keys(q)
    implementations = []
    for ranges, samples in groups.items():
        of_q, of_k, of_v = (_take(x, samples) for x in (q, k, v))
        result = _attend_ranges(_cut_mask(call, samples=samples), of_q, of_k, of_v, ranges, attend)
        for position, sample in enumerate(samples):
            out[sample] = result.out[position]
            if result.lse is not None:
                lse[sample] = result.lse[position]
        if ranges:
            implementations.append(result.implementation)
    return AttentionResult(out, lse if call.return_lse else None, f"{implementations[0]} by length")


def keep_ranges(x: torch.Tensor, ranges: Ranges, dim: int = 1) -> torch.Tensor:
    """The tokens of x inside `ranges`: a view when there is one range, else a copy."""
    kept = [x.narrow(dim, start, stop - start) for start, stop in ranges]
    return kept[0] if len(kept) == 1 else torch.cat(kept, dim=dim)


def _take(x: torch.Tensor, samples: list[int]) -> torch.Tensor:
    """Samples of a batch, as a view where they are neighbours; indexing by a list would wait for the device."""
    if samples[-1] - samples[0] == len(samples) - 1:
        return x[samples[0] : samples[-1] + 1]
    return torch.stack([x[sample] for sample in samples])


def _cut_mask(
    call: AttentionCall,
    *,
    samples: list[int] | None = None,
    queries: Ranges | None = None,
    keys: Ranges | None = None,
) -> AttentionCall:
    """The call with the part of its mask that belongs to these samples, queries and keys; None keeps all."""
    mask = call.mask
    if mask is None:
        return call
    if samples is not None and mask.shape[0] > 1:
        mask = _take(mask, samples)
    if queries is not None and mask.shape[2] > 1:
        mask = keep_ranges(mask, queries, dim=2)
    if keys is not None:
        mask = keep_ranges(mask, keys, dim=3)
    return call._replace(inputs=call.inputs._replace(mask=mask))


def _attend_ranges(
    call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ranges: Ranges, attend: Attend
) -> AttentionResult:
    """Attention of samples that all have the same key ranges."""
    if not ranges:
        return AttentionResult(torch.zeros_like(q), no_visible_keys(q) if call.return_lse else None, "no keys")
    if call.causal:
        return _attend_ranges_causally(call, q, k, v, ranges, attend)
    return attend(_cut_mask(call, keys=ranges), q, keep_ranges(k, ranges), keep_ranges(v, ranges), False)


def _attend_ranges_causally(
    call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ranges: Ranges, attend: Attend
) -> AttentionResult:
    """Causal attention with gaps between the keys.

    Cutting keys shifts the positions that a causal kernel counts. Cutting the queries at the same places shifts both
    alike; queries in a gap are padding themselves, and see all keys before it.
    """
    cut = _cut_mask(call, queries=ranges, keys=ranges)
    inside = attend(cut, keep_ranges(q, ranges), keep_ranges(k, ranges), keep_ranges(v, ranges), True)
    out, lse = torch.zeros_like(q), no_visible_keys(q)
    begin = 0
    for index, (start, stop) in enumerate(ranges):
        kept = slice(begin, begin + stop - start)
        out[:, start:stop] = inside.out[:, kept]
        if inside.lse is not None:
            lse[:, :, start:stop] = inside.lse[:, :, kept]
        begin = kept.stop
        gap = slice(stop, ranges[index + 1][0] if index + 1 < len(ranges) else q.shape[1])
        if gap.start < gap.stop:
            before = ranges[: index + 1]
            cut = _cut_mask(call, queries=((gap.start, gap.stop),), keys=before)
            padding = attend(cut, q[:, gap], keep_ranges(k, before), keep_ranges(v, before), False)
            out[:, gap] = padding.out
            if padding.lse is not None:
                lse[:, :, gap] = padding.lse
    return AttentionResult(out, lse if call.return_lse else None, inside.implementation)


@dataclass(frozen=True)
class PackedCall:
    """One call without its padding: sample after sample, nothing between.

    q: [batch * seq_q, heads, head_dim]; k, v: [sum of lengths, kv_heads, head_dim]. lengths: keys of each sample, 0 for
    a sample that has none. q_offsets, k_offsets: int32 [batch + 1] on the device, copied there once per request: state.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    seq_q: int
    lengths: tuple[int, ...]
    state: RequestCache

    @property
    def q_lengths(self) -> tuple[int, ...]:
        return (self.seq_q,) * len(self.lengths)

    @property
    def q_offsets(self) -> torch.Tensor:
        return self.state.request.compute_once(_offsets, self.q_lengths, self.q.device)

    @property
    def k_offsets(self) -> torch.Tensor:
        return self.state.request.compute_once(_offsets, self.lengths, self.q.device)

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
    result = attend_packed(call, PackedCall(call.q.flatten(0, 1), k, v, call.q.shape[1], lengths, call.state))
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


def _offsets(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return where each sample begins, and where the last one ends: int32 [batch + 1]."""
    return torch.tensor(list(itertools.accumulate(lengths, initial=0)), dtype=torch.int32, device=device)
