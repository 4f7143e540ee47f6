"""FlashInfer (Ye et al., arXiv:2501.01005): package flashinfer-python, kernels compiled by nvcc at the first call."""

from __future__ import annotations

import math
from typing import Any

import torch

from diffusion_runtime.attention.backends.capability import Capability, HeadSizes
from diffusion_runtime.attention.backends.interface import AttentionCall, AttentionResult, Availability, CallForm
from diffusion_runtime.attention.backends.key_ranges import PackedCall, attend_by_lengths, unpack_rows
from diffusion_runtime.attention.backends.packages import PackageBackend
from diffusion_runtime.attention.backends.registry import register_backend
from diffusion_runtime.attention.backends.stored import StoredKeysReader
from diffusion_runtime.attention.cache.stored import PageFormat, StoredForm, StoredKeys
from diffusion_runtime.attention.forward_plans import ForwardPlan, PlanLimits
from diffusion_runtime.core.hardware import Hardware

# What FlashInfer's documentation recommends, in bytes.
_WORKSPACE_SIZE = 128 * 1024 * 1024


def _workspace(device: torch.device, stream: int) -> torch.Tensor:  # noqa: ARG001
    """Scratch space that the calls of a request on one stream share, one after the other; two streams would race."""
    return torch.empty(_WORKSPACE_SIZE, dtype=torch.uint8, device=device)


def _stream(device: torch.device) -> int:
    """The stream that a call on `device` runs on now; 0 where there are none."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def _planned(
    workspace: torch.Tensor,
    dtype: torch.dtype,
    seq_q: int,
    lengths: tuple[int, ...],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    causal: bool,
    scale: float | None,
    *,
    wrapper: Any = None,
) -> Any:
    """A wrapper planned for calls of one form; `wrapper` itself where there is one. Planning waits for the device."""
    if wrapper is None:
        (BatchPrefillWithRaggedKVCacheWrapper, _) = FlashInferBackend().first_call_functions()
        wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    packed_q = torch.arange(len(lengths) + 1, dtype=torch.int32, device="cpu") * seq_q
    packed_k = torch.tensor([0, *lengths], device="cpu").cumsum(0).to(torch.int32)
    wrapper.plan(
        packed_q.to(workspace.device),
        packed_k.to(workspace.device),
        num_heads,
        num_kv_heads,
        head_dim,
        causal=causal,
        sm_scale=scale,
        q_data_type=dtype,
    )
    return wrapper


class CacheWrappers:
    """The wrappers that plan one video's calls to its key-value cache: one for contiguous keys, one for stored pages.
    Each plans again when a forward pass has other lengths or pages than the one before."""

    def __init__(self, device: torch.device) -> None:
        self.workspace = _workspace(device, _stream(device))
        self._ragged: Any = None
        self._paged: Any = None
        self._ragged_form: object = None
        self._paged_form: object = None

    def prepare(self, plan: ForwardPlan) -> None:
        """Plan for the calls of a forward pass over a cache. It waits for the device where it plans."""
        limits, cache = plan.limits, plan.cache
        assert cache is not None, "calls without a cache are planned by their form"
        seq_q = cache.num_frames * cache.tokens_per_frame
        heads = (limits.num_heads, limits.num_kv_heads, limits.head_dim)
        if plan.stored is None:
            lengths = (cache.num_keys,) * limits.batch
            form = (limits.dtype, seq_q, lengths, *heads, False, limits.scale)
            if form != self._ragged_form:
                self._ragged = _planned(self.workspace, *form, wrapper=self._ragged)
                self._ragged_form = form
            return
        key = (plan.stored, seq_q, limits)
        if key != self._paged_form:
            self._paged = _planned_pages(self.workspace, plan.stored, seq_q, limits, wrapper=self._paged)
            self._paged_form = key

    def ragged(self, form: object) -> Any:
        """The wrapper planned for calls of a form; None where another was."""
        return self._ragged if form == self._ragged_form else None

    @property
    def paged(self) -> Any:
        """The wrapper planned for the stored pages of this forward pass."""
        return self._paged


def _planned_pages(
    workspace: torch.Tensor, stored: StoredForm, seq_q: int, limits: PlanLimits, *, wrapper: Any = None
) -> Any:
    """A wrapper planned for queries to stored pages, all of which are full; `wrapper` itself where there is one."""
    if wrapper is None:
        (_, BatchPrefillWithPagedKVCacheWrapper) = FlashInferBackend().first_call_functions()
        wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
    batch, per_sample = len(stored.pages), len(stored.pages[0])
    queries, pages = (
        torch.arange(batch + 1, dtype=torch.int32, device="cpu") * length for length in (seq_q, per_sample)
    )
    indices = torch.tensor([page for row in stored.pages for page in row], dtype=torch.int32, device="cpu")
    last = torch.full((batch,), stored.format.page_size, dtype=torch.int32, device="cpu")
    wrapper.plan(
        *(x.to(workspace.device) for x in (queries, pages, indices, last)),
        limits.num_heads,
        limits.num_kv_heads,
        limits.head_dim,
        stored.format.page_size,
        causal=False,
        sm_scale=limits.scale,
        q_data_type=limits.dtype,
        kv_data_type=stored.format.dtype,
    )
    return wrapper


@register_backend
class FlashInferBackend(PackageBackend, StoredKeysReader):
    """BatchPrefillWithRaggedKVCacheWrapper, for padded batches and plain ones alike, and for stored keys
    BatchPrefillWithPagedKVCacheWrapper, whose kernels read codes of 8 bits under queries of 16.

    Masks in general are not declared: its mask is part of a plan, and planning waits for the device at every new one.
    """

    name = "flashinfer_attn"
    summary = "FlashInfer's prefill kernels"
    distribution = "flashinfer-python"
    module = "flashinfer"
    functions = ("BatchPrefillWithRaggedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper")
    install = "pip install 'diffusion-runtime[flashinfer]'"
    not_replayed = "its plans are made on the host, once per request"
    prepares = True
    capability = Capability(
        platforms=frozenset({"cuda"}),
        dtypes=frozenset({"bfloat16", "float16"}),
        head_sizes=HeadSizes(only=(64, 128, 256)),
        features=frozenset({"key_padding", "gqa", "causal", "scale", "lse", "cached_keys"}),
        minimum_capability=(8, 0),
        maximum_capability=(12, 1),
    )

    def probe(self, hardware: Hardware) -> Availability:
        found = super().probe(hardware)
        compiled = "flashinfer-jit-cache" in hardware.packages or "nvcc" in hardware.programs
        if found.version is None or compiled:
            return found
        return Availability(
            None,
            f"flashinfer-python {found.version} compiles its kernels with nvcc, which is not here",
            "install the CUDA toolkit (nvcc on PATH or under CUDA_HOME), or flashinfer-jit-cache",
        )

    def reserve(self, limits: PlanLimits) -> CacheWrappers:
        return CacheWrappers(limits.device)

    def prepare(self, plan: ForwardPlan, into: Any = None) -> CacheWrappers | None:
        """Plan calls to a key-value cache once per forward pass; others are planned once per request and form."""
        if plan.cache is None:
            return None
        wrappers = CacheWrappers(plan.limits.device) if into is None else into
        assert isinstance(wrappers, CacheWrappers)
        wrappers.prepare(plan)
        return wrappers

    def expected_implementation(self, form: CallForm) -> str | None:  # noqa: ARG002
        return "flashinfer"

    def run(self, call: AttentionCall) -> AttentionResult:
        return attend_by_lengths(call, _attend, _attend_packed)

    def stored_refusal(self, form: PageFormat, device: torch.device) -> str | None:  # noqa: ARG002
        return None

    def run_stored(self, call: AttentionCall, stored: StoredKeys) -> AttentionResult:
        assert isinstance(call.prepared, CacheWrappers), "calls to stored keys are prepared"
        q = call.q.flatten(0, 1).contiguous()
        name = f"flashinfer paged, {'8 bits' if stored.codes is not None else 'as computed'}"
        result = _of_wrapper(call.prepared.paged, (q, (stored.keys, stored.values)), call.return_lse, name)
        out, lse = unpack_rows(result, call.batch)
        return AttentionResult(out, lse, name)


def _attend(call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> AttentionResult:
    batch = q.shape[0]
    lengths = (k.shape[1],) * batch
    packed = PackedCall(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), q.shape[1], lengths, call.state)
    result = _run(call, packed, causal, "flashinfer")
    out, lse = unpack_rows(result, batch)
    return AttentionResult(out, lse, result.implementation)


def _attend_packed(call: AttentionCall, packed: PackedCall) -> AttentionResult:
    return _run(call, packed, False, "flashinfer varlen")


def _run(call: AttentionCall, packed: PackedCall, causal: bool, implementation: str) -> AttentionResult:
    where = (packed.q.device, _stream(packed.q.device))
    num_heads, head_dim = packed.q.shape[1:]
    form = (packed.q.dtype, packed.seq_q, packed.lengths, num_heads, packed.k.shape[1], head_dim, causal, call.scale)
    wrapper = call.prepared.ragged(form) if isinstance(call.prepared, CacheWrappers) else None
    if wrapper is None:
        workspace = call.state.request.compute_once(_workspace, *where)
        # Plans are made once per request, form and stream.
        wrapper = call.state.request.get_or_create((_planned, where, form), lambda: _planned(workspace, *form))
    # Its kernels read rows of heads without a gap, which a slice of a fused qkv does not have.
    q, k, v = packed.q.contiguous(), packed.k.contiguous(), packed.v.contiguous()
    return _of_wrapper(wrapper, (q, k, v), call.return_lse, implementation)


def _of_wrapper(wrapper: Any, inputs: tuple[Any, ...], return_lse: bool, implementation: str) -> AttentionResult:
    """out [rows, heads, head_dim] and lse [heads, rows]."""
    if not return_lse:
        return AttentionResult(wrapper.run(*inputs), None, implementation)
    out, lse_base_2 = wrapper.run(*inputs, return_lse=True)
    return AttentionResult(out, (lse_base_2 * math.log(2)).transpose(0, 1), implementation)
