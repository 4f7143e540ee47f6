"""The Gluon kernel for Hopper: what it refuses, and on a GPU against the reference. That it compiles is
test_compiled_for_gpus.py's."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch
from kernels.block_sparse_cases import LAYOUTS, check_in_place, check_poisoned_values, errors, plan_of
from sparse_oracle import random_qkv
from sparse_plans import tile_plan
from tables import table

from diffusion_runtime.attention import SparsePlan, TokenLayout
from diffusion_runtime.core.hardware import Hardware
from diffusion_runtime.kernels.block_sparse import gluon
from diffusion_runtime.kernels.block_sparse.api import block_sparse_attention
from diffusion_runtime.kernels.block_sparse.expected import PlanForm, expected_implementation
from diffusion_runtime.kernels.block_sparse.triton import block_sparse_triton

HOPPER = Hardware("cuda", "NVIDIA H200", (9, 0), packages={"triton": "3.6.0"})


def _changed(changes: dict[str, object]) -> SparsePlan:
    plan = plan_of("tiles", LAYOUTS["suffix"])
    return dataclasses.replace(plan, **changes)


@table(
    ("refused", "plan", "dtype", "head_dim"),
    [
        (None, plan_of("tiles", LAYOUTS["suffix"]), torch.bfloat16, 128),
        (None, plan_of("small tiles", LAYOUTS["prefix"]), torch.float16, 40),
        ("takes bfloat16 and float16, not torch.float32", _changed({}), torch.float32, 128),
        ("takes head sizes from 33 to 128, not 32", _changed({}), torch.bfloat16, 32),
        ("takes head sizes from 33 to 128, not 192", _changed({}), torch.bfloat16, 192),
        ("needs blocks of at most 64 tokens", plan_of("clusters", LAYOUTS["grid"]), torch.bfloat16, 128),
        ("supports no row masks", plan_of("row mask", LAYOUTS["grid"]), torch.bfloat16, 128),
        (
            "pools no keys: plans with a pooled tail run on triton, gathered and reference",
            _changed({"pooled_tail": True}),
            torch.bfloat16,
            128,
        ),
    ],
)
def test_it_refuses_what_it_cannot_compute(
    refused: str | None, plan: SparsePlan, dtype: torch.dtype, head_dim: int
) -> None:
    q = torch.empty(1, 1, 1, head_dim, dtype=dtype)
    assert gluon.refusal_of_plan(q, plan) == refused
    if not torch.cuda.is_available():
        assert gluon.refusal(q, plan) == "needs a CUDA GPU, the tensors are on cpu"


@table(
    ("version", "refused"),
    [
        ("3.6.0", None),
        ("3.7.1", None),
        ("3.5.1", "is written for the Gluon of triton 3.6 and 3.7, not of 3.5.1"),
        ("4.0.0", "is written for the Gluon of triton 3.6 and 3.7, not of 4.0.0"),
        # Builds of torch's nightlies and of release candidates.
        ("3.6.0+git9844da95", None),
        ("3.8rc1", "is written for the Gluon of triton 3.6 and 3.7, not of 3.8rc1"),
    ],
)
def test_a_triton_with_another_gluon_is_passed_over(
    version: str, refused: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pytest.importorskip("triton"), "__version__", version)
    gluon.package_refusal.cache_clear()
    try:
        assert gluon.package_refusal() == refused
        form = PlanForm(40_000, 37_296, 660, None, 64)
        named = expected_implementation(HOPPER, torch.bfloat16, 128, form)
        assert named == ("gluon" if refused is None else "triton")
        assert expected_implementation(HOPPER, torch.bfloat16, 128, form._replace(pooled_tail=True)) == "triton"
        assert expected_implementation(HOPPER, torch.bfloat16, 128, form._replace(largest_block=128)) == "triton"
    finally:
        gluon.package_refusal.cache_clear()


def test_a_triton_that_cannot_be_imported_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gluon, "import_failure", lambda _: "OSError: libcuda.so.1")
    gluon.package_refusal.cache_clear()
    try:
        assert gluon.package_refusal() == "needs Triton: OSError: libcuda.so.1"
    finally:
        gluon.package_refusal.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("place", list(LAYOUTS))
@pytest.mark.parametrize("kind", ["tiles", "small tiles"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernel_on_a_gpu(place: str, kind: str, dtype: torch.dtype) -> None:
    for head_dim in (40, 64, 96, 128):
        errors(kind, LAYOUTS[place], head_dim, dtype, None, 0.2, "cuda", attend=gluon.block_sparse_gluon)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_scales_that_are_not_positive_on_a_gpu(scale: float) -> None:
    attend = gluon.block_sparse_gluon
    errors("tiles", LAYOUTS["grid"], 64, torch.bfloat16, None, scale, "cuda", gated=False, attend=attend)


@pytest.mark.gpu
@pytest.mark.parametrize("text", [0, 30, 64, 200])
def test_lists_longer_than_the_ring_on_a_gpu(text: int) -> None:
    """Odd last tiles, lists of every length from none on, and texts of whole tiles, of less and of more."""
    layout = TokenLayout((9, 10, 11), num_suffix_tokens=text)
    plan = tile_plan(layout, (4, 4, 4), heads=4, kv_heads=2, smallest=0)
    every = torch.arange(plan.kv.num_blocks, dtype=torch.int32).expand(*plan.kv_count.shape, -1).contiguous()
    counts = torch.arange(plan.q.num_blocks, dtype=torch.int32).expand_as(plan.kv_count).contiguous()
    plan = dataclasses.replace(plan, kv_index=every, kv_count=counts).to("cuda")
    q, k, v = (x.cuda().bfloat16() for x in random_qkv(layout, num_heads=4, num_kv_heads=2, head_dim=128))
    result = block_sparse_attention(q, k, v, plan, return_lse=True)
    assert result.implementation == "gluon"
    expected, lse = block_sparse_triton(q, k, v, plan, scale=128**-0.5)
    torch.testing.assert_close(result.out, expected, rtol=2**-7, atol=1e-3)
    torch.testing.assert_close(result.lse, lse, rtol=1e-5, atol=1e-4)
    assert torch.equal(result.out, block_sparse_attention(q, k, v, plan).out)


@pytest.mark.gpu
def test_tokens_in_order_are_read_in_place_on_a_gpu() -> None:
    for head_dim, dtype in ((64, torch.float16), (128, torch.bfloat16)):
        check_in_place(None, dtype, head_dim, "cuda", gluon.block_sparse_gluon)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["tiles", "small tiles"])
def test_values_that_are_not_finite_reach_who_sees_them_on_a_gpu(kind: str) -> None:
    check = partial(check_poisoned_values, attend=gluon.block_sparse_gluon, head_dim=64, dtype=torch.bfloat16)
    check(kind, LAYOUTS["suffix"], None, "cuda")
