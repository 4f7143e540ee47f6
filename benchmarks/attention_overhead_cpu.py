"""What `attention(...)` adds to a call of torch's function on the CPU, in microseconds.

    python -m benchmarks.attention_overhead_cpu [--output benchmarks/results/attention_overhead_cpu.json]

One token, so that nearly all of a call is the way to the kernel. Chunks of both take turns; the figure is the median of
the differences of neighbouring chunks. The layer that models are built from, which also counts its calls, beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.machine import describe_machine
from diffusion_runtime.attention import AttentionContext, LocalAttention, attention

# What is promised for `attention`, in microseconds.
TARGET = 20.0


def microseconds(function: Callable[[], object], num_calls: int) -> float:
    """Of this thread, which does all the work: on a shared machine the clock on the wall counts the others' too."""
    started = time.thread_time()
    for _ in range(num_calls):
        function()
    return 1e6 * (time.thread_time() - started) / num_calls


@torch.inference_mode()
def main() -> int:
    """1 when `attention` costs more than it may."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=101)
    parser.add_argument("--calls", type=int, default=200, help="in a chunk")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    q, k, v = torch.randn(3, 1, 1, 1, 64)
    layer, context = LocalAttention(1, 64), AttentionContext()
    functions: dict[str, Callable[[], object]] = {
        "torch": lambda: F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)),
        "attention": lambda: attention(q, k, v),
        "attention_by_name": lambda: attention(q, k, v, backend="torch_sdpa"),
        "layer": lambda: layer(q, k, v, context),
    }
    for function in functions.values():
        microseconds(function, arguments.calls)
    chunks: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(arguments.chunks):
        for name, function in functions.items():
            chunks[name].append(microseconds(function, arguments.calls))
    rows = {}
    for name, times in chunks.items():
        added = [ours - theirs for ours, theirs in zip(times, chunks["torch"], strict=True)]
        rows[name] = {
            "median_us": round(statistics.median(times), 2),
            "fastest_us": round(min(times), 2),
            "added_us": round(statistics.median(added), 2),
        }
        print(f"{name:18} {rows[name]['median_us']:7.2f} us per call, {rows[name]['added_us']:+7.2f} over torch's")
    is_reached = rows["attention"]["added_us"] < TARGET
    print(f"attention adds less than {TARGET:.0f} us: {'reached' if is_reached else 'MISSED'}")
    if arguments.output:
        document = {
            "benchmark": "attention_overhead_cpu",
            "date": datetime.now(UTC).date().isoformat(),
            "machine": describe_machine("cpu"),
            "chunks": arguments.chunks,
            "calls": arguments.calls,
            "target_us": TARGET,
            "rows": rows,
        }
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(document, indent=2) + "\n")
    return int(not is_reached)


if __name__ == "__main__":
    raise SystemExit(main())
