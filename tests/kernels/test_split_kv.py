"""Attention to parts of the keys, merged: Triton against the reference, and the reference against all keys at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kernels import split_kv_cases
from triton_interpreter import interpret, needs_triton

from diffusion_runtime.attention.backends.reference import reference_attention
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.kernels.split_kv import merge_parts

CASES = Path(__file__).with_name("split_kv_cases.py")


@needs_triton
def test_triton_under_its_interpreter_equals_the_reference() -> None:
    assert interpret(CASES).strip() == ""


@pytest.mark.gpu
def test_triton_on_a_gpu_is_no_further_from_float64_than_the_reference() -> None:
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)):
        assert split_kv_cases.failures(dtype, "cuda", bound=bound) == []


def test_parts_merged_are_attention_to_all_keys() -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 5, 3, 8, dtype=torch.float64)
    k, v = torch.randn(2, 2, 12, 3, 8, dtype=torch.float64)
    expected, expected_lse = reference_attention(q, k, v)
    parts = [
        reference_attention(q[i : i + 1], k[i : i + 1, j : j + 4], v[i : i + 1, j : j + 4])
        for i in range(2)
        for j in (0, 4, 8)
    ]
    out = torch.empty_like(q)
    lse = merge_parts(torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts]), out)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(lse, expected_lse.to(lse.dtype), rtol=0, atol=1e-6)


def test_parts_of_other_shapes_are_refused() -> None:
    out = torch.empty(2, 5, 3, 8)
    with pytest.raises(ConfigError, match=r"expected parts \[2 \* parts, 5, 3, 8\].*got \[6, 5, 3, 4\]"):
        merge_parts(torch.empty(6, 5, 3, 4), torch.empty(6, 3, 5), out)
    with pytest.raises(ConfigError, match=r"\[2 \* parts, 3, 5\].*and \[6, 5, 3\]"):
        merge_parts(torch.empty(6, 5, 3, 8), torch.empty(6, 5, 3), out)
