"""Whole forward passes with 8-bit linear layers beside bfloat16, at real sizes, on one GPU.

    python -m benchmarks.quantization_gpu --output benchmarks/results/quantization_gpu.json [--only flux1,wan]
    python -m benchmarks.quantization_gpu --device cpu --output /tmp/quantization.json

The same random weights in every mode. First the outputs: their relative L2 distance from bfloat16's, and the report's
count of products, which must all be in 8 bits on a GPU that has them. Then milliseconds of one forward, taken in
turns, and the memory of the weights. Random weights say what a mode costs in time and rounding, not in pictures: for
those, `python -m benchmarks.faster_quality --device cuda --dtype bfloat16 --only fp8 fp8-all`.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.families import wan
from benchmarks.families.step import FamilyStep
from benchmarks.families_gpu import write_folder
from benchmarks.fused_kernels_gpu import STEPS, TINY_STEPS, Clock, device_times, velocity
from benchmarks.machine import describe_machine
from diffusion_runtime.attention import AttentionConfig, AttentionPolicy, RequestCache
from diffusion_runtime.layers.eight_bit_linear import eight_bit_layers
from diffusion_runtime.models.interface import DiffusionTransformer
from diffusion_runtime.models.random_weights import fill_randomly
from diffusion_runtime.models.registry import family_for_folder
from diffusion_runtime.weights.quantization import Quantization

MODES = ("none", "fp8", "fp8-all", "int8")
DTYPE = torch.bfloat16
WAN_14B = dataclasses.replace(
    wan.STEPS[0],
    name="Wan 14B, 480 x 832, 81 frames",
    config={**wan.STEPS[0].config, "num_attention_heads": 40, "num_layers": 40, "ffn_dim": 13824},
)
CASES: Mapping[str, FamilyStep] = {**STEPS, "wan14b": WAN_14B}


def build(step: FamilyStep, device: torch.device, mode: str) -> tuple[DiffusionTransformer, Quantization, str | None]:
    """A family's transformer with random weights, its quantisation, and how much of it that is."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_folder(folder, step)
        model = family_for_folder(folder).describe(folder)
        policy = AttentionPolicy(cli=AttentionConfig.parse(None), device=str(device), dtype=DTYPE)
        empty = model.build_transformer(policy)
        quantization = Quantization.of(model.family.name, mode, ())
        quantization.apply(model.modules(empty))
        described = quantization.describe(model.modules(empty))
        return fill_randomly(model, empty, device, DTYPE), quantization, described


@torch.inference_mode()
def measure(step: FamilyStep, device: torch.device, repeats: int, modes: Sequence[str] = MODES) -> dict[str, Any]:
    clock = Clock(device)
    inputs = step.make_inputs(device, DTYPE)
    models, row = {}, {"step": step.name, "modes": {}}
    # Of a request each: what depends on sizes and prompt alone is computed at its first step.
    states = {mode: RequestCache() for mode in modes}
    expected: torch.Tensor | None = None
    for mode in modes:
        begin = time.perf_counter()
        model, quantization, described = build(step, device, mode)
        clock.synchronize()
        counts: Counter[str] = Counter()
        quantization.counter.start(lambda how, counts=counts: counts.update([how]))
        entry: dict[str, Any] = {"build_s": time.perf_counter() - begin, "layers": described}
        found = velocity(model, inputs, states[mode]).float()
        expected = found if expected is None else expected
        entry["products"] = dict(counts)
        entry["relative_difference"] = float((found - expected).norm() / expected.norm())
        entry["weights_gb"] = sum(each.nbytes for each in model.parameters()) / 1e9
        names = {layer.product_name for layer in eight_bit_layers(model).values()}
        if device.type == "cuda" and set(counts) != names:
            raise ValueError(f"{mode}: other products than 8-bit ones: {dict(counts)}")
        models[mode], row["modes"][mode] = model, entry
    times: dict[str, list[float]] = {mode: [] for mode in models}
    for _ in range(repeats):
        for mode, model in models.items():
            times[mode].append(
                clock.median_ms(lambda _, model=model, mode=mode: velocity(model, inputs, states[mode]), 1, 0)
            )
    for mode, several in times.items():
        row["modes"][mode]["ms"] = statistics.median(several)
        if device.type == "cuda":
            row["modes"][mode]["kernels"] = device_times(
                lambda mode=mode: velocity(models[mode], inputs, states[mode])
            )["ms"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", default="", help=f"of {','.join(CASES)}, with commas between")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    is_cpu = device.type == "cpu"
    names = [name for name in arguments.only.split(",") if name] or list(CASES)
    document: dict[str, Any] = {
        "schema": "diffusion_runtime.quantization_gpu/1",
        "machine": describe_machine(device),
        "rows": [],
    }
    for step in TINY_STEPS if is_cpu else [CASES[name] for name in names]:
        row = measure(step, device, 1 if is_cpu else arguments.repeats)
        document["rows"].append(row)
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")
        for mode, entry in row["modes"].items():
            print(
                f"{row['step']:36} {mode:8} {entry['ms']:8.1f} ms  {entry['weights_gb']:6.2f} GB  difference "
                f"{entry['relative_difference']:.4f}  {entry['products']}  {entry.get('kernels', '')}",
                flush=True,
            )
        gc.collect()
        if not is_cpu:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
