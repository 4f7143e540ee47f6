"""Dense attention on one GPU, in one run: the figures that are promised, and every backend at every shape.

    python -m benchmarks.attention_gpu --output benchmarks/results/attention_gpu.json [--plot attention_gpu.png]

Inputs are bfloat16 and normally distributed; padded keys hold numbers that would show. Correctness first: what is
above its bound against float64 is not timed, and the exit code is 1. Figures:

- fa over torch_sdpa at 32760 tokens, 12 heads of 128, and as a share of an 8192^3 matrix product in the same rounds;
- what our own part of a call costs the host: `attention(...)` and `LocalAttention`, over the raw function of
  flash-attn-4, at a shape so small that the device waits for the host;
- padded text: 25996 keys of which 156 are padding, beside 25996 keys that are all real, alternately.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import describe_machine
from diffusion_runtime.attention import (
    AttentionConfig,
    AttentionContext,
    AttentionPolicy,
    AttentionSpec,
    LocalAttention,
    TokenLayout,
    attention,
    list_backends,
)
from diffusion_runtime.attention.autotune import time_alternately
from diffusion_runtime.benchmark.attention import Effort, benchmark_attention, default_backends
from diffusion_runtime.benchmark.measurement import AttentionBenchmark
from diffusion_runtime.benchmark.plot import check_plotting, plot_benchmark
from diffusion_runtime.benchmark.shapes import find_shapes
from diffusion_runtime.core.cache_folder import ENVIRONMENT_VARIABLE
from diffusion_runtime.core.hardware import detect_hardware

SCHEMA = "diffusion_runtime.attention_gpu/1"
DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
PADDED_BACKENDS = ("fa", "torch_sdpa", "cudnn_attn")
# What is promised: name -> (at least or at most, bound).
TARGETS = {
    "fa_over_torch_sdpa": ("at least", 1.15),
    "fa_share_of_matmul": ("at least", 0.93),
    "attention_overhead_us": ("at most", 10.0),
    "layer_overhead_us": ("at most", 10.0),
    **{f"padded_over_unpadded_{name}": ("at least", 0.95) for name in PADDED_BACKENDS},
}


def speed_figures(benchmark: AttentionBenchmark) -> dict[str, float]:
    """fa beside torch_sdpa at Wan 1.3B's shape, from the same rounds."""
    fa, sdpa = (benchmark.find("wan-1.3b-480p", name) for name in ("fa", "torch_sdpa"))
    if fa is None or sdpa is None or not fa.samples or not sdpa.samples:
        return {}
    # Sample by sample: what disturbs one round disturbs both.
    ratios = [slow / fast for slow, fast in zip(sdpa.samples, fa.samples, strict=True)]
    assert fa.share_of_matmul is not None
    return {"fa_over_torch_sdpa": statistics.median(ratios), "fa_share_of_matmul": fa.share_of_matmul}


def padded_figures(num_rounds: int) -> tuple[dict[str, float], dict[str, Any]]:
    """Time of the unpadded call over that of the padded one, by backend; and all their samples."""
    (shape,) = find_shapes(["hunyuan-1.5"], small_by_default=False)
    padded = shape.layout
    whole = dataclasses.replace(padded, valid_lengths=None)
    sizes = (1, shape.seq_k, shape.num_heads, shape.head_dim)
    q, k, v = (torch.randn(sizes, device=DEVICE, dtype=DTYPE) for _ in range(3))
    usable = {info.name for info in list_backends(detect_hardware("cuda")) if info.usable}
    names = [name for name in PADDED_BACKENDS if name in usable]

    def runner(name: str, layout: TokenLayout) -> Callable[[], object]:
        return lambda: attention(q, k, v, backend=name, layout=layout)

    functions = {f"{name} {kind}": runner(name, layout)
                 for name in names for kind, layout in (("padded", padded), ("unpadded", whole))}  # fmt: skip
    for function in functions.values():
        function()
    samples = time_alternately(functions, DEVICE, num_rounds=num_rounds)
    figures = {
        f"padded_over_unpadded_{name}": statistics.median(
            whole / cut for whole, cut in zip(samples[f"{name} unpadded"], samples[f"{name} padded"], strict=True)
        )
        for name in names
    }
    return figures, {name: summary(times) for name, times in samples.items()}


def overhead_figures(num_chunks: int = 101, num_calls: int = 50) -> tuple[dict[str, float], dict[str, Any]]:
    """Microseconds of the host a call, ours minus the raw function's, in chunks that take turns."""
    try:
        from flash_attn.cute import flash_attn_func
    except ImportError:
        return {}, {}
    q, k, v = (torch.randn(1, 128, 2, 128, device=DEVICE, dtype=DTYPE) for _ in range(3))
    policy = AttentionPolicy(cli=AttentionConfig(default=AttentionSpec("fa4")), device="cuda", dtype=DTYPE)
    layer, context = LocalAttention(2, 128, policy=policy), AttentionContext()
    functions: dict[str, Callable[[], object]] = {
        "raw": lambda: flash_attn_func(q, k, v),
        "attention": lambda: attention(q, k, v, backend="fa4"),
        "layer": lambda: layer(q, k, v, context),
    }
    for function in functions.values():
        function()
    chunks: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(num_chunks):
        for name, function in functions.items():
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(num_calls):
                function()
            # Before the device is done: what counts is when the host is free again.
            chunks[name].append(1e6 * (time.perf_counter() - started) / num_calls)
    torch.cuda.synchronize()
    figures = {
        f"{name}_overhead_us": statistics.median(
            ours - raw for ours, raw in zip(chunks[name], chunks["raw"], strict=True)
        )
        for name in ("attention", "layer")
    }
    return figures, {name: summary(times, "us") for name, times in chunks.items()}


def summary(times: list[float], unit: str = "ms") -> dict[str, float]:
    return {
        f"median_{unit}": statistics.median(times),
        f"fastest_{unit}": min(times),
        f"slowest_{unit}": max(times),
        "num_samples": len(times),
    }


def reached(name: str, value: float) -> bool:
    direction, bound = TARGETS[name]
    return value >= bound if direction == "at least" else value <= bound


def print_tables(benchmark: AttentionBenchmark, figures: dict[str, float]) -> None:
    for shape in benchmark.shapes:
        print(f"\n{shape.name}: {shape.describe()}")
        for row in benchmark.of_shape(shape):
            if row.milliseconds is None:
                print(f"  {row.backend:16} {row.state}: {row.said}")
                continue
            print(
                f"  {row.backend:16} {row.milliseconds:9.3f} ms ({min(row.samples):.3f} to {max(row.samples):.3f})  "
                f"{row.tflops:6.1f} TF/s  {row.share_of_matmul:.3f} of {row.matmul_tflops:.0f}  "
                f"error {row.error:.1e}  {row.implementation}"
            )
    print("\nleft out:", "; ".join(f"{name}: {reason}" for name, reason in benchmark.left_out))
    print()
    for name, (direction, bound) in TARGETS.items():
        value = figures.get(name)
        said = "not measured" if value is None else f"{value:.3f} {'reached' if reached(name, value) else 'MISSED'}"
        print(f"{name:36} {direction} {bound:5}: {said}")


@torch.inference_mode()
def main() -> int:
    """1 when a backend was wrong or failed; a target that was missed is said and is no failure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--shapes", default="all", help="names with commas between, small or all")
    parser.add_argument("--backends", default="", help="names with commas between; default: every dense one")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--time-limit", type=float, default=240.0, help="seconds for the table of all shapes")
    arguments = parser.parse_args()
    if arguments.plot:
        check_plotting(arguments.plot)
    hardware = detect_hardware("cuda")
    names, left_out = default_backends(hardware)
    if arguments.backends:
        names, left_out = AttentionSpec(arguments.backends).candidates, ()
    # Its row says what it picked, and what picking costs.
    names = tuple(dict.fromkeys([*names, "measured"]))
    # A cache of its own: `measured` measures in this run.
    os.environ[ENVIRONMENT_VARIABLE] = tempfile.mkdtemp()
    # The figures first: they are what a run that is cut short must have.
    overhead, overhead_samples = overhead_figures()
    padded, padded_samples = padded_figures(arguments.repeats)
    print({name: round(value, 3) for name, value in {**overhead, **padded}.items()}, flush=True)
    benchmark = benchmark_attention(
        find_shapes(arguments.shapes.split(","), small_by_default=False),
        names,
        DEVICE,
        DTYPE,
        Effort(arguments.repeats, time.monotonic() + arguments.time_limit, matmul_size=8192),
        left_out=left_out,
        on_progress=lambda text: print(text, flush=True),
    )
    figures = {**speed_figures(benchmark), **overhead, **padded}
    document = {
        "schema": SCHEMA,
        "date": datetime.now(UTC).date().isoformat(),
        "machine": describe_machine("cuda"),
        "figures": {
            name: {"value": value, "target": " ".join(map(str, TARGETS[name])), "reached": reached(name, value)}
            for name, value in figures.items()
        },
        "overhead": overhead_samples,
        "padded": padded_samples,
        "bench": benchmark.to_dict(),
    }
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")
    if arguments.plot:
        plot_benchmark(benchmark, arguments.plot)
    print_tables(benchmark, figures)
    return benchmark.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
