"""Classifies attention masks, once per forward pass: as sequence lengths wherever a mask is padding, whatever its
shape.

A mask reaches torch's scaled_dot_product_attention as anything that broadcasts to [batch, heads, seq_q, seq_k], boolean
(True: attend) or added to the scores. Models express four things with it:

- keys that are padding, on the right, on the left or in the middle (`KeyPadding`);
- the same, and queries that are padding and see nothing (`KeyPadding` with `rows`);
- few groups of queries, each with its own keys (`QueryGroups`);
- anything else (`OtherMask`), which only a backend that takes masks can compute.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy
import numpy.typing
import torch
from torch.nn.attention.flex_attention import BlockMask

from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.attention.layers import LocalAttention
from diffusion_runtime.core.token_layout import TokenLayout

BoolArray: TypeAlias = numpy.typing.NDArray[numpy.bool_]

# An additive mask hides a key with this value or less: exp() of it is 0 in float32, and scores of models differ by far
# less.
_HIDDEN = -1e4
# Above this many pairs a mask is not compared row by row on the CPU.
_MAX_PAIRS_ON_CPU = 1 << 22
_MAX_GROUPS = 4


@dataclass(frozen=True, eq=False)
class KeyPadding:
    """Mask that hides whole keys: each sample sees some keys and not the others.

    keys: [batch, seq_k] on the CPU. rows: [batch, seq_q] on the CPU, False for queries that see nothing; None when
    every query sees the keys.
    """

    keys: BoolArray
    rows: BoolArray | None
    device: torch.device

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(int(count) for count in self.keys.sum(axis=1))

    @cached_property
    def is_on_the_right(self) -> bool:
        """True if each sample sees its first keys and no others."""
        return bool((numpy.sort(self.keys, axis=1)[:, ::-1] == self.keys).all())

    @cached_property
    def visible_first(self) -> torch.Tensor:
        """Permutation [batch, seq_k] of the keys on the device, with the visible ones first, in their own order."""
        return torch.from_numpy(numpy.argsort(~self.keys, axis=1, kind="stable")).to(self.device)

    @cached_property
    def hidden_rows(self) -> torch.Tensor | None:
        """Queries that see nothing: [batch, seq_q, 1, 1] on the device, True for those."""
        return None if self.rows is None else torch.from_numpy(~self.rows).to(self.device)[:, :, None, None]

    def part(self, start: int, stop: int) -> KeyPadding:
        """Return the same mask for keys [start, stop)."""
        return KeyPadding(self.keys[:, start:stop], None, self.device)


@dataclass(frozen=True, eq=False)
class QueryGroups:
    """For each sample: (queries, keys that they see), as indexes on the device; no keys: they see nothing."""

    groups: tuple[tuple[tuple[torch.Tensor, torch.Tensor], ...], ...]


@dataclass(frozen=True, eq=False)
class OtherMask:
    """A mask that is not padding: [batch or 1, heads or 1, seq_q or 1, seq_k], boolean or additive."""

    mask: torch.Tensor


Visibility: TypeAlias = KeyPadding | QueryGroups | OtherMask | None


class MaskReader:
    """Classifies each mask of one forward pass once; reading one synchronises with the device."""

    def __init__(self) -> None:
        # References to the tensors: the memory of a live tensor is not reused.
        self._read: dict[Hashable, tuple[Sequence[torch.Tensor], Visibility]] = {}

    def read(
        self, mask: torch.Tensor | None, shape: tuple[int, int, int], given: Sequence[torch.Tensor], origin: Hashable
    ) -> Visibility:
        """Read what `mask` hides in a call of `shape` (batch, seq_q, seq_k); None: nothing.

        given, origin: the masks that the module was given, and which code builds `mask` from them; equal ones build
        equal masks, so that a mask that every block rebuilds is read once. None as origin: unknown.
        """
        if mask is None:
            return None
        sources = list(given) if origin is not None and given else [mask]
        if any(source.is_inference() for source in sources):
            # Such tensors have no version counter that would show a write.
            return read_mask(mask, shape)
        key = (origin if sources[0] is not mask else None, mask.shape, mask.dtype, shape, *map(_identity, sources))
        if key not in self._read:
            self._read[key] = (sources, read_mask(mask, shape))
        return self._read[key][1]


def is_block_mask(mask: object) -> bool:
    """Return whether a mask is a BlockMask of torch's FlexAttention, which lists blocks of pairs and is no tensor."""
    from torch.nn.attention.flex_attention import BlockMask

    return isinstance(mask, BlockMask)


def _identity(tensor: torch.Tensor) -> Hashable:
    return (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride(), tensor._version)


def read_mask(mask: torch.Tensor, shape: tuple[int, int, int]) -> Visibility:
    """Read what `mask` hides in a call of `shape` (batch, seq_q, seq_k); None: nothing."""
    batch, seq_q, seq_k = shape
    full = mask
    while full.dim() < 4:
        full = full[None]
    seen = full if full.dtype == torch.bool else _additive_as_boolean(full)
    if seen is None or not _same_along(seen, 1):
        return OtherMask(full)
    seen = seen[:, 0].expand(batch, -1, seq_k)
    if _same_along(seen, 1):
        keys = _on_cpu(seen[:, 0])
        return None if keys.all() else KeyPadding(keys, None, mask.device)
    keys_seen, rows_seeing = seen.any(1), seen.any(2)
    if bool((seen == (rows_seeing[:, :, None] & keys_seen[:, None, :])).all()):
        return KeyPadding(_on_cpu(keys_seen), _on_cpu(rows_seeing), mask.device)
    groups = _groups(seen, mask.device) if seq_q * seq_k <= _MAX_PAIRS_ON_CPU else None
    return OtherMask(full) if groups is None else QueryGroups(groups)


def _additive_as_boolean(mask: torch.Tensor) -> torch.Tensor | None:
    """Return an additive mask as a boolean one; None when it does more than hide.

    A row that hides every key with a finite number hides none of them: softmax is invariant to a constant.
    """
    hidden = mask <= _HIDDEN
    only_hides = (hidden | (mask == 0)).all() & ~hidden.all(-1).any()
    return ~hidden if bool(only_hides) else None


def _same_along(seen: torch.Tensor, dim: int) -> bool:
    if seen.shape[dim] == 1 or seen.stride(dim) == 0:
        return True
    return bool((seen == seen.narrow(dim, 0, 1)).all())


def _groups(
    seen: torch.Tensor, device: torch.device
) -> tuple[tuple[tuple[torch.Tensor, torch.Tensor], ...], ...] | None:
    """Group queries with equal keys, sample by sample; None when there are many different rows."""
    samples = []
    for pairs in _on_cpu(seen):
        kinds, kind_of = numpy.unique(pairs, axis=0, return_inverse=True)
        if len(kinds) > _MAX_GROUPS:
            return None
        samples.append(
            tuple(
                (
                    torch.from_numpy(numpy.flatnonzero(kind_of.reshape(-1) == kind)).to(device),
                    torch.from_numpy(numpy.flatnonzero(keys)).to(device),
                )
                for kind, keys in enumerate(kinds)
            )
        )
    return tuple(samples)


def _on_cpu(seen: torch.Tensor) -> BoolArray:
    return seen.contiguous().cpu().numpy()


def run_layer(
    layer: LocalAttention,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    context: AttentionContext,
    *,
    mask: torch.Tensor | None = None,
    block_mask: BlockMask | None = None,
) -> torch.Tensor:
    """Run the layer on a call. out: [batch, seq_q, heads, head_dim]."""
    out: torch.Tensor = layer(q, k, v, context, mask=mask, block_mask=block_mask)
    return out


def attend_padded(
    layer: LocalAttention,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: KeyPadding,
    context: AttentionContext,
) -> torch.Tensor:
    """Attend to the keys that each sample sees. Attention does not depend on the order of keys, so they may be
    permuted."""
    layout = context.layout
    if layout is not None and layout.num_text_tokens:
        start = 0 if layout.num_prefix_tokens else layout.num_grid_tokens
        text = seen.part(start, start + layout.num_text_tokens)
        if seen.keys.sum() - text.keys.sum() == seen.keys.shape[0] * layout.num_grid_tokens:
            return _attend_padded_text(layer, q, k, v, text, start, context)
    lengths = seen.lengths
    longest = max(lengths)
    if longest == 0:
        return torch.zeros_like(q)
    if not seen.is_on_the_right:
        order = seen.visible_first[:, :longest, None, None]
        k, v = (x.gather(1, order.expand(-1, -1, *x.shape[2:])) for x in (k, v))
    kept = None if min(lengths) == longest else TokenLayout.text(longest, lengths)
    return run_layer(layer, q, k[:, :longest], v[:, :longest], context.with_layout(kept))


def _attend_padded_text(
    layer: LocalAttention,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    text: KeyPadding,
    start: int,
    context: AttentionContext,
) -> torch.Tensor:
    """Attend like attend_padded, where only the text after a grid is padded: tokens of the grid are not moved."""
    assert context.layout is not None
    padded = context.with_layout(dataclasses.replace(context.layout, valid_lengths=text.lengths))
    if text.is_on_the_right:
        return run_layer(layer, q, k, v, padded)
    order = torch.arange(q.shape[1], device=q.device).repeat(q.shape[0], 1)
    order[:, start : start + text.keys.shape[1]] = text.visible_first + start
    q, k, v = (x.gather(1, order[:, :, None, None].expand(-1, -1, *x.shape[2:])) for x in (q, k, v))
    out = run_layer(layer, q, k, v, padded)
    return torch.empty_like(out).scatter_(1, order[:, :, None, None].expand_as(out), out)


def attend_groups(
    layer: LocalAttention,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: QueryGroups,
    context: AttentionContext,
) -> torch.Tensor:
    """Make one call per group of queries of each sample, with only the keys that it sees."""
    out = torch.zeros_like(q)
    plain = context.with_layout(None)
    for sample, groups in enumerate(seen.groups):
        for queries, keys in groups:
            if keys.numel():
                k_seen, v_seen = k[sample, keys][None], v[sample, keys][None]
                out[sample, queries] = run_layer(layer, q[sample, queries][None], k_seen, v_seen, plain)[0]
    return out
