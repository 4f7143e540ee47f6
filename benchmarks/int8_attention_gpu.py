"""8-bit attention on one GPU: correctness first, then every variant beside the dense backends in one run.

    python -m benchmarks.int8_attention_gpu --output benchmarks/results/int8_attention_gpu.json

Wan 2.1 1.3B at 480p (32760 tokens, 12 heads of 128) and FLUX.1 at 1024 x 1024 (4608 tokens, 24 heads of 128), bfloat16.
`attend` is the kernel alone, `whole` quantises too; rates count the work of dense attention. Variants are compiled and
compared with float64 in processes of their own, several at a time: one that hangs or crashes costs its own row alone.

--tiny: small sizes and few variants, on a CPU in Triton's interpreter (TRITON_INTERPRET=1), to try every line.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.machine import describe_machine
from diffusion_runtime.attention import attention
from diffusion_runtime.errors import BackendUnavailableError
from diffusion_runtime.kernels.int8_attention.triton import Prepared, TileShape, prepare

SHAPES = {"32760 x 12": (32760, 12), "4608 x 24": (4608, 24)}
TINY_SHAPES = {"70 x 1": (70, 1), "64 x 1": (64, 1)}
# Of VARIANTS, with --tiny.
TINY_STEP = 6
HEAD_DIM = 128
DENSE = ("fa4", "cudnn_attn", "torch_sdpa")
SAMPLED_ROWS = 128
PROCESSES = 8
SECONDS_PER_VARIANT = 100

# (values, shape). The second is what tile_shape gives.
VARIANTS: tuple[tuple[str, TileShape], ...] = (
    *(("int8", TileShape(128, 64, 8, stages)) for stages in (2, 3, 4)),
    *(("int8", TileShape(128, 128, 8, stages)) for stages in (2, 3)),
    ("int8", TileShape(64, 64, 4, 3)),
    ("int8", TileShape(64, 128, 4, 2)),
    ("int8", TileShape(64, 128, 4, 3)),
    ("int8", TileShape(128, 64, 8, 3, bulk=False)),
    ("int8", TileShape(64, 64, 4, 3, bulk=False)),
    ("int8", TileShape(128, 64, 8, 3, ahead=True)),
    ("int8", TileShape(128, 128, 8, 2, ahead=True)),
    ("int8", TileShape(64, 64, 4, 3, ahead=True)),
    ("int8", TileShape(64, 128, 4, 3, ahead=True)),
    ("fp8", TileShape(128, 64, 8, 3)),
    ("fp8", TileShape(128, 128, 8, 3)),
    ("fp8", TileShape(64, 128, 4, 3)),
    ("fp8", TileShape(128, 128, 8, 2, ahead=True)),
    ("fp16", TileShape(128, 64, 8, 3)),
    ("fp16", TileShape(64, 64, 4, 3)),
    ("fp16", TileShape(128, 128, 8, 2)),
)


def draw(tokens: int, heads: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v = (torch.randn(1, tokens, heads, HEAD_DIM, generator=generator, device=device).to(dtype) for _ in "qkv")
    return q, k, v


def exact_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, out [rows, heads, head_dim] in float64) of queries from the whole length."""
    rows = torch.linspace(0, q.shape[1] - 1, min(SAMPLED_ROWS, q.shape[1])).long().to(q.device)
    q_rows, keys, values = q[0, rows].double().transpose(0, 1), k[0].double(), v[0].double()
    weights = torch.softmax(q_rows @ keys.permute(1, 2, 0) / HEAD_DIM**0.5, -1)
    return rows, (weights @ values.transpose(0, 1)).transpose(0, 1)


def prepared(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, values: str, shape: TileShape) -> Prepared:
    return prepare(q, k, v, scale=HEAD_DIM**-0.5, values=values, return_lse=False, shape=shape)


def check_variant(number: int, sizes: dict[str, tuple[int, int]], device: str) -> None:
    """Prints the relative errors of one variant on every shape, as JSON."""
    values, shape = VARIANTS[number]
    errors = {}
    for name, (tokens, heads) in sizes.items():
        q, k, v = draw(tokens, heads, device)
        call = prepared(q, k, v, values, shape)
        call.out.fill_(torch.nan)
        call.quantize()
        call.attend()
        rows, exact = exact_rows(q, k, v)
        errors[name] = float((call.out[0, rows].double() - exact).norm() / exact.norm())
        if not call.out.isfinite().all():
            raise SystemExit(f"{name}: the result holds numbers that are not finite")
    print(json.dumps(errors))


def check_variants(tiny: bool) -> list[dict[str, Any]]:
    """Every variant in a process of its own, several at a time: {errors} or {failed}, {} for what --tiny leaves out."""
    command = [sys.executable, "-m", "benchmarks.int8_attention_gpu", *(["--tiny"] if tiny else []), "--check"]
    waiting = list(range(0, len(VARIANTS), TINY_STEP if tiny else 1))
    running: dict[int, tuple[subprocess.Popen[str], float]] = {}
    found: list[dict[str, Any]] = [{} for _ in VARIANTS]
    while waiting or running:
        while waiting and len(running) < (1 if tiny else PROCESSES):
            number = waiting.pop(0)
            process = subprocess.Popen(
                [*command, str(number)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            running[number] = process, time.monotonic()
        for number, (process, started) in list(running.items()):
            late = time.monotonic() - started > SECONDS_PER_VARIANT
            if process.poll() is None and not late:
                continue
            if process.poll() is None:
                process.kill()
            out, said = process.communicate()
            del running[number]
            if process.returncode == 0:
                found[number] = {"errors": json.loads(out.splitlines()[-1])}
            else:
                last = "took too long" if late else next(iter(said.strip().splitlines()[::-1]), "")
                found[number] = {"failed": last[:300]}
        time.sleep(0.05)
    return found


def milliseconds(call: Callable[[], object], device: str) -> float:
    if device != "cuda":
        started = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - started)
    return float(triton.testing.do_bench(call, warmup=30, rep=150, return_mode="median"))


def time_dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, device: str) -> dict[str, float | str]:
    found: dict[str, float | str] = {}
    for name in DENSE:
        try:
            found[name] = milliseconds(lambda name=name: attention(q, k, v, backend=name), device)  # type: ignore[misc]
        except BackendUnavailableError as error:
            found[name] = str(error)[:200]
    return found


def time_variant(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, values: str, shape: TileShape) -> dict[str, float]:
    device = q.device.type
    call = prepared(q, k, v, values, shape)
    call.quantize()

    def whole() -> None:
        made = prepared(q, k, v, values, shape)
        made.quantize()
        made.attend()

    return {
        "attend_ms": milliseconds(call.attend, device),
        "quantize_ms": milliseconds(call.quantize, device),
        "whole_ms": milliseconds(whole, device),
    }


def time_variants(checked: list[dict[str, Any]], sizes: dict[str, tuple[int, int]], device: str) -> dict[str, Any]:
    """By shape: dense backends before and after, and the variants that passed."""
    timed: dict[str, Any] = {}
    for name, (tokens, heads) in sizes.items():
        q, k, v = draw(tokens, heads, device)
        work = 4 * tokens**2 * heads * HEAD_DIM
        dense = time_dense(q, k, v, device)
        rows = []
        for (values, shape), outcome in zip(VARIANTS, checked, strict=True):
            if not outcome:
                continue
            row: dict[str, Any] = {"values": values, **asdict(shape), **outcome}
            if "errors" in outcome:
                row["error"] = row.pop("errors")[name]
                row |= time_variant(q, k, v, values, shape)
                row["whole_tflops"] = work / row["whole_ms"] / 1e9
                row["attend_tflops"] = work / row["attend_ms"] / 1e9
            rows.append(row)
        timed[name] = {"dense_ms": dense, "dense_again_ms": time_dense(q, k, v, device), "variants": rows}
        timed[name]["dense_tflops"] = {key: work / ms / 1e9 for key, ms in dense.items() if isinstance(ms, float)}
    return timed


def print_table(timed: dict[str, Any]) -> None:
    for name, of_shape in timed.items():
        print(f"\n{name} tokens x heads of {HEAD_DIM}")
        for key, ms in of_shape["dense_ms"].items():
            again = of_shape["dense_again_ms"][key]
            shown = f" {ms}"
            if isinstance(ms, float):
                shown = f"{ms:8.3f} {again:8.3f} ms {of_shape['dense_tflops'][key]:6.0f} TF/s"
            print(f"{key:12} {shown}")
        times = [ms for ms in of_shape["dense_ms"].values() if isinstance(ms, float)]
        best = min(times) if times else float("nan")
        rows = sorted(of_shape["variants"], key=lambda row: row.get("whole_ms", 1e9))
        for row in rows:
            flags = " ".join(flag for flag in ("bulk", "ahead") if row[flag])
            label = f"{row['values']:5} {row['rows']}x{row['block']} w{row['num_warps']} s{row['num_stages']} {flags}"
            if "failed" in row:
                print(f"{label:42} failed: {row['failed'][:80]}")
                continue
            print(
                f"{label:42} attend {row['attend_ms']:7.3f} ({row['attend_tflops']:4.0f}) + {row['quantize_ms']:6.3f}: "
                f"{row['whole_ms']:7.3f} ms {row['whole_tflops']:5.0f} TF/s {best / row['whole_ms']:5.2f}x "
                f"error {row['error']:.4f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--check", type=int, help="one variant, in this process")
    arguments = parser.parse_args()
    device, sizes = ("cpu", TINY_SHAPES) if arguments.tiny else ("cuda", SHAPES)
    if arguments.check is not None:
        check_variant(arguments.check, sizes, device)
        return
    started = time.perf_counter()
    checked = check_variants(arguments.tiny)
    print(f"checked {len(checked)} variants in {time.perf_counter() - started:.0f} s", flush=True)
    timed = time_variants(checked, sizes, device)
    if arguments.output is not None:
        result = {"machine": describe_machine(device), "head_dim": HEAD_DIM, "shapes": timed}
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print_table(timed)
    print(f"{time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    main()
