"""Products of Z-Image-Turbo's step at 1024 x 1024 by cuBLAS and by quack, FlashAttention-4's companion: each by itself,
then one whole forward pass before and after, by turns in one run.

    python -m benchmarks.products_gpu --output products.json [--only parts,step] [--configs pingpong] [--repeats 20]

The step has 47.7 TFLOP of products and 8.7 of attention, and moves 21.8 GB in passes of norms, rotations and gates: at
730 and 650 TFLOP/s and 4.2 TB/s that is 84.0 ms. With tiles of 128 x 256 a product of 4224 rows and 3840 columns is
3.75 rounds of 132 multiprocessors, which take 4; tiles of 128 x 192 make 5.0 rounds. quack computes silu(gate) *
features while it writes the product, so that 173 MB per block are neither written nor read again.

Weights are random and the same for both. `error` is relative to float64, over the first 256 rows, and a quack product
is used in the step where its error is at most 1.1 times cuBLAS's and its time less. What compiles takes its seconds
apart. --configs: those of quack whose name contains this; each compiles four times. A part that takes longer than
--seconds ends the process with a trace; the file is written after each. On an H200 about 150 s, most of it compiling
(quack keeps what it compiled).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import faulthandler
import functools
import importlib.util
import json
import statistics
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.families.z_image import STEPS
from benchmarks.families_gpu import build_ours, build_theirs
from benchmarks.machine import describe_machine
from diffusion_runtime.attention import AttentionContext
from diffusion_runtime.attention.context import RequestCache
from diffusion_runtime.attention.functional import attention
from diffusion_runtime.benchmark.clock import Clock
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.kernels.activations.api import silu_mul
from diffusion_runtime.layers.linear import GatedFeedForward, Linear
from diffusion_runtime.layers.modulation_rows import plan_steps
from diffusion_runtime.startup.importing import raised_line

DTYPE = torch.bfloat16
NUM_ROWS = 4224
NUM_STEPS = 8
EVERY_STEP = "cublas, modulation at every step"
# (tile_m, tile_n, pingpong, (cluster_m, cluster_n)): configurations of quack's kernel for sm_90.
CONFIGS = (
    (128, 192, True, (1, 2)),
    (128, 192, True, (2, 1)),
    (128, 256, False, (2, 1)),
    (256, 192, False, (1, 2)),
    (256, 128, False, (2, 1)),
)
# Quack's gated kernel takes columns in multiples of 32 of a tile.
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """A product of a block: rows [NUM_ROWS, in_features] to out_features; is_gated: halved by silu(gate) * features."""

    name: str
    in_features: int
    out_features: int
    is_gated: bool = False

    @property
    def operations(self) -> float:
        return 2.0 * NUM_ROWS * self.in_features * self.out_features


SHAPES = (
    Shape("qkv", 3840, 11520),
    Shape("attention out", 3840, 3840),
    Shape("gate and features", 3840, 20480, is_gated=True),
    Shape("down", 10240, 3840),
)


def cublas(shape: Shape) -> Product:
    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        found = F.linear(x, weight)
        return silu_mul(*found.chunk(2, dim=-1)) if shape.is_gated else found

    return product


def cublaslt(shape: Shape, zeros: torch.Tensor) -> Product:
    """The same product through cuBLASLt, which torch takes for a bias."""

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        found = torch.addmm(zeros[: len(weight)], x, weight.t())
        return silu_mul(*found.chunk(2, dim=-1)) if shape.is_gated else found

    return product


def quack(shape: Shape, config: tuple[int, int, bool, tuple[int, int]]) -> Product:
    from quack.gemm_config import GemmConfig
    from quack.gemm_interface import gemm_act

    tile_m, tile_n, pingpong, (cluster_m, cluster_n) = config
    made = GemmConfig(
        tile_m=tile_m,
        tile_n=tile_n,
        pingpong=pingpong,
        cluster_m=cluster_m,
        cluster_n=cluster_n,
        is_dynamic_persistent=False,
    )
    # The weight has the rows of the gate, then those of the features.
    gated: dict[str, Any] = {"activation": "swiglu", "concat_layout": ("B",)} if shape.is_gated else {}

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return gemm_act(x, weight.t(), store_preact=False, tuned=False, config=made, **gated)[1]  # type: ignore[no-any-return]

    return product


def candidates(shape: Shape, zeros: torch.Tensor, wanted: str = "") -> Iterator[tuple[str, Callable[[], Product]]]:
    """Yield the ways of a product by name. wanted: what the names of quack's contain."""
    yield "cublas", lambda: cublas(shape)
    yield "cublaslt", lambda: cublaslt(shape, zeros)
    if importlib.util.find_spec("quack") is not None:
        for config in CONFIGS:
            tile_m, tile_n, pingpong, cluster = config
            name = f"quack {tile_m}x{tile_n} {'pingpong' if pingpong else 'cooperative'} {cluster[0]}x{cluster[1]}"
            if wanted in name:
                yield name, functools.partial(quack, shape, config)


@torch.inference_mode()
def measure_shape(shape: Shape, repeats: int, seconds: float, wanted: str) -> dict[str, Any]:
    """Median milliseconds of each candidate, taken by turns, its error and the seconds of its first call."""
    clock, device = Clock(torch.device("cuda")), torch.device("cuda")
    x = torch.randn(NUM_ROWS, shape.in_features, device=device).to(DTYPE)
    # Several, so that none is found in the chip's cache.
    weights = [
        (torch.randn(shape.out_features, shape.in_features, device=device) * shape.in_features**-0.5).to(DTYPE)
        for _ in range(4)
    ]
    zeros = torch.zeros(shape.out_features, device=device, dtype=DTYPE)
    exact = F.linear(x[:256].double(), weights[0].double())
    if shape.is_gated:
        gate, features = exact.chunk(2, dim=-1)
        exact = F.silu(gate) * features
    rows: dict[str, dict[str, Any]] = {}
    products: dict[str, Product] = {}
    for name, make in candidates(shape, zeros, wanted):
        with limited(seconds):
            try:
                started = time.perf_counter()
                product = make()
                found = product(x, weights[0])
                torch.cuda.synchronize()
                spent = time.perf_counter() - started
                error = float((found[:256].double() - exact).norm() / exact.norm())
                rows[name] = {"first_call_s": round(spent, 2), "error": error}
                products[name] = product
            except Exception as failure:  # any exception: a compiler may raise anything
                traceback.print_exc()
                rows[name] = {"failure": raised_line(failure)}
    times: dict[str, list[float]] = {name: [] for name in products}
    with limited(seconds):
        for repeat in range(repeats + 3):
            for name, product in products.items():

                def several(product: Product = product, repeat: int = repeat) -> None:
                    for index in range(4):
                        product(x, weights[(repeat + index) % 4])

                spent = clock.milliseconds(several) / 4
                if repeat >= 3:
                    times[name].append(spent)
    for name, several_times in times.items():
        milliseconds = statistics.median(several_times)
        rows[name] |= {"ms": milliseconds, "tflops": shape.operations / milliseconds / 1e9}
    return {"shape": shape.name, "rows": rows}


@torch.inference_mode()
def measure_attention(repeats: int, seconds: float) -> dict[str, Any]:
    """Milliseconds of one call of [1, 4224, 30, 128] under each backend."""
    clock = Clock(torch.device("cuda"))
    q, k, v = torch.randn(3, 1, NUM_ROWS, 30, 128, device="cuda").to(DTYPE)
    rows: dict[str, Any] = {}
    for backend in ("fa", "cudnn_attn", "torch_sdpa"):
        with limited(seconds):
            try:
                milliseconds = clock.median_ms(lambda _, name=backend: attention(q, k, v, backend=name), repeats, 3)
                rows[backend] = {"ms": milliseconds, "tflops": 4.0 * NUM_ROWS**2 * 3840 / milliseconds / 1e9}
            except Exception as failure:  # any exception: a backend that is not here
                rows[backend] = {"failure": raised_line(failure)}
    return {"shape": "attention", "rows": rows}


def chosen(parts: list[dict[str, Any]]) -> dict[str, str]:
    """By shape: quack's quickest candidate that is exact enough, where it beats cuBLAS."""
    found = {}
    for part in parts:
        rows, base = part["rows"], part["rows"].get("cublas", {})
        timed = {name: row for name, row in rows.items() if name.startswith("quack") and "ms" in row}
        good = {name: row for name, row in timed.items() if row["error"] <= 1.1 * base.get("error", 0.0)}
        best = min(good, key=lambda name: good[name]["ms"], default=None)
        if best is not None and good[best]["ms"] < base["ms"]:
            found[part["shape"]] = best
    return found


@contextlib.contextmanager
def products_replaced(names: Mapping[str, str]) -> Iterator[Counter[str]]:
    """Context manager: linear layers of these shapes, and gated feed-forward networks, compute by quack. Gives the
    calls of each kind."""
    calls: Counter[str] = Counter()
    zeros = torch.zeros(1, device="cuda", dtype=DTYPE)
    made: dict[tuple[int, int], Product] = {}
    for shape in SHAPES:
        if shape.name in names:
            make = dict(candidates(shape, zeros))[names[shape.name]]
            made[shape.in_features, shape.out_features] = make()
    gated = {(shape.in_features, shape.out_features) for shape in SHAPES if shape.is_gated}
    product, forward = Linear.product, GatedFeedForward.forward

    def of_layer(layer: Linear, x: torch.Tensor) -> torch.Tensor:
        size = (layer.in_features, layer.out_features)
        if size not in made or size in gated or layer.bias is not None or x.shape[-2] < 1024:
            return product(layer, x)
        calls["product"] += 1
        return made[size](x.flatten(0, -2), layer.weight).view(*x.shape[:-1], -1)

    def of_network(network: GatedFeedForward, x: Any) -> torch.Tensor:
        size = (network.up.in_features, network.up.out_features)
        if size not in made or not isinstance(x, torch.Tensor) or x.shape[-2] < 1024:
            return forward(network, x)
        calls["gated product"] += 1
        hidden = made[size](x.flatten(0, -2), network.up.weight).view(*x.shape[:-1], -1)
        out: torch.Tensor = network.down(hidden)
        return out

    Linear.product, GatedFeedForward.forward = of_layer, of_network  # type: ignore[method-assign]
    try:
        yield calls
    finally:
        Linear.product, GatedFeedForward.forward = product, forward  # type: ignore[method-assign]


@torch.inference_mode()
def measure_step(names: Mapping[str, str], repeats: int, seconds: float) -> dict[str, Any]:
    """Milliseconds of one forward pass in the middle of a request, before and after, by turns."""
    with limited(seconds):
        device, step = torch.device("cuda"), STEPS[0]
        theirs = build_theirs(step, device)
        inputs = step.make_inputs(device, DTYPE)
        state = dict(theirs.state_dict())
        del theirs
        model = build_ours(step, None, state, device, takes=True)
    clock, (latents, timestep, given) = Clock(device), inputs.ours
    now = StepInfo(0, NUM_STEPS, timestep=float(timestep[0]), next_timestep=0.0)
    planned, unplanned = RequestCache(), RequestCache()
    plan_steps(planned, [now, *(dataclasses.replace(now, timestep=100.0 * each) for each in range(1, NUM_STEPS))])

    def forward(name: str) -> torch.Tensor:
        state = unplanned if name == EVERY_STEP else planned
        velocity: torch.Tensor = model(latents, timestep, given, AttentionContext(step=now, state=state))
        return velocity

    # Before: what modulates is computed at every step. After: at the first one.
    modes: dict[str, Mapping[str, str]] = {EVERY_STEP: {}, "cublas": {}, "quack": names}
    gate = {name: value for name, value in names.items() if name == "gate and features"}
    if gate and gate != dict(names):
        modes["quack, gated alone"] = gate
    velocities: dict[str, torch.Tensor] = {}
    times: dict[str, list[float]] = {name: [] for name in modes}
    calls: dict[str, Counter[str]] = {}
    with limited(seconds):
        for repeat in range(repeats + 3):
            for name, replaced in modes.items():
                with products_replaced(replaced) as calls[name]:
                    spent = clock.milliseconds(lambda name=name: velocities.update({name: forward(name)}))
                if repeat >= 3:
                    times[name].append(spent)
    expected = velocities["cublas"].float()
    return {
        name: {
            "ms": statistics.median(times[name]),
            "least_ms": min(times[name]),
            "difference": float((velocities[name].float() - expected).norm() / expected.norm()),
            "products": dict(modes[name]),
            "calls_by_quack": dict(calls[name]),
        }
        for name in modes
    }


def figures(row: Mapping[str, Any]) -> str:
    if "failure" in row:
        return str(row["failure"])
    first = f"first call {row['first_call_s']:.1f} s"
    return f"{row['ms']:7.3f} ms {row['tflops']:6.0f} TFLOP/s  error {row['error']:.2e}  {first}"


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Context manager: a part that takes longer ends the process, with where it was."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", default="parts,step")
    parser.add_argument("--configs", default="", help="part of the names of quack's configurations; all of them")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=120.0, help="that one part may take")
    arguments = parser.parse_args()
    document: dict[str, Any] = {"machine": describe_machine("cuda"), "rows": NUM_ROWS, "parts": []}

    def write() -> None:
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")

    for shape in SHAPES if "parts" in arguments.only else ():
        part = measure_shape(shape, arguments.repeats, arguments.seconds, arguments.configs)
        document["parts"].append(part)
        write()
        for name, row in part["rows"].items():
            print(f"{shape.name:18} {name:28} {figures(row)}", flush=True)
    if "parts" in arguments.only:
        part = measure_attention(arguments.repeats, arguments.seconds)
        document["parts"].append(part)
        write()
        print(json.dumps(part["rows"]), flush=True)
    if "step" in arguments.only:
        document["chosen"] = chosen([each for each in document["parts"] if each["shape"] != "attention"])
        print("chosen:", document["chosen"], flush=True)
        document["step"] = measure_step(document["chosen"], arguments.repeats, arguments.seconds)
        write()
        print(json.dumps(document["step"], indent=1), flush=True)


if __name__ == "__main__":
    main()
