"""The Triton kernel: under the interpreter on a CPU (in a process of its own), compiled on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kernels.block_sparse_cases import LAYOUTS, check_in_place, check_poisoned_values, errors, plan_of
from sparse_oracle import random_qkv
from triton_interpreter import interpret, needs_triton

from diffusion_runtime.kernels.block_sparse import flash4
from diffusion_runtime.kernels.block_sparse.api import block_sparse_attention
from diffusion_runtime.kernels.block_sparse.triton import TileShape, refusal


@needs_triton
def test_kernel_under_the_interpreter() -> None:
    assert interpret(Path(__file__).with_name("block_sparse_cases.py")).endswith("ok\n")


def test_refusals_say_what_is_missing() -> None:
    plan = plan_of("tiles", LAYOUTS["grid"])
    q, _, _ = random_qkv(LAYOUTS["grid"], batch=2, num_heads=2)
    if torch.cuda.is_available():
        assert refusal(q.cuda().double(), plan) == "takes bfloat16, float16 and float32, not torch.float64"
        assert "equal size" in str(flash4.refusal(q.cuda().bfloat16().repeat(1, 1, 1, 8), plan))
    else:
        assert refusal(q, plan) == "needs a CUDA GPU, the tensors are on cpu"
        assert flash4.refusal(q, plan) == "needs a CUDA GPU, the tensors are on cpu"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["tiles", "small tiles", "clusters", "row mask"])
@pytest.mark.parametrize("place", list(LAYOUTS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_kernel_on_a_gpu(place: str, kind: str, dtype: torch.dtype) -> None:
    errors(kind, LAYOUTS[place], 64, dtype, None, 0.2, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["tiles", "small tiles", "clusters", "row mask"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_pooled_tail_on_a_gpu(kind: str, dtype: torch.dtype) -> None:
    for head_dim in (64, 128):
        errors(kind, LAYOUTS["suffix"], head_dim, dtype, None, 0.2, "cuda", pooled_tail=True)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_tokens_in_order_are_read_in_place_on_a_gpu(head_dim: int) -> None:
    check_in_place(None, torch.bfloat16, head_dim, "cuda")
    check_in_place(TileShape(64, 64, 4, 2, bulk=False), torch.float16, head_dim, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["tiles", "small tiles", "clusters", "row mask"])
def test_values_that_are_not_finite_reach_who_sees_them_on_a_gpu(kind: str) -> None:
    check_poisoned_values(kind, LAYOUTS["suffix"], None, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [16, 72, 80, 96, 128, 256])
def test_head_sizes_on_a_gpu(head_dim: int) -> None:
    errors("clusters", LAYOUTS["suffix"], head_dim, torch.bfloat16, None, head_dim**-0.5, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("bulk", [True, False])
@pytest.mark.parametrize(("rows", "piece", "warps"), [(64, 64, 4), (128, 64, 8), (128, 128, 8)])
def test_tile_shapes_on_a_gpu(rows: int, piece: int, warps: int, bulk: bool) -> None:
    errors("clusters", LAYOUTS["suffix"], 128, torch.bfloat16, TileShape(rows, piece, warps, 2, bulk), 0.09, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["tiles", "clusters", "row mask"])
def test_kernel_waits_for_nothing(kind: str) -> None:
    """No host synchronisation, and the same bits twice."""
    layout = LAYOUTS["suffix"]
    plan = plan_of(kind, layout).to("cuda")
    q, k, v = (x.cuda().bfloat16() for x in random_qkv(layout, batch=2, num_heads=2, num_kv_heads=1, head_dim=64))
    first = block_sparse_attention(q, k, v, plan).out
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        second = block_sparse_attention(q, k, v, plan).out
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(first, second)
