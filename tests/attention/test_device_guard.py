"""Autocast and torch.set_default_device change nothing that attention specifies; a second GPU serves its own calls."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from sparse_oracle import CASES, random_qkv
from tables import table

from diffusion_runtime.attention import LocalAttention, TokenLayout, attention, plan_attention
from diffusion_runtime.core.device_guard import device_guard, guard_is_needed

LAYOUT = TokenLayout((5, 6, 7), num_suffix_tokens=9, valid_lengths=(4,))
DENSE = ("torch_sdpa", "reference")


@pytest.fixture
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def results(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """out and log-sum-exp of every backend that needs no package, and the plan of every sparse one."""
    q, k, v = random_qkv(LAYOUT, num_heads=4, num_kv_heads=2, head_dim=16, dtype=dtype)
    found: dict[str, torch.Tensor] = {}
    for name in DENSE:
        found[name] = attention(q, k, v, backend=name, layout=LAYOUT)
        found[f"{name} with lse"], found[f"{name} lse"] = attention(
            q, k, v, backend=name, layout=LAYOUT, return_lse=True
        )
    for name, case in CASES.items():
        arguments = case.arguments(LAYOUT)
        found[name], found[f"{name} lse"] = attention(q, k, v, return_lse=True, **arguments)
        found[f"{name} plan"] = plan_attention(q, k, **arguments).to_dense_mask()
    found["layer"] = LocalAttention(4, 16, 2)(q, k, v)
    return found


@table("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_no_bit(dtype: torch.dtype) -> None:
    expected = results(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = results(dtype)
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    assert [name for name in expected if found[name].dtype != expected[name].dtype] == []


def test_a_default_device_changes_no_bit(default_device: None) -> None:
    # Geometries are kept per layout: another grid than above is built under the default device.
    layout = TokenLayout((4, 6, 5))
    with torch.device("cpu"):
        q, k, v = random_qkv(layout, num_heads=4, head_dim=16)
    for name, case in CASES.items():
        assert attention(q, k, v, **case.arguments(layout)).isfinite().all(), name
    assert attention(q, k, v, backend="reference", layout=layout).device.type == "cpu"


def test_the_guard_is_entered_only_where_it_changes_something() -> None:
    cpu = torch.device("cpu")
    assert not guard_is_needed(cpu)
    assert not guard_is_needed(torch.device("meta"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert guard_is_needed(cpu)
        with device_guard(cpu):
            assert not guard_is_needed(cpu)
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
        assert guard_is_needed(cpu)


@pytest.mark.multi_gpu
def test_a_second_gpu_serves_its_own_calls() -> None:
    """With the first GPU current, every backend's result on the second equals that on the first."""
    layout = TokenLayout((8, 16, 16))
    q, k, v = (x.bfloat16() for x in random_qkv(layout, num_heads=4, head_dim=64))
    dense = {name: {"backend": name, "layout": layout} for name in ("torch_sdpa", "fa", "cudnn_attn")}
    for name, arguments in {**dense, **{name: case.arguments(layout) for name, case in CASES.items()}}.items():
        outs = []
        for device in ("cuda:0", "cuda:1"):
            outs.append(attention(q.to(device), k.to(device), v.to(device), **arguments))
            assert torch.cuda.current_device() == 0
        assert outs[1].device == torch.device("cuda:1")
        torch.testing.assert_close(outs[1].cpu(), outs[0].cpu(), msg=name)
