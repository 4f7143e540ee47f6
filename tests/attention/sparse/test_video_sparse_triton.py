"""Video Sparse Attention on its Triton kernels, whole: interpreted on a CPU, compiled on a GPU.

The interpreter must be chosen before Triton is imported, so this file runs itself in a process of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from attention_calls import attention_call
from sparse_oracle import masked_attention, pooled_attention, random_qkv
from triton_interpreter import interpret, needs_triton

from diffusion_runtime.attention import (
    RequestCache,
    TokenLayout,
    attention,
    plan_attention,
)
from diffusion_runtime.attention.sparse.tiles import tile_geometry
from diffusion_runtime.attention.sparse.video_sparse import (
    VideoSparseBackend,
    VideoSparseOptions,
    attend_tiles,
    tile_means,
)
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.kernels.block_sparse import gluon, pooled_tail
from diffusion_runtime.kernels.block_sparse.plan import PooledBranch, add_branch

# Ragged on every axis; tiles of 128 leave rests of 1 to 64 queries.
GRID = TokenLayout((5, 6, 11))
TEXT = TokenLayout((3, 5, 9), num_suffix_tokens=19, valid_lengths=(0, 18))


def compare(
    layout: TokenLayout,
    tile: tuple[int, int, int],
    dtype: torch.dtype,
    head_dim: int,
    device: str,
    *,
    gated: bool,
    tail: str = "none",
) -> None:
    """A whole call against float64 attention on its own plan, plus the gated branch. Means of tiles are computed once,
    in the pass that packs."""
    drawn = random_qkv(layout, batch=2, num_heads=2, num_kv_heads=1, head_dim=head_dim, dtype=dtype)
    q, k, v = (x.to(device) for x in drawn)
    gate = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(device, dtype) if gated else None
    options: dict[str, Any] = {"sparsity": 0.6, "tile_size": tile, "tail": tail}
    plan = plan_attention(q, k, backend="vsa", options=options, layout=layout)
    state = RequestCache()
    call = attention_call(
        q, k, v, VideoSparseOptions(**options), layout=layout, state=state, return_lse=True, gate=gate
    )
    with mock.patch.object(pooled_tail, "block_means", side_effect=AssertionError("averaged again")):
        result = VideoSparseBackend().run(call)
    kernel = "gluon" if tail == "none" and gluon.refusal(q, plan) is None else "triton"
    assert result.implementation == f"block-sparse {kernel}{', pooled tail' if tail == 'pooled' else ''}"
    if tail == "pooled":
        expected, lse = (x.to(device) for x in pooled_attention(q.cpu(), k.cpu(), v.cpu(), plan.to("cpu")))
    else:
        expected, lse = masked_attention(q, k, v, plan.to_dense_mask())
    if gate is not None:
        means = tile_means(q, k, v, tile_geometry(layout, tile, device))
        coarse = attend_tiles(means, scale=head_dim**-0.5, num_kept=None)
        assert coarse.pooled is not None
        expected = add_branch(expected, plan, PooledBranch(coarse.pooled, gate))
    rounding = max(1e-6, 4 * torch.finfo(dtype).eps)
    assert ((result.out.double() - expected).norm() / expected.norm()) < rounding
    assert result.lse is not None
    finite = lse.isfinite()
    assert torch.equal(result.lse.isfinite(), finite)
    torch.testing.assert_close(result.lse.double()[finite], lse[finite], atol=10 * rounding, rtol=0)


def refuse_gradients(device: str) -> None:
    """While gradients are recorded, the kernel would lose those of its inputs."""
    layout = TokenLayout((1, 4, 5))
    q, k, v = (x.to(device).requires_grad_() for x in random_qkv(layout, num_heads=1, head_dim=16))
    arguments: dict[str, Any] = {"backend": "vsa", "options": {"sparsity": 0.5}, "layout": layout}
    with pytest.raises(ConfigError, match="by triton computes no gradients, and q, k, v require them"):
        attention(q, k, v, **arguments)
    with torch.no_grad():
        assert attention(q, k, v, **arguments).isfinite().all()


def run_cases() -> None:
    refuse_gradients("cpu")
    compare(GRID, (4, 4, 8), torch.float16, 16, "cpu", gated=True)
    compare(TEXT, (4, 8, 8), torch.float32, 16, "cpu", gated=False)
    compare(TEXT, (4, 4, 4), torch.float32, 16, "cpu", gated=True, tail="pooled")
    print("ok")


@needs_triton
def test_a_call_under_the_interpreter() -> None:
    assert interpret(Path(__file__)).endswith("ok\n")


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("tile", [(4, 4, 4), (4, 4, 8), (4, 8, 8)])
@pytest.mark.parametrize("layout", [GRID, TEXT, TokenLayout((9, 14, 20))], ids=["grid", "text", "larger"])
def test_a_call_on_a_gpu(layout: TokenLayout, tile: tuple[int, int, int], *, gated: bool) -> None:
    compare(layout, tile, torch.bfloat16, 128, "cuda", gated=gated)
    compare(layout, tile, torch.float16, 72, "cuda", gated=gated)
    compare(layout, tile, torch.bfloat16, 128, "cuda", gated=gated, tail="pooled")


@pytest.mark.gpu
def test_gradients_are_refused_on_a_gpu() -> None:
    refuse_gradients("cuda")


@pytest.mark.gpu
def test_a_call_waits_for_nothing_and_repeats_to_the_bit() -> None:
    q, k, v = (x.cuda() for x in random_qkv(TEXT, batch=2, num_heads=2, head_dim=128, dtype=torch.bfloat16))
    options = VideoSparseOptions(sparsity=0.6, tile_size=(4, 4, 8))
    call = attention_call(q, k, v, options, layout=TEXT, gate=v)
    first = VideoSparseBackend().run(call).out
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        second = VideoSparseBackend().run(call).out
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(first, second)


if __name__ == "__main__":
    run_cases()
