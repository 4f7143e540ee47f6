"""Split-KV attention on one GPU: how far it is from float64, and its time beside one call of the same kernel.

    python -m benchmarks.split_kv_gpu --output benchmarks/results/split_kv_gpu.json
    python -m benchmarks.split_kv_gpu --parts 3 8 10 12 --output parts.json       # and other numbers of parts

FlashAttention-4 in bfloat16, heads of 128. Variants take turns; times are medians of CUDA events over calls that follow
each other, as in a transformer. Errors are those of some queries of both halves, relative in the Frobenius norm.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import describe_machine
from diffusion_runtime.attention.backends.reference import reference_attention
from diffusion_runtime.attention.backends.split_kv import KeySplit, attend_split, plan_split

# (name, queries, keys, heads)
CASES = (
    ("a chunk of causal Wan 1.3B, window 21", 4680, 32760, 12),
    ("the same, window 12", 4680, 18720, 12),
    ("the same, first chunk", 4680, 4680, 12),
    ("Qwen-Image, 1024 x 1024", 4096 + 128, 4096 + 128, 24),
    ("FLUX, 1024 x 1024", 4608, 4608, 24),
    ("Wan 1.3B, 81 frames at 480p", 32760, 32760, 12),
    ("Wan 14B on 8 processes, 720p", 75600, 75600, 5),
)
TILE = 128
CALLS, ROUNDS = 20, 5


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from flash_attn.cute import flash_attn_func

    out, lse = flash_attn_func(q, k, v, return_lse=True)
    return out, lse


def split_out(split: KeySplit, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return attend_split(split, q, k, v, attend)[0]


def error(out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> float:
    rows = torch.cat([torch.arange(32), torch.arange(q.shape[1] - 32, q.shape[1])]).to(q.device)
    exact, _ = reference_attention(q[:, rows].double(), k.double(), v.double())
    return float((out[:, rows].double() - exact).norm() / exact.norm())


def milliseconds(variants: dict[str, Callable[[], object]]) -> dict[str, float]:
    found: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(ROUNDS):
        for name, call in variants.items():
            call()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            for _ in range(CALLS):
                call()
            end.record()
            torch.cuda.synchronize()
            found[name].append(start.elapsed_time(end) / CALLS)
    return {name: statistics.median(times) for name, times in found.items()}


def measure(name: str, num_queries: int, num_keys: int, heads: int, parts: list[int]) -> dict[str, Any]:
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(1, n, heads, 128, device="cuda", dtype=torch.bfloat16) for n in (num_queries, *[num_keys] * 2)
    )
    num_processors = torch.cuda.get_device_properties(0).multi_processor_count
    planned = plan_split(num_queries, num_keys, heads, TILE, num_processors)
    waves = -(-num_queries // TILE) * heads / num_processors
    whole = int(waves) * num_processors // heads * TILE
    splits = {f"{n} parts": KeySplit(whole, n) for n in parts if num_keys % n == 0 and whole < num_queries}
    if planned is not None:
        splits["planned"] = planned
    outs: dict[str, Callable[[], torch.Tensor]] = {"one call": lambda: attend(q, k, v)[0]}
    for label, split in splits.items():
        outs[label] = functools.partial(split_out, split, q, k, v)
    errors = {label: error(call(), q, k, v) for label, call in outs.items()}
    times = milliseconds(dict(outs))
    operations = 4 * num_queries * num_keys * heads * 128
    return {
        "case": name,
        "queries": num_queries,
        "keys": num_keys,
        "heads": heads,
        "waves": waves,
        "planned": None if planned is None else planned._asdict(),
        "errors": errors,
        "milliseconds": times,
        "teraflops": {label: operations / ms / 1e9 for label, ms in times.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", type=int, default=[], help="other numbers of parts")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    rows = []
    for case in CASES:
        row = measure(*case, arguments.parts)
        rows.append(row)
        print(f"{row['case']}: {row['waves']:.2f} waves, planned {row['planned']}")
        for label, ms in row["milliseconds"].items():
            print(f"  {label:10} {ms:7.3f} ms {row['teraflops'][label]:5.0f} T/s, error {row['errors'][label]:.2e}")
    document = {
        "schema": "diffusion_runtime.split_kv_gpu/1",
        "machine": describe_machine(torch.device("cuda:0")),
        "rows": rows,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
