"""Calls without keys or without queries: zeros and -inf, or empty tensors, from every backend and every way in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_calls import attention_call
from warm_python import run_python

from diffusion_runtime.attention import (
    AttentionCall,
    AttentionConfig,
    AttentionContext,
    AttentionPolicy,
    AttentionSpec,
    LocalAttention,
    TokenLayout,
    attention,
    list_backends,
)
from diffusion_runtime.attention.backends.calling import run_backend
from diffusion_runtime.attention.backends.registry import available_names, find_backend

# torch's CPU kernel divides by the number of keys and of queries, which ends the process.
_EVERY_BACKEND = """
import torch
from diffusion_runtime.attention import attention, list_backends
wrong = []
usable = [info for info in list_backends("cpu") if info.usable]
for info in usable:
    for num_queries, num_keys in ((3, 0), (0, 3), (0, 0)):
        q, k = torch.randn(2, num_queries, 4, 64), torch.randn(2, num_keys, 4, 64)
        for return_lse in sorted({False, "lse" in info.capability.features}):
            found = attention(q, k, k, backend=info.name, return_lse=return_lse)
            out, lse = found if return_lse else (found, None)
            right = torch.equal(out, torch.zeros_like(q))
            if return_lse:
                expected = torch.full((2, 4, num_queries), float("-inf"))
                right = right and lse.dtype == torch.float32 and torch.equal(lse, expected)
            if not right:
                wrong.append((info.name, num_queries, num_keys, return_lse))
print(len(usable), wrong)
"""


def test_every_backend_that_runs_here() -> None:
    done = run_python("-c", _EVERY_BACKEND)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-2000:]}"
    num_usable, _, wrong = done.stdout.partition(" ")
    assert int(num_usable) >= 6
    assert wrong.strip() == "[]"


def call_of(num_queries: int, num_keys: int, **changed: Any) -> AttentionCall:
    q, k = torch.randn(2, num_queries, 4, 64), torch.randn(2, num_keys, 2, 64)
    return attention_call(q, k, k, **({"options": None, "return_lse": True} | changed))


def test_no_backend_sees_such_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those whose packages are not here included."""
    for name in available_names():
        backend = find_backend(name)
        assert backend is not None
        monkeypatch.setattr(type(backend), "run", lambda self, call: pytest.fail(f"{self.name} was called"))
        for call in (call_of(3, 0), call_of(0, 3), call_of(0, 0)):
            result = run_backend(backend, call)
            assert torch.equal(result.out, torch.zeros_like(call.q))
            assert result.lse is not None
            assert torch.equal(result.lse, torch.full((2, 4, call.q.shape[1]), float("-inf")))
        assert run_backend(backend, call_of(3, 0, return_lse=False)).lse is None


def test_half_precision_gets_a_float32_log_sum_exp() -> None:
    q = torch.randn(1, 3, 2, 16, dtype=torch.bfloat16)
    out, lse = attention(q, q[:, :0], q[:, :0], return_lse=True)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)


def test_a_layer_answers_and_counts_it() -> None:
    q = torch.randn(2, 0, 4, 64)
    counted = {}
    for name in [info.name for info in list_backends("cpu") if info.usable]:
        backend = find_backend(name)
        assert backend is not None
        spec = AttentionSpec(name, backend.self_test_options)
        policy = AttentionPolicy(config=AttentionConfig(default=spec), environment=None)
        context = AttentionContext(layout=TokenLayout.text(0))
        out = LocalAttention(4, 64, policy=policy)(q, q, q, context)
        counted[name] = (list(out.shape), [row.implementation for row in context.recorder.report().rows])
    assert counted == dict.fromkeys(counted, ([2, 0, 4, 64], ["no keys"]))
    assert len(counted) >= 6
