"""torch_sdpa on a CUDA GPU: the numbers, and that the report names the kernel that really ran."""

from __future__ import annotations

import pytest
import torch

from diffusion_runtime.attention import AttentionContext, AttentionPolicy, LocalAttention, TokenLayout, attention
from diffusion_runtime.attention.backends.reference import reference_attention

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("head_dim", [64, 72, 128])
@pytest.mark.parametrize("return_lse", [False, True])
def test_against_float64(dtype: torch.dtype, kv_heads: int, head_dim: int, return_lse: bool) -> None:
    torch.manual_seed(0)
    q = torch.randn(3, 300, 4, head_dim, device="cuda", dtype=dtype)
    k, v = torch.randn(2, 3, 300, kv_heads, head_dim, device="cuda", dtype=dtype)
    layout = TokenLayout((1, 16, 16), num_prefix_tokens=44, valid_lengths=(44, 5, 0))
    visible = torch.ones(3, 300, dtype=torch.bool, device="cuda")
    visible[1, 5:44] = visible[2, :44] = False
    expected, expected_lse = reference_attention(q.double(), k.double(), v.double(), visible=visible)
    rounded, _ = reference_attention(q, k, v, visible=visible)
    k[~visible], v[~visible] = 1e4, float("nan")
    if return_lse:
        out, lse = attention(q, k, v, layout=layout, return_lse=True)
        assert (lse - expected_lse).abs().max() < 2e-2
    else:
        out = attention(q, k, v, layout=layout)
    error, bound = ((x.double() - expected).norm() / expected.norm() for x in (out, rounded))
    assert error < 3 * bound + 1e-3


def test_the_report_names_the_kernel_that_ran() -> None:
    q = torch.randn(1, 2048, 8, 128, device="cuda", dtype=torch.bfloat16)
    layer = LocalAttention(8, 128, policy=AttentionPolicy(device="cuda", dtype=torch.bfloat16))
    context = AttentionContext()
    layer(q, q, q, context)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        layer(q, q, q, context)
    operators = {event.key for event in profile.key_averages()}
    (row,) = context.recorder.report().rows
    assert any(row.implementation in operator for operator in operators), (row, operators)
    assert row.count == 2
