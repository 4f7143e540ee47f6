"""The Triton kernel and FlashAttention-4's against dense attention on one GPU: correctness first, then every variant
in one run. Hopper's kernel for blocks of 64: block_sparse_gluon_gpu.py.

    python -m benchmarks.block_sparse_gpu --output benchmarks/results/block_sparse_gpu.json
    python -m benchmarks.block_sparse_gpu --pooled-tail    # each plan as well with the rest pooled

Random plans at 32768 tokens, 12 heads of 128, bfloat16: each query block lists a random tenth of the key blocks. The
rate counts the work of the pairs that are kept. `kernel` is the kernel alone; `whole` packs and lists the blocks too.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton

from benchmarks.machine import describe_machine
from diffusion_runtime.core.block_geometry import BlockGeometry
from diffusion_runtime.kernels.block_sparse import flash4
from diffusion_runtime.kernels.block_sparse.plan import SparsePlan
from diffusion_runtime.kernels.block_sparse.reference import block_sparse_reference
from diffusion_runtime.kernels.block_sparse.triton import TileShape, prepare, tile_shape

HEADS, HEAD_DIM = 12, 128


def geometry(sizes: torch.Tensor) -> BlockGeometry:
    """Blocks of these sizes over tokens in a random order: nothing is read in the order in which it lies."""
    total = int(sizes.sum())
    order = torch.randperm(total, dtype=torch.int32)
    lengths = set(sizes.tolist())
    offsets = F.pad(sizes.cumsum(0), (1, 0)).to(torch.int32)
    uniform = lengths.pop() if len(lengths) == 1 else None
    return BlockGeometry(order[None], offsets[None], int(sizes.max()), uniform).to("cuda")


def random_plan(q_sizes: torch.Tensor, kv_sizes: torch.Tensor, density: float, heads: int) -> SparsePlan:
    """Every (head, q block) lists its own random `density` of the key blocks."""
    num_q, num_kv = len(q_sizes), len(kv_sizes)
    count = max(1, round(density * num_kv))
    index = torch.rand(heads, num_q, num_kv, device="cuda").argsort(dim=-1)[..., :count].sort(dim=-1).values
    return SparsePlan(
        method="random",
        batch=1,
        num_heads=heads,
        num_kv_heads=heads,
        q=geometry(q_sizes),
        kv=geometry(kv_sizes),
        group_of=torch.arange(heads, dtype=torch.int32, device="cuda")[None],
        kv_count=torch.full((heads, num_q), count, dtype=torch.int32, device="cuda"),
        kv_index=index.to(torch.int32).contiguous(),
        num_grid_tokens=int(q_sizes.sum()),
    )


def uniform(total: int, size: int) -> torch.Tensor:
    return torch.full((total // size,), size)


def ragged(total: int, low: int, high: int) -> torch.Tensor:
    """Random sizes in [low, high] that add up to `total`."""
    sizes: list[int] = []
    while sum(sizes) < total:
        sizes.append(min(int(torch.randint(low, high + 1, ())), total - sum(sizes)))
    return torch.tensor(sizes)


def tiles(grid: tuple[int, int, int], size: int) -> torch.Tensor:
    """Sizes of the tiles size x size x size of a grid, whose edge tiles hold what is left."""
    frames, height, width = (
        torch.tensor([min(size, extent - start) for start in range(0, extent, size)]) for extent in grid
    )
    return (frames[:, None, None] * height[:, None] * width).flatten()


def inputs(total: int, heads: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [torch.randn(1, total, heads, HEAD_DIM, device="cuda", dtype=dtype) for _ in range(3)]


def check(plan: SparsePlan, shape: TileShape | None) -> dict[str, float]:
    """Relative errors against float64 of the kernel and of the reference on the same bfloat16 inputs."""
    q, k, v = inputs(plan.num_grid_tokens, plan.num_heads)
    scale = HEAD_DIM**-0.5
    exact, exact_lse = block_sparse_reference(q.double(), k.double(), v.double(), plan, scale=scale)
    rounded, _ = block_sparse_reference(q, k, v, plan, scale=scale)
    if shape is None:
        out, lse = flash4.block_sparse_flash4(q, k, v, plan, scale=scale)
    else:
        prepared = prepare(q, k, v, plan, scale=scale, shape=shape)
        prepared.launch()
        out, lse = prepared.out, prepared.lse
    errors = {
        "kernel": float((out.double() - exact).norm() / exact.norm()),
        "reference": float((rounded.double() - exact).norm() / exact.norm()),
        "lse": float((lse.double() - exact_lse).abs().max()),
    }
    # The reference rounds its result alone; a kernel rounds its softmax weights too.
    assert errors["kernel"] < 3 * errors["reference"] + 1e-4, errors
    assert errors["lse"] < 1e-2, errors
    return errors


def milliseconds(function: Callable[[], object]) -> float:
    return float(triton.testing.do_bench(function, warmup=25, rep=100, return_mode="median"))


def dense_times(total: int) -> dict[str, float]:
    q, k, v = inputs(total, HEADS)
    q_bhsd, k_bhsd, v_bhsd = (x.transpose(1, 2) for x in (q, k, v))
    times = {"torch_sdpa": milliseconds(lambda: F.scaled_dot_product_attention(q_bhsd, k_bhsd, v_bhsd))}
    if flash4.package_refusal() is None:
        from flash_attn.cute import flash_attn_func

        times["fa4"] = milliseconds(lambda: flash_attn_func(q, k, v))
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times["matmul_8192"] = milliseconds(lambda: a @ b)
    return times


def work(total: int, density: float) -> float:
    """Floating-point operations of one attention call on `density` of the pairs."""
    return 4.0 * total * total * HEADS * HEAD_DIM * density


def variants(tune: bool) -> list[tuple[str, torch.Tensor, torch.Tensor, list[TileShape]]]:
    """(name, q block sizes, key block sizes, tile shapes to time), for 32768 tokens."""
    total = 32768
    shapes = (
        [(64, 64, 4), (128, 64, 4), (64, 32, 4), (128, 32, 4), (128, 64, 8), (128, 128, 8), (32, 64, 4)] if tune else []
    )
    listed = []
    for name, q_sizes, kv_sizes in (
        ("64 x 64", uniform(total, 64), uniform(total, 64)),
        ("64 x 64 packed", tiles((21, 30, 52), 4), tiles((21, 30, 52), 4)),
        ("128 x 64", uniform(total, 128), uniform(total, 64)),
        ("128 x 128", uniform(total, 128), uniform(total, 128)),
        ("128 x 128 ragged", ragged(total, 96, 128), ragged(total, 96, 128)),
        ("clusters 252 x 76", ragged(total, 4, 500), ragged(total, 2, 150)),
    ):
        fitting = [s for s in shapes if s[0] <= int(q_sizes.max()) and (s[1] <= int(kv_sizes.max()))]
        tried = [TileShape(*s, stages, bulk) for s in fitting for stages in (1, 2, 3) for bulk in (True, False)]
        listed.append((name, q_sizes, kv_sizes, tried))
    return listed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--density", type=float, default=0.1)
    parser.add_argument("--tune", action="store_true", help="time every tile shape, not the chosen one alone")
    parser.add_argument("--pooled-tail", action="store_true", help="time the chosen shape with a pooled tail too")
    parser.add_argument("--only", default="", help="variants whose name contains this")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    dense = dense_times(32768)
    rows: list[dict[str, Any]] = []
    for name, q_sizes, kv_sizes, shapes in variants(arguments.tune):
        if arguments.only not in name:
            continue
        plan = random_plan(q_sizes, kv_sizes, arguments.density, HEADS)
        chosen = tile_shape(inputs(128, 1)[0], plan)
        for shape in [chosen, *(one for one in shapes if one != chosen)]:
            rows.append(measure(name, plan, shape, q_sizes, kv_sizes, shape == chosen))
        if arguments.pooled_tail:
            pooled = dataclasses.replace(plan, pooled_tail=True)
            rows.append(measure(f"{name}, pooled tail", pooled, chosen, q_sizes, kv_sizes, True))
        q = inputs(plan.num_grid_tokens, HEADS)[0]
        if flash4.refusal(q, plan) is None:
            rows.append(measure_flash4(name, plan, q_sizes, kv_sizes))
    document = {
        "schema": "diffusion_runtime.block_sparse_gpu/1",
        "machine": describe_machine("cuda"),
        "shape": {"tokens": 32768, "heads": HEADS, "head_dim": HEAD_DIM, "dtype": "bfloat16"},
        "density": arguments.density,
        "dense_ms": {key: round(value, 4) for key, value in dense.items()},
        "rows": rows,
    }
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")
    print_table(document)


def measure(
    name: str,
    plan: SparsePlan,
    shape: TileShape,
    q_sizes: torch.Tensor,
    kv_sizes: torch.Tensor,
    chosen: bool,
) -> dict[str, Any]:
    row: dict[str, Any] = {"blocks": name, "implementation": "triton", "tile": str(shape), "chosen": chosen}
    try:
        if chosen:
            small = dataclasses.replace(small_plan(q_sizes, kv_sizes), pooled_tail=plan.pooled_tail)
            row["errors"] = check(small, shape)
        q, k, v = inputs(plan.num_grid_tokens, HEADS)
        scale = HEAD_DIM**-0.5
        prepared = prepare(q, k, v, plan, scale=scale, shape=shape)
        row["kernel_ms"] = milliseconds(prepared.launch)
        if chosen:
            row["whole_ms"] = milliseconds(lambda: prepare(q, k, v, plan, scale=scale, shape=shape).launch())
        row["tflops"] = work(plan.num_grid_tokens, plan.density) / row["kernel_ms"] / 1e9
    except Exception as error:  # a tile shape that does not fit the chip is a row of the table, not the end of it
        row["failed"] = f"{type(error).__name__}: {str(error)[:200]}"
        if chosen:
            raise
    row["density"] = plan.density
    return row


def small_plan(q_sizes: torch.Tensor, kv_sizes: torch.Tensor) -> SparsePlan:
    """A plan of about 2048 tokens with the same kinds of blocks."""

    def cut(sizes: torch.Tensor) -> torch.Tensor:
        kept = sizes[: max(1, int((sizes.cumsum(0) <= 2048).sum()))]
        rest = 2048 - int(kept.sum())
        return torch.cat([kept, torch.tensor([rest])]) if rest > 0 else kept

    return random_plan(cut(q_sizes), cut(kv_sizes), 0.3, 2)


def measure_flash4(name: str, plan: SparsePlan, q_sizes: torch.Tensor, kv_sizes: torch.Tensor) -> dict[str, Any]:
    """FlashAttention-4's kernel on the same plan: `kernel` on tokens that already lie in order."""
    from flash_attn.cute import flash_attn_func
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    q, k, v = inputs(plan.num_grid_tokens, HEADS)
    counts, index = flash4.tile_selection(plan)
    blocks = BlockSparseTensorsTorch(
        mask_block_cnt=torch.zeros_like(counts),
        mask_block_idx=torch.zeros_like(index[..., :1]),
        full_block_cnt=counts,
        full_block_idx=index,
        block_size=(plan.q.uniform_block_size, 128),
    )
    errors = check(small_plan(q_sizes, kv_sizes), None)
    scale = HEAD_DIM**-0.5
    kernel = milliseconds(lambda: flash_attn_func(q, k, v, softmax_scale=scale, block_sparse_tensors=blocks))
    whole = milliseconds(lambda: flash4.block_sparse_flash4(q, k, v, plan, scale=scale))
    return {
        "blocks": name,
        "implementation": "flash4",
        "tile": "",
        "chosen": True,
        "errors": errors,
        "kernel_ms": kernel,
        "whole_ms": whole,
        "tflops": work(plan.num_grid_tokens, plan.density) / kernel / 1e9,
        "density": plan.density,
    }


def print_table(document: dict[str, Any]) -> None:
    dense = document["dense_ms"]
    total = document["shape"]["tokens"]
    for name, value in dense.items():
        rate = 2 * 8192**3 if name.startswith("matmul") else work(total, 1.0)
        print(f"{name:12} {value:8.3f} ms  {rate / value / 1e9:6.0f} TF/s")
    best = min(value for name, value in dense.items() if name != "matmul_8192")
    for row in sorted(document["rows"], key=lambda row: (row["blocks"], row.get("kernel_ms", math.inf))):
        if "failed" in row:
            print(f"{row['blocks']:18} {row['tile']:60} {row['failed'][:80]}")
            continue
        mark = "*" if row["chosen"] else " "
        whole = f"{row['whole_ms']:7.3f}" if "whole_ms" in row else " " * 7
        tile = row["tile"].removeprefix("TileShape")
        print(
            f"{mark}{row['blocks']:18} {row['implementation']:7} {row['kernel_ms']:7.3f} {whole} ms "
            f"{row['tflops']:5.0f} TF/s {best / row['kernel_ms']:5.2f}x d={row['density']:.3f} {tile}"
        )


if __name__ == "__main__":
    main()
