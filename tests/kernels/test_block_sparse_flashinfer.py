"""FlashInfer's block-sparse kernel as an implementation: limits, the plan and the layout that it is given, a plan made
once. A stand-in for the package computes on the CPU; the kernel itself is a test for a GPU."""

from __future__ import annotations

import dataclasses
import gc
import sys
import types

import pytest
import torch
from sparse_oracle import masked_attention
from sparse_plans import cluster_plan, row_mask_plan, tile_plan

from diffusion_runtime.attention import SparsePlan, TokenLayout
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.kernels.block_sparse import flashinfer
from diffusion_runtime.kernels.block_sparse.api import block_sparse_attention, refusal

GRID = (4, 8, 12)
TILE = (4, 4, 4)


def plan_of(device: str = "cpu") -> SparsePlan:
    """Six blocks of 64 tokens, in the order of tiles."""
    return tile_plan(TokenLayout(GRID), TILE, batch=2, heads=3, kv_heads=3).to(device)


def inputs(device: str = "cpu") -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 384, 3, 128, generator=generator).to(device, torch.bfloat16) for _ in range(3)]


class Wrapper:
    """What FlashInfer's does, on any device. plans: how many were made."""

    plans = 0

    def __init__(self, workspace: torch.Tensor, backend: str) -> None:
        assert backend == "cake"
        assert workspace.dtype == torch.uint8

    def plan(
        self,
        mask: torch.Tensor,
        rows: torch.Tensor,
        columns: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        sm_scale: float,
        q_data_type: torch.dtype,
    ) -> None:
        assert mask.dtype == torch.bool
        assert mask.shape[0] == num_qo_heads == num_kv_heads
        assert (rows.shape, columns.shape) == (mask.shape[:2], (mask.shape[0], mask.shape[2]))
        assert (head_dim, q_data_type) == (128, torch.bfloat16)
        if not mask.any(-1).all():
            raise ValueError("empty sparse rows are not supported")
        Wrapper.plans += 1
        self._mask, self._scale = mask.repeat_interleave(64, 1).repeat_interleave(64, 2), sm_scale

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        assert all(x.is_contiguous() and x.shape == (len(self._mask), self._mask.shape[1], 128) for x in (q, k, v))
        scores = (q.float() @ k.float().mT * self._scale).masked_fill(~self._mask, float("-inf"))
        return (scores.softmax(-1) @ v.float()).to(q.dtype)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("flashinfer.sparse")
    module.VariableBlockSparseAttentionWrapper = Wrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", types.ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.sparse", module)
    monkeypatch.setattr(flashinfer, "reorder_tokens", lambda x, order: x[:, order.long()])
    monkeypatch.setattr(flashinfer, "refusal", flashinfer.refusal_of_plan)
    monkeypatch.setattr(Wrapper, "plans", 0)


@pytest.mark.usefixtures("package")
def test_blocks_of_64_in_the_order_of_the_plan() -> None:
    plan, (q, k, v) = plan_of(), inputs()
    expected, _ = masked_attention(q.float(), k.float(), v.float(), plan.to_dense_mask(), scale=0.1)
    for _ in range(2):
        result = block_sparse_attention(q, k, v, plan, scale=0.1, implementation="flashinfer")
        torch.testing.assert_close(result.out.double(), expected, atol=2e-2, rtol=2e-2)
    assert (result.implementation, result.lse) == ("flashinfer", None)
    # Made once for the plan, again for another scale, and gone with the plan.
    assert Wrapper.plans == 1
    block_sparse_attention(q, k, v, plan, scale=0.2, implementation="flashinfer")
    assert Wrapper.plans == 2
    assert len(flashinfer._planned) == 2
    del plan
    gc.collect()
    assert not flashinfer._planned


@pytest.mark.usefixtures("package")
def test_what_it_cannot_compute_is_refused() -> None:
    plan, (q, k, v) = plan_of(), inputs()
    layout, text = TokenLayout(GRID), TokenLayout(GRID, num_suffix_tokens=4)
    wide = dataclasses.replace(plan, kv_index=plan.kv_index.repeat(1, 1, 13))
    wide = dataclasses.replace(wide, kv=dataclasses.replace(wide.kv, offsets=torch.arange(0, 65 * 64 + 1, 64)[None]))
    for other, x, options, said in (
        (plan, q.float(), {}, "takes bfloat16, not torch.float32"),
        (plan, q[..., :64], {}, "takes a head size of 128, not 64"),
        (tile_plan(layout, TILE, heads=4, kv_heads=2), q, {}, "as many key heads as query heads"),
        (plan, q, {"return_lse": True}, "returns no log-sum-exp"),
        (tile_plan(text, TILE, heads=3, kv_heads=3), q, {}, "supports no text beside the grid"),
        (row_mask_plan(layout, TILE, heads=3, kv_heads=3), q, {}, "supports no row masks"),
        (cluster_plan(layout, heads=3, kv_heads=3), q, {}, "needs blocks that all heads share"),
        (tile_plan(layout, (2, 4, 4), heads=3, kv_heads=3), q, {}, "needs blocks of 64 tokens each"),
        (wide, q, {}, "takes 64 key blocks per query block, and this plan may list 65"),
    ):
        assert said in str(refusal("flashinfer", x, other, **options)), said
    with pytest.raises(ConfigError, match="'flashinfer' cannot run here: returns no log-sum-exp; use auto"):
        block_sparse_attention(q, k, v, plan, return_lse=True, implementation="flashinfer")
    empty = dataclasses.replace(plan, kv_count=torch.zeros_like(plan.kv_count))
    with pytest.raises(ConfigError, match="'flashinfer': empty sparse rows are not supported; use auto"):
        block_sparse_attention(q, k, v, empty, implementation="flashinfer")


def test_it_is_refused_without_a_gpu_and_never_chosen_by_itself() -> None:
    plan, (q, k, v) = plan_of(), inputs()
    assert refusal("flashinfer", q, plan) == "needs a CUDA GPU, the tensors are on cpu"
    assert block_sparse_attention(q, k, v, plan).implementation == "reference"


@pytest.mark.gpu
def test_the_kernel_on_a_gpu() -> None:
    plan, (q, k, v) = plan_of("cuda"), inputs("cuda")
    reason = refusal("flashinfer", q, plan)
    if reason is not None:
        pytest.skip(reason)
    exact, rounded = (
        block_sparse_attention(*(x.to(dtype) for x in (q, k, v)), plan, implementation="reference").out.double()
        for dtype in (torch.float64, torch.bfloat16)
    )
    found = block_sparse_attention(q, k, v, plan, implementation="flashinfer").out.double()
    error, of_reference = ((x - exact).norm() / exact.norm() for x in (found, rounded))
    assert float(error) < 3 * float(of_reference) + 1e-4
