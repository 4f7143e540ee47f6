"""Quantised keys and values: what a commit leaves is stored in 8 bits, half of bfloat16."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Self

import torch

from diffusion_runtime.attention.cache.copies import put_tokens
from diffusion_runtime.attention.cache.pages import PagedStore, best_page_size
from diffusion_runtime.attention.cache.plan import CachePlan
from diffusion_runtime.attention.cache.store import KeyStore, KeyStoreSize, RingStore
from diffusion_runtime.attention.cache.stored import CodeScales, KeyParts, PageFormat, StoredForm, StoredKeys
from diffusion_runtime.kernels.fp8_cache import dequantise

# The largest number of float8_e4m3fn.
LARGEST = 448.0
# How much larger than those of the first committed frames later numbers may be before they saturate.
_HEADROOM = 1.25


class Fp8Store(KeyStore):
    """Keys and values in float8_e4m3fn, as x = code * scale + mean.

    The pass's own keys and values stay as they come in, which the steps of a chunk rewrite and its frames lean on most:
    a commit alone quantises. scale: 1.25 max|x| / 448 per sample and head, of keys and of values; mean: of the keys per
    sample, head and place in the head, 0 for values. Both are those of the first committed frames and stay fixed, so
    that a kernel can take them as one number and one vector per head; what is larger later saturates, and is counted.

    A number that is not saturated is stored with a relative error of 2^-4 at most, or an absolute one of 2^-10 scales.
    The mean is added back when keys are read: softmax does not see a vector that all keys have in common, but positions
    that are applied after reading do.
    """

    copied = "read back"

    def __init__(self, size: KeyStoreSize, make_store: Callable[[KeyStoreSize], KeyStore] = RingStore) -> None:
        """make_store: of the codes, as the bytes they are."""
        # Indexing float8 tensors is not implemented for every device; their bytes are.
        self.codes = make_store(dataclasses.replace(size, dtype=torch.uint8))
        # In the dtype that they are read in, so that writing and reading use the same numbers.
        self.scale = torch.zeros((2, size.batch, 1, size.num_heads, 1), dtype=size.dtype, device=size.device)
        self.mean = torch.zeros((size.batch, 1, size.num_heads, size.head_dim), dtype=size.dtype, device=size.device)
        self._num_saturated = torch.zeros((), dtype=torch.int64, device=size.device)
        self._is_fixed = False
        self._own: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def num_bytes(self) -> int:
        return self.codes.num_bytes + self.scale.nbytes + self.mean.nbytes

    @property
    def num_shared_bytes(self) -> int:
        return self.codes.num_shared_bytes

    @property
    def num_saturated(self) -> int:
        """Stored numbers so far that were too large for the scale. Waits for the device."""
        return int(self._num_saturated.item())

    def fork(self) -> Self:
        twin = copy.copy(self)
        twin.codes = self.codes.fork()
        twin.scale, twin.mean = self.scale.clone(), self.mean.clone()
        twin._num_saturated = self._num_saturated.clone()
        twin._own = None
        return twin

    def release(self) -> None:
        self.codes.release()

    def write(self, plan: CachePlan, k: torch.Tensor, v: torch.Tensor) -> None:
        self._own = k, v
        if plan.phase != "commit":
            return
        if not self._is_fixed:
            self._fix_scales(k, v)
        keys, values = (self._quantised(x, index).view(torch.uint8) for index, x in enumerate((k, v)))
        self.codes.write(plan, keys, values)

    def read(self, plan: CachePlan) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._own is not None, "a pass writes its keys before it reads"
        (own_keys, own_values), self._own = self._own, None
        keys, values = dequantise(*self.codes.read(plan), self.scale, self.mean)
        return _with_own(plan, keys, own_keys), _with_own(plan, values, own_values)

    def page_format(self, plan: CachePlan) -> PageFormat | None:
        """None for a pass that a CUDA graph may replay: which pages are of the past changes with every chunk."""
        if plan.write_index is not None:
            return None
        in_pages = self.codes.page_format(plan)
        size = best_page_size(plan.run_unit) if in_pages is None else in_pages.page_size
        return PageFormat(size, torch.float8_e4m3fn)

    def read_parts(self, plan: CachePlan) -> KeyParts:
        """The codes of the past, and the pass's own keys and values as they came in."""
        assert self._own is not None, "a pass writes its keys before it reads"
        own, self._own = self._own, None
        if not plan.past_copies:
            return KeyParts(None, own)
        if isinstance(self.codes, PagedStore):
            stored = self.codes.stored(plan.past_copies)
        else:
            assert isinstance(self.codes, RingStore)
            stored = _as_pages(self.codes.keys_and_values, plan)
        keys, values = (x.view(torch.float8_e4m3fn) for x in (stored.keys, stored.values))
        form = stored.form._replace(format=PageFormat(keys.shape[1], keys.dtype))
        return KeyParts(StoredKeys(keys, values, stored.page_table, form, CodeScales(self.scale, self.mean)), own)

    def _fix_scales(self, k: torch.Tensor, v: torch.Tensor) -> None:
        self._is_fixed = True
        self.mean.copy_(k.float().mean(dim=1, keepdim=True))
        for index, x in enumerate((k.float() - self.mean.float(), v.float())):
            largest = x.abs().amax(dim=(1, 3), keepdim=True)
            # A head whose keys are all alike: any scale will do but 0.
            smallest = torch.finfo(self.scale.dtype).tiny
            self.scale[index].copy_((_HEADROOM / LARGEST * largest).clamp_min(smallest))

    def _quantised(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """Codes of x; counts what saturates."""
        centred = x.float() - self.mean.float() if index == 0 else x.float()
        scaled = centred / self.scale[index].float()
        self._num_saturated += (scaled.abs() > LARGEST).sum()
        # A conversion makes NaN of what is too large.
        return scaled.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def _as_pages(codes: torch.Tensor, plan: CachePlan) -> StoredKeys:
    """The past in a row, [2, batch, tokens, heads, head_dim], as pages that lie one behind the other."""
    size = best_page_size(plan.run_unit)
    batch, per_sample = codes.shape[1], codes.shape[2] // size
    places = [page for _, run in plan.past_copies for page in range(run.start // size, run.stop // size)]
    pages = tuple(tuple(sample * per_sample + place for place in places) for sample in range(batch))
    keys, values = codes.view(2, batch * per_sample, size, *codes.shape[3:])
    table = torch.tensor(pages, dtype=torch.int32).to(codes.device, non_blocking=True)
    return StoredKeys(keys, values, table, StoredForm(PageFormat(size, codes.dtype), pages))


def _with_own(plan: CachePlan, found: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Keys or values in sight, [batch, plan.num_keys, heads, head_dim], with those of the pass as they are."""
    if plan.write_index is not None:
        # Of a full cache, all of which is in sight.
        return put_tokens(found, plan.write_index, own)
    for here, place in plan.own_copies:
        found[:, place] = own[:, here]
    return found
