"""The one place where a backend is called: outside autocast, on its tensors' device, with tokens it computes right.

Kernels differ in what they do with an empty tensor: they refuse it, return garbage, or end the process. And GPU kernels
load 16 bytes at once: with rows that begin in between, cuDNN's, which torch takes by itself, returned garbage without a
word on an H200 (relative error 1.3), and torch's flash kernel lost the device; the one for CPUs that returns the
log-sum-exp ignores the stride of the last dimension.
"""

from __future__ import annotations

import torch

from diffusion_runtime.attention.backends.detour import key_count_reason, run_elsewhere
from diffusion_runtime.attention.backends.interface import AttentionCall, AttentionResult, Backend
from diffusion_runtime.device_guard import device_guard, guard_is_needed


def run_backend(backend: Backend, call: AttentionCall) -> AttentionResult:
    """One call that selection has checked. out has q's dtype, whatever autocast would make of its products.

    A call without keys gives 0 and -inf, as every query does that sees no key, and one without queries empty tensors;
    `backend.run` sees neither. It sees heads whose numbers lie side by side, on a GPU from a multiple of 16 bytes on.
    A number of keys that is none of the capability's key_counts is computed elsewhere, which the result says.
    """
    if call.k.shape[1] == 0:
        return _empty_result(call, "no keys")
    if call.q.numel() == 0:
        return _empty_result(call, "no queries")
    call = _with_aligned_rows(call)
    if not guard_is_needed(call.q.device):
        return _run(backend, call)
    with device_guard(call.q.device):
        return _run(backend, call)


def no_visible_keys(q: torch.Tensor) -> torch.Tensor:
    """The log-sum-exp of queries that see nothing: -inf, float32 [batch, heads, seq_q]. q: [batch, seq_q, heads, _]."""
    return q.new_full((q.shape[0], q.shape[2], q.shape[1]), float("-inf"), dtype=torch.float32)


def aligned_tokens(x: torch.Tensor) -> torch.Tensor:
    """x [batch, seq, heads, head_dim] with the numbers of a head side by side, from a multiple of 16 bytes on: itself,
    or a copy. A head size that is no such multiple leaves nothing to align."""
    *strides, last = x.stride()
    unit = 16 // x.element_size()
    is_aligned = x.storage_offset() % unit == 0 and not any(stride % unit for stride in strides)
    if last == 1 and (is_aligned or x.shape[3] % unit):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _side_by_side(x: torch.Tensor) -> torch.Tensor:
    """x with the numbers of a head side by side: itself, or a copy."""
    return x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)


def _run(backend: Backend, call: AttentionCall) -> AttentionResult:
    reason = key_count_reason(backend, call)
    return backend.run(call) if reason is None else run_elsewhere(call, reason)


def _with_aligned_rows(call: AttentionCall) -> AttentionCall:
    arrange = aligned_tokens if call.q.is_cuda else _side_by_side
    q, k, v = arrange(call.q), arrange(call.k), arrange(call.v)
    if q is call.q and k is call.k and v is call.v:
        return call
    return call._replace(inputs=call.inputs._replace(q=q, k=k, v=v))


def _empty_result(call: AttentionCall, why: str) -> AttentionResult:
    return AttentionResult(torch.zeros_like(call.q), no_visible_keys(call.q) if call.return_lse else None, why)
