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
from diffusion_runtime.hardware import Hardware

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
) -> Any:
    """A wrapper planned for calls of one form. Planning waits for the device."""
    from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

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


@register_backend
class FlashInferBackend(PackageBackend):
    """BatchPrefillWithRaggedKVCacheWrapper, for padded batches and plain ones alike.

    Masks in general are not declared: its mask is part of a plan, and planning waits for the device at every new one.
    """

    name = "flashinfer_attn"
    summary = "FlashInfer's prefill kernels"
    distribution = "flashinfer-python"
    module = "flashinfer"
    functions = ("BatchPrefillWithRaggedKVCacheWrapper",)
    install = "pip install 'diffusion-runtime[flashinfer]'"
    not_replayed = "its plans are made on the host, once per request"
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

    def expected_implementation(self, form: CallForm) -> str | None:  # noqa: ARG002
        return "flashinfer"

    def run(self, call: AttentionCall) -> AttentionResult:
        return attend_by_lengths(call, _attend, _attend_packed)


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
    workspace = call.state.request.compute_once(_workspace, *where)
    # Plans are made once per request, form and stream.
    wrapper = call.state.request.get_or_create((_planned, where, form), lambda: _planned(workspace, *form))
    # Its kernels read rows of heads without a gap, which a slice of a fused qkv does not have.
    q, k, v = packed.q.contiguous(), packed.k.contiguous(), packed.v.contiguous()
    if not call.return_lse:
        return AttentionResult(wrapper.run(q, k, v), None, implementation)
    out, lse_base_2 = wrapper.run(q, k, v, return_lse=True)
    return AttentionResult(out, (lse_base_2 * math.log(2)).transpose(0, 1), implementation)
