"""Attention in 8-bit floats (`fp8_attn`) on one GPU: correctness against float64, then calls and steps beside FA4.

    python -m benchmarks.fp8_attention_gpu --output fp8.json [--no-steps] [--no-launches] [--flashinfer]
    TRITON_INTERPRET=1 python -m benchmarks.fp8_attention_gpu --small --output /tmp/fp8.json

Needs nvidia-cudnn-frontend (pip install 'diffusion-runtime[fp8]') and FlashAttention-4. Calls: Wan 2.1 1.3B at 480p
(32760 tokens, 12 heads of 128), 14B at 720p (75600, 40), FLUX.1 at 1024 x 1024 (4608, 24), bfloat16, quantising
included; `replayed` is a call in a CUDA graph, which no host holds up. Rates count the work of dense attention.
Steps: Wan 1.3B and 14B at 480p with random weights, with FlashAttention and with fp8_attn, linear layers in bfloat16
and in 8 bits. A row that fails prints its traceback, and the output is written after each part.

--flashinfer: calls with its kernel too (pip install 'diffusion-runtime[flashinfer]'), which nvcc compiles for 81 s
first.
--small: on a CPU, with the eager formula in the kernel's place, to try every line.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib.metadata
import json
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.families.step import FamilyStep
from benchmarks.fused_kernels_gpu import STEPS, TINY_STEPS, Clock, velocity
from benchmarks.machine import describe_machine
from benchmarks.quantization_gpu import WAN_14B, build
from diffusion_runtime.attention import AttentionCall, LayerInfo, RequestCache, StepInfo, attention
from diffusion_runtime.attention.backends.interface import RoundedOptions
from diffusion_runtime.attention.force import force_attention_backend
from diffusion_runtime.attention.measured_error import sampled_squares
from diffusion_runtime.kernels.fp8_attention import reference
from diffusion_runtime.kernels.fp8_attention.triton import DEFAULT_SHAPE, LaunchShape, prepare
from diffusion_runtime.parallel.interface import AttentionInputs

NAME, FLASHINFER = "fp8_attn", "fp8_attn, flashinfer"
SHAPES = {"32760 x 12": (32760, 12), "75600 x 40": (75600, 40), "4608 x 24": (4608, 24)}
SMALL_SHAPES = {"70 x 2": (70, 2)}
HEAD_DIM = 128
SAMPLED_ROWS = 64
# batch, queries, keys, heads, kv heads, head_dim.
FORMS = (
    (1, 1000, 777, 4, 4, 128),
    (2, 512, 77, 6, 2, 128),
    (1, 1024, 1024, 4, 4, 64),
    (1, 64, 1, 2, 2, 128),
    (1, 1, 500, 2, 2, 128),
    (3, 33, 65, 2, 1, 64),
)
KINDS = ("normal", "offset", "outliers", "both", "sharp")
# The launches of what gathers, and of what rounds and restores.
GATHERING = tuple(
    LaunchShape(*numbers)
    for numbers in (
        *((32, 16, 4, 4), (32, 8, 2, 4), (64, 16, 4, 1), (64, 16, 4, 2)),
        *((64, 32, 8, 3), (64, 8, 2, 4)),
    )
)
ROUNDING = tuple(
    LaunchShape(rows=rows, tiles=tiles, warps=warps)
    for rows, tiles, warps in ((64, 1, 4), (64, 8, 4), (64, 16, 4), (128, 4, 8))
)
LINEAR_MODES = ("none", "fp8")

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def draw(form: tuple[int, ...], device: str, kind: str = "normal") -> Tensors:
    """q, k, v of a kind: normal; keys and values with an offset per channel; one channel in 16 of q and k four times as
    large; both; scores four times as large."""
    batch, num_q, num_k, heads, kv_heads, head_dim = form
    generator = torch.Generator(device).manual_seed(0)
    shapes = ((num_q, heads), (num_k, kv_heads), (num_k, kv_heads))
    q, k, v = (torch.randn(batch, *shape, head_dim, generator=generator, device=device) for shape in shapes)
    if kind in ("outliers", "both"):
        q[..., ::16] *= 4
        k[..., ::16] *= 4
    if kind in ("offset", "both"):
        k += 4 * torch.randn(kv_heads, head_dim, generator=generator, device=device)
        v += 2 * torch.randn(kv_heads, head_dim, generator=generator, device=device)
    if kind == "sharp":
        q *= 4
    return q.bfloat16(), k.bfloat16(), v.bfloat16()


def exact_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(rows, out [batch, rows, heads, head_dim], lse [batch, heads, rows]) in float64 of some queries."""
    rows = torch.linspace(0, q.shape[1] - 1, min(SAMPLED_ROWS, q.shape[1])).long().to(q.device)
    out = torch.empty(q.shape[0], len(rows), *q.shape[2:], dtype=torch.float64, device=q.device)
    lse = torch.empty(q.shape[0], q.shape[2], len(rows), dtype=torch.float64, device=q.device)
    repeats = q.shape[2] // k.shape[2]
    for head in range(q.shape[2]):
        of_q, keys, values = (x[:, :, h].double() for x, h in ((q, head), (k, head // repeats), (v, head // repeats)))
        scores = of_q[:, rows] @ keys.transpose(1, 2) * q.shape[3] ** -0.5
        lse[:, head] = scores.logsumexp(-1)
        out[:, :, head] = scores.softmax(-1) @ values
    return rows, out, lse


def relative(out: torch.Tensor, exact: torch.Tensor) -> float:
    return float((out.double() - exact).norm() / exact.norm())


def milliseconds(call: Callable[[], object], device: str) -> float:
    if device != "cuda":
        started = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - started)
    return float(triton.testing.do_bench(call, warmup=20, rep=300, return_mode="median"))


def tried(name: str, call: Callable[[], Any]) -> Any:
    """What `call` returns, or {"failed": its last line}, with the traceback printed."""
    try:
        found = call()
    except Exception as error:  # one row must not end the run
        print(f"--- {name} failed", flush=True)
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}"[:400]}
    print(f"{name}: {json.dumps(found)}", flush=True)
    return found


def check(form: tuple[int, ...], device: str, kind: str, **options: str) -> dict[str, Any]:
    """Errors of the registered backend, and of the eager reference, from float64."""
    q, k, v = draw(form, device, kind)
    rows, exact, exact_lse = exact_rows(q, k, v)
    out, lse = attention(q, k, v, backend=NAME, options=options, return_lse=True)
    expected, expected_lse = reference.fp8_attention_reference(q, k, v, scale=q.shape[3] ** -0.5)
    return {
        "error": relative(out[:, rows], exact),
        "lse": float((lse[:, :, rows] - exact_lse).abs().max()),
        "finite": bool(out.isfinite().all()),
        "without_lse_is_equal": torch.equal(out, attention(q, k, v, backend=NAME, options=options)),
        "reference_error": relative(expected[:, rows], exact),
        "reference_lse": float((expected_lse[:, :, rows] - exact_lse).abs().max()),
    }


def check_replay(device: str) -> dict[str, Any]:
    """A CUDA graph of a whole call gives the eager call's bits on other inputs."""
    if device != "cuda":
        return {}
    q, k, v = draw((1, 1000, 777, 4, 4, 128), device)
    attention(q, k, v, backend=NAME)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v, backend=NAME)
    for x in (q, k, v):
        x.copy_(torch.randn_like(x) * 2)
    graph.replay()
    torch.cuda.synchronize()
    first, second = (attention(q, k, v, backend=NAME) for _ in range(2))
    return {"replay_is_equal": torch.equal(out, first), "calls_are_equal": torch.equal(first, second)}


def replayed_ms(call: Callable[[], object], device: str) -> float | None:
    """Milliseconds of one of ten calls in a CUDA graph."""
    if device != "cuda":
        return None
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            call()
    return milliseconds(graph.replay, device) / 10


def launches_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Any]:
    """Milliseconds of what surrounds the kernel, by the shape of its launches."""
    found: dict[str, Any] = {}
    for shape in (DEFAULT_SHAPE, *GATHERING, *ROUNDING):
        made = prepare(q, k, v, scale=HEAD_DIM**-0.5, return_lse=False, shape=shape)
        out8 = torch.zeros(q.shape, dtype=reference.E4M3, device=q.device)
        made.gather()
        parts = {
            "gather": made.gather,
            "round": made.round_inputs,
            "restore": lambda made=made, out8=out8: made.restore(out8),
        }
        names = ("gather",) if shape in GATHERING else ("round", "restore") if shape in ROUNDING else tuple(parts)
        timed = {name: parts[name] for name in names}
        found[str(shape)] = tried(
            str(shape),
            lambda timed=timed: {name: milliseconds(call, q.device.type) for name, call in timed.items()},
        )
    return found


def time_shape(tokens: int, heads: int, device: str, flashinfer: bool) -> dict[str, Any]:
    """One shape: FlashAttention-4 before and after, fp8_attn whole, replayed and in parts, and its host's time."""
    q, k, v = draw((1, tokens, tokens, heads, heads, HEAD_DIM), device)
    rows, exact, _ = exact_rows(q, k, v)
    found: dict[str, Any] = {"work": 4 * tokens**2 * heads * HEAD_DIM}

    def timed(name: str, **options: str) -> dict[str, Any]:
        def call() -> Any:
            return attention(q, k, v, backend=name, options=options)

        row: dict[str, Any] = {"error": relative(call()[:, rows], exact), "ms": milliseconds(call, device)}
        if tokens < 8000 and not options:
            row["replayed_ms"] = replayed_ms(call, device)
        return row

    dense = "fa4" if device == "cuda" else "torch_sdpa"
    for name in (dense, NAME):
        found[name] = tried(name, lambda name=name: timed(name))
    if flashinfer:
        found[FLASHINFER] = tried(FLASHINFER, lambda: timed(NAME, kernel="flashinfer"))
    made = prepare(q, k, v, scale=HEAD_DIM**-0.5, return_lse=False)
    out8 = torch.zeros(q.shape, dtype=reference.E4M3, device=q.device)
    parts = {"gather": made.gather, "round": made.round_inputs, "restore": lambda: made.restore(out8)}
    if device == "cuda":
        parts["attend"] = made.attend
    whole = AttentionCall(AttentionInputs(q, k, v, None), RoundedOptions(), LayerInfo(), StepInfo(), RequestCache())
    out = attention(q, k, v, backend=NAME)
    # What each layer's first call takes in addition, and what it finds.
    parts["measure"] = lambda: sampled_squares(whole, out)
    found["measured_error"] = tried("measured error", lambda: _ratio(sampled_squares(whole, out)))
    found["parts"] = tried("parts", lambda: {part: milliseconds(call, device) for part, call in parts.items()})
    found["again"] = tried("again", lambda: timed(dense))
    found["host_us"] = tried("host us", lambda: host_microseconds(*(x[:, :64].contiguous() for x in (q, k, v))))
    return found


def _ratio(squares: torch.Tensor) -> float:
    difference, exact = squares.tolist()
    return float((difference / exact) ** 0.5)


def host_microseconds(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, float]:
    """Of one call of each, as short ones, the device never being behind."""
    found = {}
    for name in (NAME, "fa4") if q.is_cuda else (NAME,):
        attention(q, k, v, backend=name)
        started = time.perf_counter()
        for _ in range(50):
            attention(q, k, v, backend=name)
        found[name] = 2e4 * (time.perf_counter() - started)
    return found


@torch.inference_mode()
def time_step(step: FamilyStep, device: torch.device, repeats: int) -> dict[str, Any]:
    """One forward with each backend, linear layers in each mode: milliseconds, and the distance of the velocity from
    the first row's."""
    clock, inputs = Clock(device), step.make_inputs(device, torch.bfloat16)
    found: dict[str, dict[str, float]] = {}
    backends = ("fa4" if device.type == "cuda" else "torch_sdpa", NAME)
    expected: torch.Tensor | None = None
    for mode in LINEAR_MODES:
        models, state = [build(step, device, mode)[0]], RequestCache()

        def run(name: str, models: Any = models, state: RequestCache = state) -> torch.Tensor:
            with force_attention_backend(name, role="self"):
                return velocity(models[0], inputs, state)

        times: dict[str, list[float]] = {}
        for name in backends:
            out = run(name).float()
            expected = out if expected is None else expected
            difference = float((out - expected).norm() / expected.norm())
            found[f"{name}, linear layers {mode}"] = {"difference": difference}
        for _ in range(repeats):
            for name in backends:
                ms = clock.median_ms(lambda _, name=name, run=run: run(name), 1, 0)
                times.setdefault(name, []).append(ms)
        for name, several in times.items():
            found[f"{name}, linear layers {mode}"]["ms"] = statistics.median(several)
        models.clear()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return found


def print_table(result: dict[str, Any]) -> None:
    for name, of_shape in result["shapes"].items():
        print(f"\n{name} tokens x heads of {HEAD_DIM}; host us {of_shape['host_us']}")
        for key, row in of_shape.items():
            if not isinstance(row, dict) or key in ("parts", "host_us", "measured_error"):
                continue
            if "failed" in row:
                print(f"{key:10} {row}")
                continue
            replayed = row.get("replayed_ms")
            shown = "" if replayed is None else f"  replayed {replayed:7.3f}"
            rate = of_shape["work"] / row["ms"] / 1e9
            print(f"{key:10} {row['ms']:9.3f} ms {rate:5.0f} TF/s  error {row['error']:.4f}{shown}")
        print("parts     ", {part: round(ms, 3) for part, ms in of_shape["parts"].items() if isinstance(ms, float)})
        if all("ms" in of_shape.get(key, {}) for key in ("fa4", "again", NAME)):
            print(f"over fa4: {min(of_shape[key]['ms'] for key in ('fa4', 'again')) / of_shape[NAME]['ms']:.3f}x")
    for name, rows in result.get("steps", {}).items():
        print(f"\n{name}")
        for key, row in rows.items():
            print(f"{key:34} {row['ms']:8.1f} ms  difference {row['difference']:.4f}" if "ms" in row else (key, row))


def versions() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("nvidia-cudnn-frontend", "nvidia-cudnn-cu13", "nvidia-cutlass-dsl", "flash-attn-4"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--no-steps", action="store_true")
    parser.add_argument("--no-launches", action="store_true")
    parser.add_argument("--flashinfer", action="store_true")
    arguments = parser.parse_args()
    started = time.perf_counter()
    device, sizes = ("cpu", SMALL_SHAPES) if arguments.small else ("cuda", SHAPES)
    result: dict[str, Any] = {
        "schema": "diffusion_runtime.fp8_attention_gpu/3",
        "machine": describe_machine(device),
        "versions": versions(),
        "shapes": {},
    }

    def write() -> None:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
        print(f"({time.perf_counter() - started:.0f} s)", flush=True)

    forms = FORMS[4:] if arguments.small else FORMS
    result["forms"] = {str(form): tried(str(form), lambda form=form: check(form, device, "normal")) for form in forms}
    form = (1, 70, 70, 2, 2, 128) if arguments.small else (1, 4096, 4096, 8, 8, 128)
    result["kinds"] = {kind: tried(kind, lambda kind=kind: check(form, device, kind)) for kind in KINDS}
    if arguments.flashinfer:
        result["flashinfer"] = {
            str(each): tried(str(each), lambda each=each: check(each, device, "normal", kernel="flashinfer"))
            for each in FORMS
            # Head size 64 is compiled apart.
            if each[5] == HEAD_DIM
        }
    result["replay"] = tried("replay", lambda: check_replay(device))
    for name, size in sizes.items():
        result["shapes"][name] = tried(name, lambda size=size: time_shape(*size, device, arguments.flashinfer))
        write()
    if not arguments.no_steps:
        tiny = dataclasses.replace(TINY_STEPS[0], config={**TINY_STEPS[0].config, "attention_head_dim": 64})
        steps = (tiny,) if arguments.small else (STEPS["wan"], WAN_14B)
        result["steps"] = {}
        for step, repeats in zip(steps, (5, 2), strict=False):
            result["steps"][step.name] = tried(
                step.name, lambda step=step, repeats=repeats: time_step(step, torch.device(device), repeats)
            )
            write()
    if not arguments.no_launches:
        result["launches"] = {}
        # The first and the last size: what is best for long calls need not be for short ones.
        for name in (next(iter(sizes)), next(reversed(sizes))):
            tokens, heads = sizes[name]
            inputs = draw((1, tokens, tokens, heads, heads, HEAD_DIM), device)
            result["launches"][name] = launches_of(*inputs)
            del inputs
            write()
    print_table(result)
    print(f"{time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    main()
