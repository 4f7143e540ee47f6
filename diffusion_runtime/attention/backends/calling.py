"""The one place where a backend is called: on the device of its tensors, outside autocast."""

from __future__ import annotations

from diffusion_runtime.attention.backends.interface import AttentionCall, AttentionResult, Backend
from diffusion_runtime.device_guard import device_guard, guard_is_needed


def run_backend(backend: Backend, call: AttentionCall) -> AttentionResult:
    """One call that selection has checked. out has q's dtype, whatever autocast would make of its products."""
    if not guard_is_needed(call.q.device):
        return backend.run(call)
    with device_guard(call.q.device):
        return backend.run(call)
