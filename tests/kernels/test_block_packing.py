"""Packing against a loop over the definition; the Triton kernel against the reference, interpreted and on a GPU.

The interpreter must be chosen before Triton is imported, so this file runs itself in a process of its own.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from sparse_oracle import random_qkv
from sparse_plans import cluster_plan, tile_plan
from triton_interpreter import interpret, needs_triton

from diffusion_runtime.attention import SparsePlan, TokenLayout
from diffusion_runtime.core.packed_tokens import TAIL_ROWS, PackedTokens
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.kernels.block_means import block_means_triton
from diffusion_runtime.kernels.block_packing import (
    Averaged,
    pack_tokens,
    pack_tokens_reference,
    pack_tokens_triton,
    reorder_tokens,
    row_width,
)
from diffusion_runtime.kernels.block_sparse.api import block_sparse_attention, reads_packed_rows
from diffusion_runtime.kernels.block_sparse.plan import PooledBranch

# A tile of 4 x 8 x 8 is more than one program reads at a time.
LAYOUTS = {
    "grid": TokenLayout((5, 9, 10)),
    "suffix": TokenLayout((5, 6, 7), num_suffix_tokens=70, valid_lengths=(0, 67)),
    "prefix": TokenLayout((3, 5, 6), num_prefix_tokens=6, valid_lengths=(4, 6)),
    "all text valid": TokenLayout((3, 5, 6), num_prefix_tokens=3, num_suffix_tokens=2),
}
AVERAGED: tuple[Averaged, ...] = ("none", "k", "qk", "qkv")


def plan_of(kind: str, layout: TokenLayout) -> SparsePlan:
    if kind == "tiles":
        return tile_plan(layout, (4, 8, 8), batch=2)
    return cluster_plan(layout, batch=2)


def inputs(layout: TokenLayout, head_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q of 4 heads and k, v of 2; heads outside of tokens in memory for k."""
    q, k, v = random_qkv(layout, batch=2, num_heads=4, num_kv_heads=2, head_dim=head_dim, dtype=dtype)
    return q, k.transpose(1, 2).contiguous().transpose(1, 2), v


def tensors_of(packed: PackedTokens) -> list[torch.Tensor | None]:
    return [packed.q, packed.k, packed.v, packed.q_means, packed.k_means, packed.v_means]


def compare(kind: str, place: str, head_dim: int, dtype: torch.dtype, averaged: Averaged, device: str) -> None:
    """Rows bit by bit, means as far as the order of additions goes; and the bits that block means alone give."""
    layout = LAYOUTS[place]
    plan = plan_of(kind, layout).to(device)
    q, k, v = (x.to(device) for x in inputs(layout, head_dim, dtype))
    arguments = {"num_grid_tokens": layout.num_grid_tokens, "text_lengths": plan.text_lengths, "averaged": averaged}
    expected = tensors_of(pack_tokens_reference(q, k, v, plan.q, plan.kv, **arguments))  # type: ignore[arg-type]
    # What no program writes would be NaN.
    torch.use_deterministic_algorithms(True)
    try:
        got = tensors_of(pack_tokens_triton(q, k, v, plan.q, plan.kv, **arguments))  # type: ignore[arg-type]
    finally:
        torch.use_deterministic_algorithms(False)
    for ours, theirs in zip(got[:3], expected[:3], strict=True):
        assert ours is not None
        assert theirs is not None
        assert torch.equal(ours, theirs), (kind, place, head_dim)
    for ours, theirs, x, geometry in zip(got[3:], expected[3:], (q, k, v), (plan.q, plan.kv, plan.kv), strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
            alone = block_means_triton(x, geometry)
            # The interpreter adds in one order; a GPU's depends on how a program lays its rows out.
            assert torch.equal(ours, alone) if device == "cpu" else torch.allclose(ours, alone, atol=1e-6, rtol=1e-6)


def run_cases() -> None:
    # Text before the grid, of which samples have less than there is room for.
    compare("tiles", "prefix", 16, torch.float32, "qk", "cpu")
    # Text on both sides without padding, and rows of odd numbers.
    compare("tiles", "all text valid", 5, torch.float32, "qkv", "cpu")
    # An order of each head's own, and text that one sample has none of.
    compare("clusters", "suffix", 16, torch.float32, "k", "cpu")
    # A tile of more tokens than a program reads at a time, and a padded head.
    compare("tiles", "grid", 72, torch.float16, "qkv", "cpu")
    # More numbers of a row than a program reads at a time.
    compare("clusters", "grid", 130, torch.bfloat16, "none", "cpu")
    x, order = torch.randn(2, 70, 3, 16).transpose(1, 2).contiguous().transpose(1, 2), torch.randperm(70)
    assert torch.equal(reorder_tokens(x, order.int()), x[:, order])
    print("ok")


@needs_triton
def test_kernel_under_the_interpreter() -> None:
    assert interpret(Path(__file__)).endswith("ok\n")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["tiles", "clusters"])
@pytest.mark.parametrize("place", list(LAYOUTS))
@pytest.mark.parametrize("averaged", AVERAGED)
def test_kernel_on_a_gpu(kind: str, place: str, averaged: Averaged) -> None:
    for head_dim, dtype in ((128, torch.bfloat16), (72, torch.float16), (5, torch.float32), (256, torch.bfloat16)):
        compare(kind, place, head_dim, dtype, averaged, "cuda")


@pytest.mark.parametrize("kind", ["tiles", "clusters"])
@pytest.mark.parametrize("place", list(LAYOUTS))
def test_rows_are_the_tokens_of_every_head_in_the_order_of_its_blocks(kind: str, place: str) -> None:
    layout = LAYOUTS[place]
    plan, qkv = plan_of(kind, layout), inputs(layout, 5, torch.float32)
    packed = pack_tokens(
        *qkv, plan.q, plan.kv, num_grid_tokens=layout.num_grid_tokens, text_lengths=plan.text_lengths, averaged="qkv"
    )
    geometries = (plan.q, plan.kv, plan.kv)
    means = tensors_of(packed)[3:]
    for x, rows, geometry, mean in zip(qkv, (packed.q, packed.k, packed.v), geometries, means, strict=True):
        expected = torch.zeros(2 * x.shape[2] * layout.num_tokens + TAIL_ROWS, row_width(5))
        for b in range(2):
            for h in range(x.shape[2]):
                head = b * x.shape[2] + h
                order = geometry.order[0 if geometry.num_groups == 1 else head].tolist()
                for position in range(layout.num_grid_tokens + plan.valid_text(b)):
                    expected[head * layout.num_tokens + position, :5] = x[b, order[position], h]
                start, stop = geometry.offsets[0 if geometry.num_groups == 1 else head, :2].tolist()
                assert mean is not None
                block = x[b, order[start:stop], h].double().sum(0) / max(1, stop - start)
                torch.testing.assert_close(mean[b, h, 0].double(), block, atol=1e-6, rtol=1e-6)
        assert torch.equal(rows, expected)


def test_means_come_for_the_tensors_that_were_named() -> None:
    layout = LAYOUTS["grid"]
    plan, qkv = plan_of("tiles", layout), inputs(layout, 8, torch.float32)
    asked = [
        tensors_of(pack_tokens(*qkv, plan.q, plan.kv, num_grid_tokens=layout.num_grid_tokens, averaged=averaged))[3:]
        for averaged in AVERAGED
    ]
    given = [[mean is not None for mean in means] for means in asked]
    assert given == [[False] * 3, [False, True, False], [True, True, False], [True] * 3]


def test_tensors_that_do_not_fit_are_refused() -> None:
    layout = LAYOUTS["grid"]
    tiles, clusters = plan_of("tiles", layout), plan_of("clusters", layout)
    q, k, v = inputs(layout, 8, torch.float32)
    with pytest.raises(ConfigError, match=r"packing: expected q \[batch, 450, heads, head_dim\].*got \(2, 449, 4, 8\)"):
        pack_tokens(q[:, 1:], k, v, tiles.q, tiles.kv, num_grid_tokens=449)
    with pytest.raises(ConfigError, match=r"expected k .*batch \* heads 4, got \(2, 450, 1, 8\)"):
        pack_tokens(q, k[:, :, :1], v, clusters.q, clusters.kv, num_grid_tokens=450)
    with pytest.raises(ConfigError, match="expected k and v of one shape"):
        pack_tokens(q, k, v[..., :4], tiles.q, tiles.kv, num_grid_tokens=450)
    with pytest.raises(ConfigError, match=r"of torch.float32.*of torch.float64"):
        pack_tokens(q, k, v.double(), tiles.q, tiles.kv, num_grid_tokens=450)


def test_attention_takes_rows_of_its_own_plan_and_no_others() -> None:
    layout = LAYOUTS["grid"]
    plan, (q, k, v) = plan_of("tiles", layout), inputs(layout, 16, torch.float32)
    packed = pack_tokens(q, k, v, plan.q, plan.kv, num_grid_tokens=layout.num_grid_tokens)
    branch = PooledBranch(torch.randn(2, 4, plan.q.num_blocks, 16), torch.randn(q.shape))
    expected = block_sparse_attention(q, k, v, plan, branch=branch).out
    assert torch.equal(block_sparse_attention(q, k, v, plan, branch=branch, packed=packed).out, expected)
    other = plan_of("clusters", layout)
    with pytest.raises(ConfigError, match="packed in other geometries than those of clusters"):
        block_sparse_attention(q, k, v, dataclasses.replace(other, method="clusters"), packed=packed)
    half = dataclasses.replace(packed, q=packed.q.half())
    with pytest.raises(ConfigError, match=r"expected packed rows of torch.float32, q \(3728, 16\).*got torch.float16"):
        block_sparse_attention(q, k, v, plan, packed=half)
    assert not reads_packed_rows(q, k, v, plan.q, plan.kv, layout.num_grid_tokens), (
        "the reference reads tokens where they lie"
    )


if __name__ == "__main__":
    run_cases()
