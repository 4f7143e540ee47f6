"""The one place where a backend is called: on the device of its tensors, outside autocast, with tokens to attend to.

Kernels differ in what they do with an empty tensor: they refuse it, return garbage, or end the process.
"""

from __future__ import annotations

import torch

from diffusion_runtime.attention.backends.interface import AttentionCall, AttentionResult, Backend
from diffusion_runtime.device_guard import device_guard, guard_is_needed


def run_backend(backend: Backend, call: AttentionCall) -> AttentionResult:
    """One call that selection has checked. out has q's dtype, whatever autocast would make of its products.

    A call without keys gives 0 and -inf, as every query does that sees no key, and one without queries empty tensors;
    `backend.run` sees neither.
    """
    if call.k.shape[1] == 0:
        return _empty_result(call, "no keys")
    if call.q.numel() == 0:
        return _empty_result(call, "no queries")
    if not guard_is_needed(call.q.device):
        return backend.run(call)
    with device_guard(call.q.device):
        return backend.run(call)


def no_visible_keys(q: torch.Tensor) -> torch.Tensor:
    """The log-sum-exp of queries that see nothing: -inf, float32 [batch, heads, seq_q]. q: [batch, seq_q, heads, _]."""
    return q.new_full((q.shape[0], q.shape[2], q.shape[1]), float("-inf"), dtype=torch.float32)


def _empty_result(call: AttentionCall, why: str) -> AttentionResult:
    return AttentionResult(torch.zeros_like(call.q), no_visible_keys(call.q) if call.return_lse else None, why)
