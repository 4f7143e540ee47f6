"""The one place where a backend is called: on its tensors' device, outside autocast, with keys it computes right."""

from __future__ import annotations

from diffusion_runtime.attention.backends.detour import key_count_reason, run_elsewhere
from diffusion_runtime.attention.backends.interface import AttentionCall, AttentionResult, Backend
from diffusion_runtime.device_guard import device_guard, guard_is_needed


def run_backend(backend: Backend, call: AttentionCall) -> AttentionResult:
    """One call that selection has checked. out has q's dtype, whatever autocast would make of its products.

    A number of keys that is none of the capability's key_counts is computed elsewhere, which the result says.
    """
    if not guard_is_needed(call.q.device):
        return _run(backend, call)
    with device_guard(call.q.device):
        return _run(backend, call)


def _run(backend: Backend, call: AttentionCall) -> AttentionResult:
    reason = key_count_reason(backend, call)
    return backend.run(call) if reason is None else run_elsewhere(call, reason)
