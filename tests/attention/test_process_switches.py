"""A call changes nothing that other threads of the process see: torch's kernel switches, dynamo's settings."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_calls import attention_call

from diffusion_runtime.attention import AttentionCall, attention
from diffusion_runtime.attention.backends import flex_attn, torch_sdpa
from diffusion_runtime.attention.backends.registry import find_backend


def switches() -> tuple[object, ...]:
    """What `sdpa_kernel`, `torch._dynamo.config.patch` and their like change."""
    import torch._dynamo

    return (
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
        tuple(torch._C._get_sdp_priority_order()),
        torch._dynamo.config.recompile_limit,
        torch._dynamo.config.accumulated_recompile_limit,
        torch.get_default_dtype(),
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.benchmark,
        torch.are_deterministic_algorithms_enabled(),
    )


def call_of(q: torch.Tensor, **changed: Any) -> AttentionCall:
    return attention_call(q, q, q, **changed)


@contextlib.contextmanager
def kernel(monkeypatch: pytest.MonkeyPatch, seen: list[tuple[object, ...]]) -> Iterator[None]:
    """cuDNN's operator as a CPU stands in for it: it looks at the switches, and torch's flash kernel computes."""

    def operator(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: Any,
        lse: bool,
        dropout: float,
        causal: bool,
        **scale: Any,
    ) -> Any:
        seen.append(switches())
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, dropout, causal, attn_mask=bias, **scale
        )

    with monkeypatch.context() as patched:
        patched.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", operator)
        yield


def test_cudnn_switches_no_kernel_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread's call would meet torch with every kernel but cuDNN's switched off."""
    backend = find_backend("cudnn_attn")
    assert backend is not None
    q = torch.randn(2, 9, 4, 64, dtype=torch.bfloat16)
    forms = ({}, {"return_lse": True}, {"causal": True}, {"scale": 0.3}, {"mask": torch.ones(1, 1, 9, 9).bool()})
    before, seen = switches(), list[tuple[object, ...]]()
    with kernel(monkeypatch, seen):
        for form in forms:
            result = backend.run(call_of(q, **form))
            expected = attention(q, q, q, **{name: value for name, value in form.items() if name != "return_lse"})
            torch.testing.assert_close(result.out, expected, atol=2e-2, rtol=2e-2)
            assert (result.lse is not None) == ("return_lse" in form)
    assert seen == [before] * len(forms)


def test_flex_leaves_dynamo_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[object, ...]] = []

    def compiled(q_bhsd: torch.Tensor, *_: Any) -> torch.Tensor:
        seen.append(switches())
        return q_bhsd

    monkeypatch.setattr(torch, "compile", lambda function, **_: compiled)
    monkeypatch.setattr(flex_attn, "_compiled_forms", {})
    backend = find_backend("flex_attn")
    assert backend is not None
    before = switches()
    backend.run(call_of(torch.randn(1, 5, 2, 16)))
    assert seen == [before]


@pytest.fixture
def untold(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A device whose torch cannot say which kernel it takes, such as MPS."""
    asked = torch._C._dispatch_has_computed_kernel_for_dispatch_key
    monkeypatch.setattr(
        torch._C,
        "_dispatch_has_computed_kernel_for_dispatch_key",
        lambda name, key: name != "aten::_fused_sdp_choice" and asked(name, key),
    )

    def missing(*_: Any, **__: Any) -> int:
        raise NotImplementedError("Could not run 'aten::_fused_sdp_choice' with arguments from the 'MPS' backend.")

    monkeypatch.setattr(torch, "_fused_sdp_choice", missing)
    torch_sdpa._tells_kernel.cache_clear()
    torch_sdpa._known_kernels.clear()
    yield
    torch_sdpa._tells_kernel.cache_clear()
    torch_sdpa._known_kernels.clear()


@pytest.mark.usefixtures("untold")
def test_a_device_without_that_operator_is_served() -> None:
    backend = find_backend("torch_sdpa")
    assert backend is not None
    q = torch.randn(1, 5, 2, 16)
    result = backend.run(call_of(q))
    assert result.implementation == "torch"
    torch.testing.assert_close(result.out, attention(q, q, q, backend="reference"))


def test_torch_says_which_devices_have_it() -> None:
    """Of torch's dispatch table for this build."""
    assert torch_sdpa._tells_kernel("cpu")
    assert not torch_sdpa._tells_kernel("mps")
    assert not torch_sdpa._tells_kernel("privateuseone")


def test_the_kernel_is_asked_for_once_a_form(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_sdpa._known_kernels.clear()
    asked, choose = [0], torch._fused_sdp_choice

    def counted(*arguments: Any, **more: Any) -> int:
        asked[0] += 1
        return choose(*arguments, **more)

    monkeypatch.setattr(torch, "_fused_sdp_choice", counted)
    backend = find_backend("torch_sdpa")
    assert backend is not None

    def implementations(*sizes: int) -> set[str]:
        return {backend.run(call_of(torch.randn(1, size, 2, 16))).implementation for size in sizes}

    assert implementations(5, 5, 5) == {"flash"}
    assert asked == [1]
    implementations(6, 5, 6)
    assert asked == [2]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        # What a caller switches off is not said to have run.
        assert implementations(5) == {"math"}
    assert asked == [3]
    monkeypatch.setattr(torch_sdpa, "_MAX_KNOWN_KERNELS", 4)
    implementations(*range(20, 40))
    assert len(torch_sdpa._known_kernels) <= 4
