"""flex_attn on this CPU, compiled. Each form compiles for ten seconds and more, so there are few."""

from __future__ import annotations

import logging
import shutil

import pytest
import torch
from exact_attention import LAYOUTS, assert_is_exact, exact, visible_by

from diffusion_runtime.attention import attention
from diffusion_runtime.attention.backends.flex_attn import causal_blocks
from diffusion_runtime.errors import BackendUnavailableError

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="flex_attn compiles with g++")


@needs_compiler
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kv_heads", "scale", "causal", "layout_names"),
    [(4, None, False, list(LAYOUTS)), (2, 0.3, False, ["prefix"]), (4, None, True, ["none", "suffix"])],
)
def test_against_float64(
    kv_heads: int, scale: float | None, causal: bool, layout_names: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "diffusion_runtime.attention")
    for layout_name in layout_names:
        torch.manual_seed(0)
        layout = LAYOUTS[layout_name]
        q = torch.randn(3, 17, 4, 16)
        k, v = torch.randn(2, 3, 17, kv_heads, 16)
        visible = visible_by(layout, 3, 17, causal)
        unseen = ~visible.any(dim=1)
        k[unseen], v[unseen] = 1e4, float("nan")
        out = attention(q, k, v, backend="flex_attn", layout=layout, scale=scale, causal=causal)
        assert_is_exact(out, None, exact(q, k, v, visible, 0.25 if scale is None else scale))
    assert len([line for line in caplog.messages if line.startswith("flex_attn compiles")]) <= len({causal, False})


@needs_compiler
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_never_falls_back_to_the_unfused_code() -> None:
    torch.manual_seed(1)
    for heads in range(1, 11):
        q = torch.randn(1, 20, heads, 16)
        out = attention(q, q, q, backend="flex_attn")
        assert torch.allclose(out, attention(q, q, q, backend="reference"), atol=1e-5)


@needs_compiler
def test_its_compiled_kernel_runs_here() -> None:
    """One form, so that the fast tests see the real thing too: some ten seconds where nothing is cached."""
    torch.manual_seed(2)
    layout = LAYOUTS["suffix"]
    q, k, v = torch.randn(3, 3, 17, 2, 64)
    out = attention(q, k, v, backend="flex_attn", layout=layout)
    assert_is_exact(out, None, exact(q, k, v, visible_by(layout, 3, 17, False), 0.125))


def test_a_cpu_gives_no_log_sum_exp() -> None:
    q = torch.randn(1, 4, 2, 16)
    with pytest.raises(BackendUnavailableError, match=r"cannot do lse|no C\+\+ compiler"):
        attention(q, q, q, backend="flex_attn", return_lse=True)


@pytest.mark.parametrize("seq", [1, 127, 128, 129, 1000])
def test_causal_blocks_are_the_lower_triangle(seq: int) -> None:
    blocks = causal_blocks(seq, torch.device("cpu"))
    rows = -(-seq // 128)
    assert blocks.shape == (1, 1, seq, seq)
    assert torch.equal(blocks.to_dense()[0, 0].bool(), torch.ones(rows, rows, dtype=torch.bool).tril())
    assert blocks.full_kv_num_blocks is not None
    assert blocks.full_kv_num_blocks.flatten().tolist() == list(range(rows))
