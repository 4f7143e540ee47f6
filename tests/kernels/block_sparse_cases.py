"""Compare the Triton kernel with the reference; run under the interpreter as a script, or imported on a GPU.

TRITON_INTERPRET=1 python tests/kernels/block_sparse_cases.py
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

from sparse_oracle import random_qkv  # noqa: E402
from sparse_plans import cluster_plan, row_mask_plan, tile_plan  # noqa: E402

from diffusion_runtime.attention import SparsePlan, TokenLayout  # noqa: E402
from diffusion_runtime.kernels.block_sparse import triton  # noqa: E402
from diffusion_runtime.kernels.block_sparse.plan import PooledBranch, add_branch  # noqa: E402
from diffusion_runtime.kernels.block_sparse.reference import block_sparse_reference  # noqa: E402
from diffusion_runtime.kernels.block_sparse.triton import (  # noqa: E402
    TileShape,
    block_sparse_triton,
)

# block_sparse_triton, or what is called as it is.
Attend = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def layouts(grid: tuple[int, int, int]) -> dict[str, TokenLayout]:
    """The grid alone, and with text behind it and before it; no sample has all of its text."""
    return {
        "grid": TokenLayout(grid),
        "suffix": TokenLayout(grid, num_suffix_tokens=21, valid_lengths=(0, 18)),
        "prefix": TokenLayout(grid, num_prefix_tokens=6, valid_lengths=(4, 6)),
    }


# No extent is a multiple of the tiles' one.
LAYOUTS = layouts((3, 5, 6))
# For the interpreter, which takes twice as long for twice the tokens.
SMALL_LAYOUTS = layouts((3, 5, 3))


def plan_of(kind: str, layout: TokenLayout) -> SparsePlan:
    if kind == "tiles":
        return tile_plan(layout, (2, 4, 4), batch=2, heads=2, kv_heads=1)
    if kind == "small tiles":
        return tile_plan(layout, (2, 3, 4), batch=2, heads=2, kv_heads=1, smallest=0)
    return (
        cluster_plan(layout, batch=2, heads=2, kv_heads=1)
        if kind == "clusters"
        else row_mask_plan(layout, (2, 3, 4), batch=2, heads=2, kv_heads=1)
    )


def errors(
    kind: str,
    layout: TokenLayout,
    head_dim: int,
    dtype: torch.dtype,
    shape: TileShape | None,
    scale: float,
    device: str,
    gated: bool = True,
    plain: bool = True,
    pooled_tail: bool = False,
    attend: Attend = block_sparse_triton,
) -> dict[str, float]:
    """Largest differences of out, lse and out with a branch, over the reference's own from float64; must be small.

    gated: with a branch; plain: without one, in a launch of its own. pooled_tail: of the plan. attend: the kernel;
    others than the default take no shape.
    """
    plan = dataclasses.replace(plan_of(kind, layout), pooled_tail=pooled_tail).to(device)
    q, k, v = (
        x.to(device) for x in random_qkv(layout, batch=2, num_heads=2, num_kv_heads=1, head_dim=head_dim, dtype=dtype)
    )
    exact, exact_lse = block_sparse_reference(q.double(), k.double(), v.double(), plan, scale=scale)
    rounded, _ = block_sparse_reference(q, k, v, plan, scale=scale)
    rounding = torch.finfo(dtype).eps
    own = (rounded.double() - exact).norm() / exact.norm()
    empty = exact_lse == float("-inf")
    result = {"own": float(own), "lse": 0.0}

    shaped = {} if shape is None else {"shape": shape}

    def see(lse: torch.Tensor) -> None:
        assert torch.equal(lse == float("-inf"), empty), "rows that see nothing"
        result["lse"] = max(result["lse"], float((lse.double() - exact_lse).masked_fill(empty, 0).abs().max()))

    if plain:
        out, lse = attend(q, k, v, plan, scale=scale, **shaped)
        assert not out.transpose(1, 2)[empty].any(), "rows that see nothing are 0"
        result["out"] = float((out.double() - exact).norm() / exact.norm())
        see(lse)
    if gated:
        generator = torch.Generator().manual_seed(5)
        branch = PooledBranch(
            torch.randn(2, 2, plan.q.num_blocks, head_dim, generator=generator).to(device),
            torch.randn(q.shape, generator=generator).to(device, dtype),
        )
        with_branch, lse = attend(q, k, v, plan, scale=scale, branch=branch, **shaped)
        expected = add_branch(exact, plan, branch)
        result["gated"] = float((with_branch.double() - expected).norm() / expected.norm())
        see(lse)
    # The kernel rounds its softmax weights too, and sums in another order.
    bound = max(3 * float(own), 4 * rounding)
    assert result.get("out", 0.0) <= bound, (kind, result, bound)
    assert result.get("gated", 0.0) <= bound, (kind, result, bound)
    assert result["lse"] <= 1e-4 + 8 * rounding, (kind, result)
    return result


def check_poisoned_values(
    kind: str,
    layout: TokenLayout,
    shape: TileShape | None,
    device: str,
    attend: Attend = block_sparse_triton,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
) -> None:
    """NaN and inf in values and keys reach the queries that see them and no others, padded text included.

    Those in the values of the first sample and in the keys of the second are found in one launch.
    """
    plan = plan_of(kind, layout).to(device)
    qkv = random_qkv(layout, batch=2, num_heads=2, num_kv_heads=1, head_dim=head_dim, dtype=dtype)
    q, k, v = (x.to(device) for x in qkv)
    shaped = {} if shape is None else {"shape": shape}
    clean, _ = attend(q, k, v, plan, scale=0.25, **shaped)
    exact, _ = block_sparse_reference(q.double(), k.double(), v.double(), plan, scale=0.25)
    assert float((clean.double() - exact).norm() / exact.norm()) <= 8 * torch.finfo(q.dtype).eps, kind
    poison = (
        (v, {0: float("nan"), 29: float("nan"), layout.num_grid_tokens - 16: float("nan"), 13: float("inf")}),
        (k, {layout.num_grid_tokens - 42: float("nan"), -1: float("nan")}),
    )
    for sample, (x, values) in enumerate(poison):
        for key, value in values.items():
            x[sample, key] = value
    out, _ = attend(q, k, v, plan, scale=0.25, **shaped)
    mask = plan.to_dense_mask().transpose(1, 2)
    for sample, (_, values) in enumerate(poison):
        sees = mask[sample][..., list(values)].any(dim=-1)
        assert sees.any(), kind
        assert not sees.all(), kind
        assert torch.equal(~out[sample].isfinite().all(dim=-1), sees), (kind, values)
        assert torch.equal(out[sample][~sees], clean[sample][~sees]), (kind, values)


def check_in_place(
    shape: TileShape | None, dtype: torch.dtype, head_dim: int, device: str, attend: Attend = block_sparse_triton
) -> None:
    """Tokens that stand in the order of the plan are not packed: the bits are those of tokens that are, whatever the
    padding of the text holds."""
    layout, tile = TokenLayout((3, 4, 3), num_suffix_tokens=7, valid_lengths=(0, 5)), (2, 2, 3)
    ordered = dataclasses.replace(layout, tile=tile)
    plan, plan_in_order = (tile_plan(each, tile, batch=2, heads=2, kv_heads=1).to(device) for each in (layout, ordered))
    qkv = random_qkv(layout, batch=2, num_heads=2, num_kv_heads=1, head_dim=head_dim, dtype=dtype)
    assert plan_in_order.q.is_identity
    assert not plan.q.is_identity
    # Of one product, as a model makes them.
    product = torch.cat(qkv, dim=2).to(device)
    product[0, layout.num_grid_tokens :] = float("nan")
    order = plan.q.order[0].long()
    branch = PooledBranch(torch.randn(2, 2, plan.q.num_blocks, head_dim), torch.randn(2, len(order), 2, head_dim))
    branch = PooledBranch(branch.pooled.to(device), branch.gate.to(device, dtype))
    branch_in_order = PooledBranch(branch.pooled, branch.gate[:, order])
    shaped = {} if shape is None else {"shape": shape}
    expected = attend(*product.split([2, 1, 1], dim=2), plan, scale=0.2, branch=branch, **shaped)
    with mock.patch.object(triton, "pack_tokens", side_effect=AssertionError("packed")):
        q, k, v = product[:, order].split([2, 1, 1], dim=2)
        assert triton.reads_in_place(q, k, v, plan_in_order.q, plan_in_order.kv)
        out, lse = attend(q, k, v, plan_in_order, scale=0.2, branch=branch_in_order, **shaped)
    assert torch.equal(out, expected[0][:, order])
    assert torch.equal(lse, expected[1][:, :, order])
    assert out.isfinite().all()


def main() -> None:
    """Every kind of plan in float32; a padded head and float16 on one; bulk copies, pointers, rests.

    The interpreter takes a second and more for a launch. The branch is added per tile after the sums, so every kind has
    it once, where text is padded, both tile shapes have it, and so has a padded head; without it padded text is
    compared where values are poisoned. The grid alone is the layout of the scales, text before it that of one kind.
    """
    small = (TileShape(32, 16, 4, 2, False, rest_rows=16), TileShape(16, 32, 4, 2, True))
    kinds = ("tiles", "small tiles", "clusters", "row mask")
    # Text before the grid differs from text after it in the order alone.
    cases = [("suffix", kind, small[place % 2], True) for place, kind in enumerate(kinds)]
    cases += [("grid", "row mask", small[0], False), ("prefix", "clusters", small[1], False)]
    for place, kind, shape, gated in cases:
        result = errors(kind, SMALL_LAYOUTS[place], 16, torch.float32, shape, 0.25, "cpu", gated, not gated)
        print(place, kind, shape, result, flush=True)
    result = errors("tiles", SMALL_LAYOUTS["grid"], 72, torch.float16, small[0], 0.1, "cpu", plain=False)
    print(72, result, flush=True)
    for scale in (-0.3, 0.0):
        result = errors("tiles", SMALL_LAYOUTS["grid"], 16, torch.float32, small[0], scale, "cpu", gated=False)
        print(scale, result, flush=True)
    # Every kind with text, grouped queries, empty blocks and queries that see nothing; both shapes, a gate on one each,
    # a head that is padded, and a negative scale.
    for place, kind in enumerate(kinds):
        gated = place % 2 == 0
        result = errors(
            kind, LAYOUTS["suffix"], 24, torch.float32, small[place % 2], 0.25, "cpu", gated, not gated, True
        )
        print("pooled tail", kind, result, flush=True)
    errors("clusters", LAYOUTS["grid"], 16, torch.float32, small[0], -0.3, "cpu", gated=False, pooled_tail=True)
    for shape in small:
        check_in_place(shape, torch.float32, 16, "cpu")
    for place, kind in enumerate(kinds):
        check_poisoned_values(kind, SMALL_LAYOUTS["suffix"], small[place % 2], "cpu")
    print("ok")


if __name__ == "__main__":
    main()
