"""Gathered attention: under the interpreter on a CPU (in its own process), compiled on a GPU; row masks in torch."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from kernels.gathered_cases import LARGE, ROW, SMALL, check, check_lists, check_poisoned_values, gathered_plan
from sparse_oracle import random_qkv
from sparse_plans import row_mask_plan
from triton_interpreter import interpret, needs_triton

from diffusion_runtime.attention import TokenLayout
from diffusion_runtime.kernels.block_sparse.api import block_sparse_attention, refusal
from diffusion_runtime.kernels.block_sparse.gathered import block_sparse_gathered
from diffusion_runtime.kernels.block_sparse.row_masks import count_rows, listed_blocks, packed_bits, unpacked_bits


@needs_triton
def test_kernels_under_the_interpreter() -> None:
    assert interpret(Path(__file__).with_name("gathered_cases.py")).endswith("ok\n")


def test_bits_are_packed_counted_and_listed() -> None:
    selected = torch.rand(2, 54, 70, generator=torch.Generator().manual_seed(0)) < 0.1
    selected[:, :, 31], selected[1] = True, selected[1].logical_not()
    mask = packed_bits(selected)
    assert mask.shape == (2, 54, 3)
    assert torch.equal(unpacked_bits(mask, 70), selected)
    geometry = gathered_plan(SMALL).q
    of_blocks, of_rows = count_rows(mask, geometry, 70)
    assert torch.equal(of_rows, selected.sum(dim=-1, dtype=torch.int32))
    offsets = geometry.offsets[0].tolist()
    count, index = listed_blocks(of_blocks)
    for group in range(2):
        for block in range(geometry.num_blocks):
            rows = selected[group, offsets[block] : offsets[block + 1]]
            assert of_blocks[group, block].tolist() == rows.sum(dim=0).tolist()
            listed = rows.any(dim=0).nonzero()[:, 0].tolist()
            assert index[group, block, : int(count[group, block])].tolist() == listed


@pytest.mark.gpu
def test_refusals_say_what_is_missing() -> None:
    q = torch.zeros(2, 54, 2, 16, device="cuda")
    plan = gathered_plan(SMALL)
    assert refusal("gathered", q, plan) is None
    unbounded = dataclasses.replace(plan, max_blocks_per_query=None)
    assert "that a query sees at most" in str(refusal("gathered", q, unbounded))
    text = TokenLayout(SMALL.grid, num_suffix_tokens=3)
    with_text = dataclasses.replace(row_mask_plan(text, (2, 2, 4)), max_blocks_per_query=9)
    assert refusal("gathered", q, with_text) == "supports no text beside the grid"


def test_a_cpu_is_refused() -> None:
    plan = gathered_plan(SMALL)
    assert refusal("gathered", torch.zeros(2, 54, 2, 16), plan) == "needs a CUDA GPU, the tensors are on cpu"
    q, k, v = random_qkv(SMALL, batch=2, num_heads=2, num_kv_heads=1, head_dim=16)
    assert block_sparse_attention(q, k, v, plan).implementation == "reference"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("tile", "head_dim"), [((2, 2, 4), 64), ((5, 6, 7), 128), ((3, 12, 14), 72)])
def test_kernels_on_a_gpu(dtype: torch.dtype, tile: tuple[int, int, int], head_dim: int) -> None:
    plan = gathered_plan(LARGE, tile)
    whole = check(plan, LARGE, head_dim=head_dim, dtype=dtype, device="cuda")
    parts = check(plan, LARGE, head_dim=head_dim, dtype=dtype, device="cuda", budget=ROW * 100)
    assert torch.equal(whole[0], parts[0])


@pytest.mark.gpu
def test_values_that_are_not_finite_reach_who_sees_them_on_a_gpu() -> None:
    check_poisoned_values(gathered_plan(LARGE), LARGE, None, "cuda")


@pytest.mark.gpu
def test_lists_on_a_gpu_are_those_of_single_operations() -> None:
    check_lists("cuda")


@pytest.mark.gpu
def test_kernels_wait_for_nothing() -> None:
    """No host synchronisation, and the same bits twice."""
    plan = gathered_plan(LARGE).to("cuda")
    q, k, v = (x.cuda().bfloat16() for x in random_qkv(LARGE, batch=2, num_heads=2, num_kv_heads=1, head_dim=64))
    first = block_sparse_gathered(q, k, v, plan, scale=0.1)[0]
    assert block_sparse_attention(q, k, v, plan).implementation == "gathered"
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        second = block_sparse_gathered(q, k, v, plan, scale=0.1)[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(first, second)
