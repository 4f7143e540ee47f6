"""Every dense backend that runs on this CUDA GPU, against float64; and that the report names the kernel that ran."""

from __future__ import annotations

import pytest
import torch

from diffusion_runtime.attention import AttentionContext, AttentionPolicy, LocalAttention, TokenLayout, attention
from diffusion_runtime.attention.backends.interface import NoOptions
from diffusion_runtime.attention.backends.reference import reference_attention
from diffusion_runtime.attention.backends.registry import available_names, find_backend
from diffusion_runtime.errors import BackendUnavailableError

pytestmark = pytest.mark.gpu

DENSE = [name for name in available_names() if (backend := find_backend(name)) and backend.options_type is NoOptions]
# Backends that compute in fewer bits by design, and what their papers leave as relative error on random inputs.
QUANTISED = {"sage_attn": 0.06, "sage_attn_3": 0.3}
GRID = (1, 16, 16)
LAYOUTS = {
    "none": None,
    "before": TokenLayout(GRID, num_prefix_tokens=44, valid_lengths=(44, 5, 0)),
    "after": TokenLayout(GRID, num_suffix_tokens=44, valid_lengths=(44, 5, 0)),
    "equal": TokenLayout(GRID, num_prefix_tokens=44, valid_lengths=(7, 7, 7)),
    "text": TokenLayout.text(300, (300, 1, 0)),
}


def visible_keys(layout: TokenLayout | None) -> torch.Tensor | None:
    """bool [batch, seq], True for keys that may be attended to."""
    if layout is None:
        return None
    visible = torch.zeros(3, 300, dtype=torch.bool, device="cuda")
    for sample in range(3):
        for start, stop in layout.key_ranges(sample):
            visible[sample, start:stop] = True
    return visible


def attend_or_skip(name: str, *tensors: torch.Tensor, **arguments: object) -> tuple[torch.Tensor, torch.Tensor | None]:
    """out and lse of a backend; the test is skipped with its reason where the backend refuses the call."""
    try:
        result = attention(*tensors, backend=name, **arguments)  # type: ignore[call-overload]
    except BackendUnavailableError as error:
        pytest.skip("; ".join(dict.fromkeys(reason for _, reason in error.reasons)))
    return result if isinstance(result, tuple) else (result, None)


def check(name: str, dtype: torch.dtype, head_dim: int, layout_name: str = "none", **arguments: object) -> None:
    torch.manual_seed(0)
    kv_heads = arguments.pop("kv_heads", 4)
    layout = LAYOUTS[layout_name]
    # Cut out of a fused tensor, as a projection leaves them.
    q, k, v = torch.randn(3, 300, 3, 4, head_dim, device="cuda", dtype=dtype).unbind(2)
    k, v = k[:, :, :kv_heads], v[:, :, :kv_heads]  # type: ignore[misc]
    visible = visible_keys(layout)
    scale, causal = arguments.get("scale"), bool(arguments.get("causal", False))
    exact = {"visible": visible, "scale": scale, "causal": causal}
    expected, expected_lse = reference_attention(q.double(), k.double(), v.double(), **exact)  # type: ignore[arg-type]
    rounded, _ = reference_attention(q, k, v, **exact)  # type: ignore[arg-type]
    if visible is not None:
        k[~visible], v[~visible] = 1e4, float("nan")
    before = [x.clone() for x in (q, k, v)]
    out, lse = attend_or_skip(name, q, k, v, layout=layout, **arguments)
    assert out.dtype == dtype
    error, floor = (float((x.double() - expected).norm() / expected.norm()) for x in (out, rounded))
    assert error < QUANTISED.get(name, 3 * floor + 1e-3), (error, floor)
    assert (out[expected.abs().sum(-1) == 0] == 0).all()
    if lse is not None:
        assert lse.shape == expected_lse.shape
        assert lse.dtype == torch.float32
        assert torch.equal(lse == float("-inf"), expected_lse == float("-inf"))
        finite = expected_lse > float("-inf")
        assert (lse[finite] - expected_lse[finite]).abs().max() < (0.1 if name in QUANTISED else 2e-2)
    for x, was in zip((q, k, v), before, strict=True):
        assert torch.equal(x.nan_to_num(), was.nan_to_num())


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 72, 96, 128, 256])
def test_dtypes_and_head_sizes(name: str, dtype: torch.dtype, head_dim: int) -> None:
    check(name, dtype, head_dim)


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("layout_name", LAYOUTS)
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_padding(name: str, layout_name: str, return_lse: bool, causal: bool) -> None:
    check(name, torch.bfloat16, 128, layout_name, return_lse=return_lse, causal=causal)


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("layout_name", ["none", "before"])
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("scale", [None, 0.2])
def test_grouped_queries_and_scales(name: str, layout_name: str, return_lse: bool, scale: float | None) -> None:
    check(name, torch.bfloat16, 64, layout_name, kv_heads=2, return_lse=return_lse, scale=scale)


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("seq_k", [1, 77, 512])
def test_cross_attention(name: str, seq_k: int) -> None:
    torch.manual_seed(1)
    q = torch.randn(2, 1000, 4, 128, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 2, seq_k, 4, 128, device="cuda", dtype=torch.bfloat16)
    expected, _ = reference_attention(q.double(), k.double(), v.double())
    out, _ = attend_or_skip(name, q, k, v)
    error = float((out.double() - expected).norm() / expected.norm())
    assert error < QUANTISED.get(name, 1e-2)


@pytest.mark.parametrize("name", DENSE)
def test_a_video_sized_call_equals_torch(name: str) -> None:
    """Lengths of a real model, past every tile size, in bfloat16."""
    torch.manual_seed(2)
    layout = TokenLayout((5, 30, 52), num_suffix_tokens=256, valid_lengths=(31, 200))
    q, k, v = torch.randn(3, 2, 8056, 4, 128, device="cuda", dtype=torch.bfloat16)
    out, _ = attend_or_skip(name, q, k, v, layout=layout)
    expected = attention(q, k, v, backend="torch_sdpa", layout=layout).double()
    assert float((out.double() - expected).norm() / expected.norm()) < QUANTISED.get(name, 1e-2)


def test_the_report_names_the_kernel_that_ran() -> None:
    q = torch.randn(1, 2048, 8, 128, device="cuda", dtype=torch.bfloat16)
    policy = AttentionPolicy(device="cuda", dtype=torch.bfloat16, environment="torch_sdpa")
    layer = LocalAttention(8, 128, policy=policy)
    context = AttentionContext()
    layer(q, q, q, context)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        layer(q, q, q, context)
    operators = {event.key for event in profile.key_averages()}
    (row,) = context.recorder.report().rows
    assert any(row.implementation in operator for operator in operators), (row, operators)
    assert row.count == 2
