"""What a layer of causal Wan 2.1 1.3B at 480p does with its key-value cache, part by part, on one GPU.

    python -m benchmarks.cache_read_gpu --output benchmarks/results/cache_read_gpu.json
    python -m benchmarks.cache_read_gpu --device cpu --output cache_read_cpu.json     # every path, at tiny sizes

A full window of 21 latent frames and a chunk of three. First how far the fused kernel is from the eager formula, both
against float64, then the median milliseconds of: reading the fp8 codes, eagerly and fused; writing and reading a whole
store, in the model's dtype and in fp8, for a denoising pass and for a commit; and attention (SDPA) over what was read.
`extra_s_per_chunk` is what an fp8 cache costs over one in the model's dtype in 30 layers, four steps and a commit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import describe_machine
from diffusion_runtime.attention.cache.plan import CachePlan, plan_forward
from diffusion_runtime.attention.cache.quantised import Fp8Store
from diffusion_runtime.attention.cache.slots import FrameSlots
from diffusion_runtime.attention.cache.store import KeyStore, KeyStoreSize, RingStore
from diffusion_runtime.attention.cache.window import FrameWindow
from diffusion_runtime.kernels.fp8_cache import dequantise

WINDOW, CHUNK, LAYERS, STEPS = 21, 3, 30, 4


def median_ms(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Of single calls, after those that compile; what the device takes, not what launching does."""
    for _ in range(3):
        call()
    found = []
    for _ in range(repeats):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            # Work ahead of the call, so that its launches do not wait for the host.
            torch.cuda._sleep(2_000_000)
            begin.record()
            call()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end))
        else:
            start = time.perf_counter()
            call()
            found.append(1e3 * (time.perf_counter() - start))
    return statistics.median(found)


def full_plan(phase: str, per_frame: int, device: torch.device) -> CachePlan:
    """Of the first chunk after the window is full, as it is recorded in a CUDA graph."""
    slots = FrameSlots.of(FrameWindow(0, WINDOW), None)
    return plan_forward(slots, range(WINDOW, WINDOW + CHUNK), per_frame, phase).with_write_index(device)


def filled(store: KeyStore, size: KeyStoreSize, per_frame: int) -> KeyStore:
    slots = FrameSlots.of(FrameWindow(0, WINDOW), None)
    for first in range(0, WINDOW, CHUNK):
        plan = plan_forward(slots, range(first, first + CHUNK), per_frame, "commit")
        store.write(plan, *drawn(size, per_frame))
        store.read(plan)
    return store


def drawn(size: KeyStoreSize, per_frame: int) -> torch.Tensor:
    """Keys and values of a chunk."""
    shape = (2, size.batch, CHUNK * per_frame, size.num_heads, size.head_dim)
    return torch.randn(shape, dtype=size.dtype, device=size.device)


def passed(store: KeyStore, plan: CachePlan, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    store.write(plan, k, v)
    return store.read(plan)


def errors(codes: tuple[torch.Tensor, torch.Tensor], store: Fp8Store) -> dict[str, float]:
    """Largest error of both implementations against float64, over the largest number."""
    exact = dequantise(*codes, store.scale.double(), store.mean.double(), implementation="reference")
    found = {}
    for name in ("reference", "auto"):
        computed = dequantise(*codes, store.scale, store.mean, implementation=name)
        pairs = zip(computed, exact, strict=True)
        found[name] = max(float((x.double() - y).abs().max() / y.abs().max()) for x, y in pairs)
    return found


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))


@torch.inference_mode()
def measure(device: torch.device, repeats: int) -> dict[str, Any]:
    on_gpu = device.type == "cuda"
    per_frame, heads, head_dim = (1560, 12, 128) if on_gpu else (16, 2, 16)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    size = KeyStoreSize(1, WINDOW * per_frame, heads, head_dim, dtype, device)
    torch.manual_seed(0)
    plain, fp8 = filled(RingStore(size), size, per_frame), filled(Fp8Store(size), size, per_frame)
    assert isinstance(fp8, Fp8Store)
    k, v = drawn(size, per_frame)
    plans = {phase: full_plan(phase, per_frame, device) for phase in ("denoise", "commit")}
    codes = fp8.codes.read(plans["denoise"])

    def read_by(implementation: str) -> Callable[[], object]:
        return lambda: dequantise(*codes, fp8.scale, fp8.mean, implementation=implementation)

    def pass_of(store: KeyStore, phase: str) -> Callable[[], object]:
        return lambda: passed(store, plans[phase], k, v)

    found: dict[str, Any] = {"shape": [1, size.num_tokens, heads, head_dim], "dtype": str(dtype)}
    found["largest_error"] = error = errors(codes, fp8)
    # Half a unit in the last place of bfloat16 and of float32 each: both round once.
    assert error["auto"] <= max(error["reference"], 2**-8 if on_gpu else 2.5e-7), error
    calls = {"read_eager": read_by("reference"), "read": read_by("auto")}
    for name, store in (("plain", plain), ("fp8", fp8)):
        calls |= {f"{name}_{phase}": pass_of(store, phase) for phase in plans}
    in_sight = passed(plain, plans["denoise"], k, v)
    calls["attention_sdpa"] = lambda: attention(k, *in_sight)
    found["ms"] = ms = {name: median_ms(call, device, repeats) for name, call in calls.items()}
    extra = {phase: ms[f"fp8_{phase}"] - ms[f"plain_{phase}"] for phase in plans}
    found["extra_s_per_chunk"] = LAYERS * (STEPS * extra["denoise"] + extra["commit"]) / 1e3
    num_bytes = sum(x.numel() * (1 + dtype.itemsize) for x in codes)
    found["read_gb_per_s"] = num_bytes / ms["read"] / 1e6
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    device = torch.device("cuda:0" if arguments.device == "cuda" else "cpu")
    document = {
        "schema": "diffusion_runtime.cache_read_gpu/1",
        "machine": describe_machine(device),
        **measure(device, arguments.repeats),
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps({key: value for key, value in document.items() if key != "machine"}, indent=1))


if __name__ == "__main__":
    main()
