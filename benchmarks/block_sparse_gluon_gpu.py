"""Blocks of at most 64 x 64 on one Hopper GPU: the Gluon kernel beside the Triton kernel, and dense attention.

    python -m benchmarks.block_sparse_gluon_gpu --output block_sparse_gluon_gpu.json

Correctness against float64 first, on plans with uneven and empty lists, odd last tiles, grouped queries, text of
whole tiles and of parts, gates and log-sum-exps. Then heads of 128 in bfloat16, kernels alone on packed tokens, in
rounds that take turns: a hot card is slower, and one kernel after the other would be compared at two temperatures.
Plans list random blocks. `fasth3` is a layer of MiniMax-H3 under FastH3: 124 frames of 1344 x 768, 56 heads, tiles of
4 x 4 x 4, 66 of 660 kept, 534 tokens of sound and text, a gate.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.block_sparse_gpu import HEAD_DIM, geometry, uniform
from benchmarks.machine import describe_machine
from diffusion_runtime.attention.sparse.tiles import tile_geometry
from diffusion_runtime.core.block_geometry import BlockGeometry
from diffusion_runtime.core.token_layout import TokenLayout
from diffusion_runtime.kernels.block_packing import pack_tokens
from diffusion_runtime.kernels.block_sparse import gluon, triton
from diffusion_runtime.kernels.block_sparse.plan import PooledBranch, SparsePlan, add_branch
from diffusion_runtime.kernels.block_sparse.reference import block_sparse_reference
from diffusion_runtime.kernels.block_sparse.triton import Prepared

KERNELS: dict[str, Callable[..., Prepared]] = {"triton": triton.prepare, "gluon": gluon.prepare}
SCALE = HEAD_DIM**-0.5
ROUNDS, ROUND_SECONDS = 5, 0.02


def tiles(grid: tuple[int, int, int], num_text: int = 0) -> BlockGeometry:
    return tile_geometry(TokenLayout(grid, num_suffix_tokens=num_text), (4, 4, 4), "cuda")


def random_plan(
    blocks: BlockGeometry,
    num_grid: int,
    heads: int,
    num_kept: int,
    *,
    batch: int = 1,
    kv_heads: int | None = None,
    is_uneven: bool = False,
    text_lengths: tuple[int, ...] | None = None,
) -> SparsePlan:
    """Every (head, query block) lists its own random blocks: num_kept, or with is_uneven from none to as many."""
    lists, count = batch * heads, blocks.num_blocks
    index = torch.rand(lists, count, count, device="cuda").topk(num_kept, dim=-1).indices.sort(dim=-1).values
    counts = torch.full((lists, count), num_kept, dtype=torch.int32, device="cuda")
    if is_uneven:
        counts = torch.randint(0, num_kept + 1, (lists, count), device="cuda", dtype=torch.int32)
    return SparsePlan(
        method="random",
        batch=batch,
        num_heads=heads,
        num_kv_heads=kv_heads or heads,
        q=blocks,
        kv=blocks,
        group_of=torch.arange(lists, dtype=torch.int32, device="cuda").view(batch, heads),
        kv_count=counts,
        kv_index=index.to(torch.int32).contiguous(),
        num_grid_tokens=num_grid,
        text_lengths=None if text_lengths is None else torch.tensor(text_lengths, dtype=torch.int32, device="cuda"),
    )


def inputs(plan: SparsePlan, is_gated: bool) -> tuple[list[torch.Tensor], PooledBranch | None]:
    q, k, v = (
        torch.randn(plan.batch, plan.num_tokens, heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        for heads in (plan.num_heads, plan.num_kv_heads, plan.num_kv_heads)
    )
    pooled = torch.randn(plan.batch, plan.num_heads, plan.q.num_blocks, HEAD_DIM, device="cuda")
    return [q, k, v], PooledBranch(pooled, torch.randn_like(q)) if is_gated else None


def check(name: str, plan: SparsePlan, is_gated: bool) -> dict[str, Any]:
    """Relative errors against float64 of the kernel and of the reference, with its result rounded; must be alike."""
    (q, k, v), branch = inputs(plan, is_gated)
    exact, exact_lse = block_sparse_reference(q.double(), k.double(), v.double(), plan, scale=SCALE)
    exact = exact if branch is None else add_branch(exact, plan, branch)
    prepared = gluon.prepare(q, k, v, plan, scale=SCALE, branch=branch)
    prepared.launch()
    empty = exact_lse == -math.inf
    errors = {
        "kernel": float((prepared.out.double() - exact).norm() / exact.norm()),
        "reference": float((exact.to(q.dtype).double() - exact).norm() / exact.norm()),
        "lse": float((prepared.lse.double() - exact_lse).masked_fill(empty, 0.0).abs().max()),
    }
    # The reference rounds its result alone; a kernel rounds its softmax weights too.
    assert errors["kernel"] < 3 * errors["reference"] + 1e-4, (name, errors)
    assert errors["lse"] < 1e-2, (name, errors)
    assert torch.equal(prepared.lse == -math.inf, empty), name
    first = prepared.out.clone()
    prepared.launch()
    assert torch.equal(first, prepared.out), f"{name}: other bits the second time"
    return {"case": name, **errors}


def checks() -> list[dict[str, Any]]:
    small, grid = (9, 10, 11), 990
    shared = {"batch": 2, "kv_heads": 2, "is_uneven": True}
    equal = geometry(uniform(64 * 33, 64))
    return [
        check("64 x 64, uneven", random_plan(equal, 64 * 33, 4, 12, **shared), False),
        check("tiles", random_plan(tiles(small), grid, 4, 10, **shared), False),
        check("text, gate", random_plan(tiles(small, 170), grid, 4, 10, text_lengths=(100, 170), **shared), True),
        check("short text", random_plan(tiles(small, 30), grid, 4, 10, text_lengths=(0, 22), **shared), False),
        check("all text valid", random_plan(tiles((9, 24, 42), 200), 9072, 2, 40), False),
    ]


def milliseconds(launch: Callable[[], object]) -> float:
    """Mean time of the calls of one round."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    launch()
    begin.record()
    launch()
    end.record()
    torch.cuda.synchronize()
    count = max(2, int(1000 * ROUND_SECONDS / begin.elapsed_time(end)))
    begin.record()
    for _ in range(count):
        launch()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / count


def measure(name: str, plan: SparsePlan, is_gated: bool) -> list[dict[str, Any]]:
    qkv, branch = inputs(plan, is_gated)
    packed = pack_tokens(
        *qkv, plan.q, plan.kv, num_grid_tokens=plan.num_grid_tokens, text_lengths=None, averaged="none"
    )

    def prepare(kernel: str) -> Prepared:
        return KERNELS[kernel](*qkv, plan, scale=SCALE, branch=branch, packed=packed)

    prepared = {kernel: prepare(kernel) for kernel in KERNELS}
    rounds: dict[str, list[float]] = {kernel: [] for kernel in KERNELS}
    for _ in range(ROUNDS):
        for kernel, each in prepared.items():
            rounds[kernel].append(milliseconds(each.launch))
    work = 4.0 * HEAD_DIM * plan.num_heads * plan.num_tokens**2 * plan.density
    expected = prepared["triton"].out.float()
    rows = []
    for kernel, times in rounds.items():
        median = sorted(times)[ROUNDS // 2]
        difference = float((prepared[kernel].out.float() - expected).norm() / expected.norm())
        whole = milliseconds(lambda kernel=kernel: prepare(kernel).launch())
        rows.append(
            {
                "case": name,
                "implementation": kernel,
                "kernel_ms": median,
                "rounds_ms": times,
                "whole_ms": whole,
                "tflops": work / median / 1e9,
                "from_triton": difference,
                "density": plan.density,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    errors = checks()
    equal = geometry(uniform(32768, 64))
    cases = {
        "fasth3": (random_plan(tiles((37, 24, 42), 534), 37296, 56, 66), True),
        "64 x 64, 12 heads": (random_plan(equal, 32768, 12, 51), False),
        "64 x 64, 24 heads": (random_plan(equal, 32768, 24, 51), False),
        "tiles 4x4x4 of 21x30x52": (random_plan(tiles((21, 30, 52)), 32760, 12, 62), False),
    }
    rows = [row for name, case in cases.items() for row in measure(name, *case)]
    q, k, v = torch.randn(3, 1, 12, 32768, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    dense = milliseconds(lambda: F.scaled_dot_product_attention(q, k, v))
    document = {
        "schema": "diffusion_runtime.block_sparse_gluon_gpu/1",
        "machine": describe_machine("cuda"),
        "errors": errors,
        "dense_ms": {"torch_sdpa, 32768 tokens, 12 heads": dense},
        "rows": rows,
    }
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")
    for row in rows:
        print(f"{row['case']:24} {row['implementation']:7} {row['kernel_ms']:8.3f} ms {row['tflops']:5.0f} TF/s")


if __name__ == "__main__":
    main()
