"""Whole sparse backends, planning included, against dense attention on one GPU, in one run.

    python -m benchmarks.sparse_backends_gpu --output benchmarks/results/sparse_backends_gpu.json
    TRITON_INTERPRET=1 python -m benchmarks.sparse_backends_gpu --device cpu     # every path, on grids of 192 tokens

Inputs are bfloat16. q and k are drawn around common centres, so that blocks differ in how much they matter, as in
a trained model. Correctness first: each method against masked float64 attention of its own plan, on a small grid.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.machine import describe_machine
from diffusion_runtime.attention import (
    LayerInfo,
    RequestCache,
    SparsePlan,
    StepInfo,
    TokenLayout,
    attention,
    plan_attention,
)
from diffusion_runtime.errors import DiffusionRuntimeError
from diffusion_runtime.kernels.block_sparse.api import BlockSparseResult, block_sparse_attention
from diffusion_runtime.kernels.block_sparse.reference import block_sparse_reference
from diffusion_runtime.kernels.block_sparse.triton import is_interpreted, prepare, tile_shape

Grid = tuple[int, int, int]
HEAD_DIM = 128
STEP = StepInfo(index=30, num_steps=50)


@dataclasses.dataclass(frozen=True)
class Case:
    """One backend at one shape. gated: a gate is passed, as a model that was trained with one does. layer: its index,
    from which V-MoBA takes the kind of its chunks. tiny: options that the grid of a CPU needs."""

    name: str
    backend: str
    grid: Grid
    heads: int
    options: dict[str, Any]
    gated: bool = False
    layer: int = 10
    tiny: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def layer_info(self) -> LayerInfo:
        return LayerInfo(index=self.layer, num_layers=40)


TINY_GRID: Grid = (4, 6, 8)
_TINY_CHUNKS = {"temporal_chunk_size": 1, "spatial_chunk_size": (3, 4), "st_chunk_size": (2, 3, 4), "spatial_topk": 2}
_TINY_CHUNKS |= {"temporal_topk": 2, "st_topk": 3}
_TINY_TILES = {"tile_size": (2, 2, 2)}
_TOP = {"moba_select_mode": "topk"}

CASES = (
    Case("VSA 0.9, tile 4x4x4", "video_sparse_attn", (21, 30, 52), 12, {"sparsity": 0.9}, True),
    Case("VSA 0.9, tile 4x4x8", "video_sparse_attn", (21, 30, 52), 12, {"sparsity": 0.9, "tile_size": (4, 4, 8)}, True),
    Case("VSA 0.9, tile 4x8x8", "video_sparse_attn", (21, 30, 52), 12, {"sparsity": 0.9, "tile_size": (4, 8, 8)}, True),
    Case("VSA 0.9, 720p, tile 4x4x4", "video_sparse_attn", (21, 45, 80), 40, {"sparsity": 0.9}, True),
    Case("STA 3x3x3 of 5x6x10 tiles", "sliding_tile_attn", (30, 48, 80), 24, {"window": (3, 3, 3)}, tiny=_TINY_TILES),
    Case("STA 3x3x3, ragged tiles", "sliding_tile_attn", (21, 30, 52), 12, {"window": (3, 3, 3)}, tiny=_TINY_TILES),
    Case("STA 3x3x3, whole tiles", "sliding_tile_attn", (24, 32, 56), 12, {"window": (3, 3, 3)}, tiny=_TINY_TILES),
    Case(
        *("SVG2, top-p 0.9", "sparse_video_gen_2_attn", (21, 45, 80), 40, {}),
        tiny={"svg2_num_q_centroids": 4, "svg2_num_k_centroids": 8},
    ),
    Case("V-MoBA, 480p", "vmoba_attn", (21, 30, 52), 12, _TOP, tiny=_TINY_CHUNKS),
    Case("V-MoBA in time, 480p", "vmoba_attn", (21, 30, 52), 12, _TOP, layer=9, tiny=_TINY_CHUNKS),
    Case("V-MoBA in time and space, 480p", "vmoba_attn", (21, 30, 52), 12, _TOP, layer=11, tiny=_TINY_CHUNKS),
    Case("V-MoBA by threshold, 480p", "vmoba_attn", (21, 30, 52), 12, {}, tiny=_TINY_CHUNKS),
    # What the pooled tail costs, beside the rows without it above.
    *(
        Case(
            f"VSA 0.9, tile {'x'.join(map(str, tile))}, pooled tail",
            *("video_sparse_attn", (21, 30, 52), 12, {"sparsity": 0.9, "tile_size": tile, "tail": "pooled"}, True),
        )
        for tile in ((4, 4, 4), (4, 4, 8), (4, 8, 8))
    ),
    Case(
        *("STA 3x3x3, ragged tiles, pooled tail", "sliding_tile_attn", (21, 30, 52), 12),
        {"window": (3, 3, 3), "tail": "pooled"},
        tiny=_TINY_TILES,
    ),
    Case("V-MoBA, 480p, pooled tail", "vmoba_attn", (21, 30, 52), 12, {**_TOP, "tail": "pooled"}, tiny=_TINY_CHUNKS),
    # 32,768 tokens in whole tiles, and 75,600: the shapes of comfy-kitchen's figures in attention_next.md.
    *(
        Case(f"Sol {label}, {name}", "sol_attn", grid, heads, options, tiny={"tile_size": (2, 2, 2)})
        for name, grid, heads in (("32768 x 12", (32, 32, 32), 12), ("75600 x 24", (21, 45, 80), 24))
        for label, options in (
            ("tau 1.0", {"tau": 1.0}),
            ("tau 1.5", {"tau": 1.5}),
            ("top-k 0.1", {"top_k": 0.1}),
            ("top-k 0.1 without tail", {"top_k": 0.1, "tail": "none"}),
        )
    ),
)


def inputs(grid: Grid, heads: int, device: str, batch: int = 1) -> list[torch.Tensor]:
    """q, k, v [batch, tokens, heads, 128]: q and k around 64 common directions that vary slowly over the grid."""
    generator = torch.Generator(device).manual_seed(1)
    tokens = grid[0] * grid[1] * grid[2]
    centres = torch.randn(64, heads, HEAD_DIM, generator=generator, device=device)
    # Neighbours share a centre more often than not, as tokens of one object do.
    coarse = torch.randint(64, [(extent + 5) // 6 for extent in grid], generator=generator, device=device)
    spread = coarse
    for axis, extent in enumerate(grid):
        spread = spread.repeat_interleave(6, dim=axis).narrow(axis, 0, extent)
    shared = centres[spread.flatten()]
    drawn = []
    for weight in (0.9, 0.9, 0.0):
        noise = torch.randn(batch, tokens, heads, HEAD_DIM, generator=generator, device=device)
        drawn.append((weight * shared + noise).to(torch.bfloat16))
    return drawn


def milliseconds(function: Callable[[], object], rep: int = 200) -> float:
    """The median on a GPU; on a CPU one call, which says that it works and nothing about its speed."""
    if torch.cuda.is_available():
        return float(triton.testing.do_bench(function, warmup=50, rep=rep, return_mode="median"))
    start = time.perf_counter()
    function()
    return 1e3 * (time.perf_counter() - start)


def run(case: Case, layout: TokenLayout, qkv: list[torch.Tensor], state: RequestCache) -> torch.Tensor:
    gate = qkv[2] if case.gated else None
    return attention(
        *qkv,
        backend=case.backend,
        options=case.options,
        layout=layout,
        layer=case.layer_info,
        step=STEP,
        state=state,
        gate=gate,
    )


def check(case: Case, device: str) -> float:
    """Relative error on a small grid against masked float64 attention on the same plan, which is bounded."""
    grid: Grid = (9, 14, 20) if device == "cuda" else TINY_GRID
    case = dataclasses.replace(case, gated=False)
    layout, qkv = TokenLayout(grid), inputs(grid, 4 if device == "cuda" else 2, device)
    if is_interpreted():
        # Triton's interpreter multiplies the bit patterns of bfloat16.
        qkv = [x.float() for x in qkv]
    plan = plan_of(case, layout, qkv, RequestCache())
    exact, _ = block_sparse_reference(*(x.double() for x in qkv), plan, scale=HEAD_DIM**-0.5)
    out = block_sparse_attention(*qkv, plan).out.double()
    error = float((out - exact).norm() / exact.norm())
    assert error < 1e-2, (case.name, error)
    return error


def plan_of(case: Case, layout: TokenLayout, qkv: list[torch.Tensor], state: RequestCache) -> SparsePlan:
    return plan_attention(
        qkv[0],
        qkv[1],
        backend=case.backend,
        options=case.options,
        layout=layout,
        layer=case.layer_info,
        step=STEP,
        state=state,
    )


def dense_milliseconds(qkv: list[torch.Tensor], rep: int) -> dict[str, float]:
    """Dense attention in the same run: what torch has, and `fa`, the newest FlashAttention of this machine."""
    times = {}
    for name in ("torch_sdpa", "fa"):
        try:
            times[name] = milliseconds(lambda name=name: attention(*qkv, backend=name), rep)  # type: ignore[misc]
        except DiffusionRuntimeError as error:
            print(f"    {name} left out: {str(error).splitlines()[1:2]}")
    return times


def watch_gpu(case: Case, layout: TokenLayout, qkv: list[torch.Tensor], state: RequestCache) -> dict[str, Any]:
    """Whether a warm call waits for the device, and the memory of planning and of the whole call."""
    row: dict[str, Any] = {}
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(case, layout, qkv, state)
        row["synchronises"] = False
    except RuntimeError as error:
        row["synchronises"] = str(error)[:200]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    plan = plan_of(case, layout, qkv, state)
    torch.cuda.synchronize()
    row["plan_peak_bytes"] = torch.cuda.max_memory_allocated() - before
    row["plan_bytes"] = torch.cuda.memory_allocated() - before
    del plan
    torch.cuda.reset_peak_memory_stats()
    run(case, layout, qkv, state)
    torch.cuda.synchronize()
    row["run_peak_bytes"] = torch.cuda.max_memory_allocated() - before
    return row


def measure(case: Case, device: str) -> dict[str, Any]:
    """Times of planning, kernel and the whole backend, beside dense attention; memory; no synchronisation."""
    row: dict[str, Any] = {"name": case.name, "backend": case.backend, "grid": case.grid, "heads": case.heads}
    row |= {"options": case.options, "layer": case.layer, "error": check(case, device)}
    layout, qkv = TokenLayout(case.grid), inputs(case.grid, case.heads, device)
    if is_interpreted():
        qkv = [x.float() for x in qkv]
    state = RequestCache()
    run(case, layout, qkv, state)
    if device == "cuda":
        row |= watch_gpu(case, layout, qkv, state)
    plan = plan_of(case, layout, qkv, state)
    row["density"] = plan.density
    rep = 1000 if layout.num_tokens * case.heads > 500_000 else 200
    row["dense_ms"] = dense_milliseconds(qkv, rep)
    row["whole_ms"] = milliseconds(lambda: run(case, layout, qkv, state), rep)
    row["plan_ms"] = milliseconds(lambda: plan_of(case, layout, qkv, state), rep)

    def attend() -> BlockSparseResult:
        return block_sparse_attention(*qkv, plan)

    row["attend_ms"] = milliseconds(attend, rep)
    result = attend()
    row["implementation"] = result.implementation
    kept = 4.0 * layout.num_tokens**2 * case.heads * HEAD_DIM * plan.density
    row["attend_tflops"] = kept / row["attend_ms"] / 1e9
    for name, dense in row["dense_ms"].items():
        row[f"speedup_over_{name}"] = dense / row["whole_ms"]
    if device == "cpu" and not is_interpreted():
        return row
    shape = tile_shape(qkv[0], plan)
    if row["implementation"] == "triton" and shape.rest_rows:
        whole_tiles = dataclasses.replace(shape, rest_rows=0)
        row["attend_no_rests_ms"] = milliseconds(
            lambda: prepare(*qkv, plan, scale=HEAD_DIM**-0.5, shape=whole_tiles).launch(), rep
        )
    if case.backend == "vmoba_attn":
        assert plan.row_counts is not None
        row["listed"] = float((plan.row_counts.of_blocks > 0).double().mean())
    return row


def main() -> int:
    """1 when a method failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny grids, every path")
    parser.add_argument("--profile", action="store_true", help="print the kernels of one call of each case")
    arguments = parser.parse_args()
    rows = []
    for case in CASES:
        if arguments.only not in case.name:
            continue
        if arguments.device == "cpu":
            case = dataclasses.replace(case, grid=TINY_GRID, heads=2, options={**case.options, **case.tiny})
        try:
            rows.append(measure(case, arguments.device))
            print_row(rows[-1])
            if arguments.profile:
                profile(case, arguments.device)
        except Exception:  # one broken method must not hide the figures of the others
            print(case.name, "FAILED")
            traceback.print_exc()
            rows.append({"name": case.name, "failed": traceback.format_exc()[-500:]})
        if arguments.device == "cuda":
            torch.cuda.empty_cache()
        if arguments.output:  # after every case: a run that is cut off keeps what it measured
            write(arguments.output, rows, arguments.device)
    return int(any("failed" in row for row in rows))


def write(path: Path, rows: list[dict[str, Any]], device: str) -> None:
    document = {
        "schema": "diffusion_runtime.sparse_backends_gpu/1",
        "machine": describe_machine(device),
        "dtype": "bfloat16",
        "head_dim": HEAD_DIM,
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


def profile(case: Case, device: str) -> None:
    layout, qkv = TokenLayout(case.grid), inputs(case.grid, case.heads, device)
    state = RequestCache()
    run(case, layout, qkv, state)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run(case, layout, qkv, state)
        torch.cuda.synchronize()
    for event in sorted(profiler.key_averages(), key=lambda event: -event.device_time_total)[:16]:
        print(f"    {event.device_time_total:10.0f} us x{event.count:<4} {event.key[:100]}")


def print_row(row: dict[str, Any]) -> None:
    dense = ", ".join(f"{name} {value:.3f}" for name, value in row["dense_ms"].items())
    over = ", ".join(f"{row[f'speedup_over_{name}']:.2f}x over {name}" for name in row["dense_ms"])
    print(
        f"{row['name']:30} {row['implementation']:9} density {row['density']:.3f}  whole {row['whole_ms']:.3f} "
        f"(plan {row['plan_ms']:.3f}, attend {row['attend_ms']:.3f} = {row['attend_tflops']:.0f} TF/s) ms, {dense} ms, "
        f"{over}, error {row['error']:.1e}",
        flush=True,
    )
    if "run_peak_bytes" in row:
        print(
            f"    plan {row['plan_peak_bytes'] / 1e6:.0f} MB, run {row['run_peak_bytes'] / 1e6:.0f} MB, "
            f"synchronises {row['synchronises']}",
            flush=True,
        )
    if "skipped" in row:
        print(f"    skips {row['skipped']:.3f} of the pieces; attend without {row['attend_unskipped_ms']:.3f} ms")
    if "listed" in row:
        print(f"    blocks of 128 queries list {row['listed']:.3f} of the chunks")
    if "attend_no_rests_ms" in row:
        print(f"    attend without tiles for rests {row['attend_no_rests_ms']:.3f} ms")


if __name__ == "__main__":
    sys.exit(main())
