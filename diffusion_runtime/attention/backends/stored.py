"""Backends that read keys and values where a store holds them: pages behind a page table, and codes of 8 bits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from diffusion_runtime.attention.backends.calling import aligned_tokens
from diffusion_runtime.attention.backends.interface import AttentionCall, AttentionResult
from diffusion_runtime.attention.cache.stored import KeyParts, PageFormat, StoredKeys
from diffusion_runtime.core.device_guard import device_guard
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.parallel.merging import PartialAttention


class StoredKeysReader(ABC):
    """The part of a Backend that reads stored keys. A backend without it is given them gathered in one tensor."""

    @abstractmethod
    def stored_refusal(self, form: PageFormat, device: torch.device) -> str | None:
        """Return why its kernels cannot read keys stored like this; None where they can. It is asked on every call."""

    @abstractmethod
    def run_stored(self, call: AttentionCall, stored: StoredKeys) -> AttentionResult:
        """Attention of the call's queries to all of the stored keys. Keys and values in float8_e4m3fn are numbers, as
        they are: the caller has put their scales into the queries, and puts them into the result. Of the call's
        own keys and layout nothing is read; it is not causal and has no mask."""


def attend_parts(
    reader: StoredKeysReader, call: AttentionCall, parts: KeyParts, run: Callable[[AttentionCall], AttentionResult]
) -> AttentionResult:
    """One call whose keys are given in parts, which are merged by their log-sum-exps. run: computes a call to keys in a
    row. Of the call's own keys and layout nothing is read.

    Raises ConfigError for a masked call.
    """
    if call.mask is not None or call.causal:
        raise ConfigError("attention: stored keys are attended to as a whole, without a mask and not causally")
    stored = parts.stored
    if call.q.numel() == 0:
        return run(call)
    if stored is not None and parts.own is None:
        return _attend_stored(reader, call, stored)
    assert parts.own is not None, "there is one part at least"
    k, v = parts.own
    merges = stored is not None
    # What was prepared is of the stored keys.
    inputs = call.inputs._replace(k=k, v=v, layout=None)
    present = run(call._replace(inputs=inputs, prepared=None, return_lse=merges or call.return_lse))
    if stored is None:
        return present
    past = _attend_stored(reader, call._replace(return_lse=True), stored)
    merged = PartialAttention()
    for part in (past, present):
        assert part.lse is not None, "a backend that reads stored keys returns the log-sum-exp"
        merged.add(part.out, part.lse)
    names = f"{past.implementation} and {present.implementation}, merged by log-sum-exp"
    return AttentionResult(merged.result(call.q), merged.lse if call.return_lse else None, names)


def _attend_stored(reader: StoredKeysReader, call: AttentionCall, stored: StoredKeys) -> AttentionResult:
    """The scale of a head's keys goes into its queries and that of its values into the result. q (code * scale + mean)
    differs from (q scale) code by q mean, the same for all keys, which the log-sum-exp alone sees."""
    if stored.codes is None:
        return _run_stored(reader, call, stored)
    q, codes = call.q, stored.codes
    repeats = q.shape[2] // stored.keys.shape[2]
    of_keys, of_values = (x.repeat_interleave(repeats, dim=2) for x in codes.scale)
    scaled = call._replace(inputs=call.inputs._replace(q=q * of_keys))
    out, lse, implementation, *_ = _run_stored(reader, scaled, stored)
    if lse is not None:
        working = torch.promote_types(q.dtype, torch.float32)
        mean = codes.mean.repeat_interleave(repeats, dim=2)
        common = (q.to(working) * mean.to(working)).sum(dim=-1).transpose(1, 2)
        lse = lse + (call.softmax_scale * common).to(lse.dtype)
    return AttentionResult(out * of_values, lse, implementation)


def _run_stored(reader: StoredKeysReader, call: AttentionCall, stored: StoredKeys) -> AttentionResult:
    q = aligned_tokens(call.q)
    with device_guard(q.device):
        return reader.run_stored(call._replace(inputs=call.inputs._replace(q=q)), stored)


def gathered_pages(stored: StoredKeys, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The specification of a page table: keys and values in a row, [batch, tokens, kv_heads, head_dim] each."""
    batch, num_pages = stored.page_table.shape
    index = stored.page_table.flatten().long()
    keys, values = (
        # Indexing float8 tensors is not implemented for every device; their bytes are.
        x.view(torch.uint8).index_select(0, index).view(x.dtype).to(dtype).view(batch, -1, *x.shape[2:])
        if x.dtype == torch.float8_e4m3fn
        else x.index_select(0, index).to(dtype).view(batch, -1, *x.shape[2:])
        for x in (stored.keys, stored.values)
    )
    assert keys.shape[1] == num_pages * stored.form.format.page_size
    return keys, values
