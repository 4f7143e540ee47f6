"""8-bit integer layers (int8 ConvRot) on one GPU: correctness, products beside fp8's and bfloat16's, whole steps.

    OUT=results python -m benchmarks.int8_gpu [--only wan,flux1] [--tiles] [--repeats 20]
    OUT=/tmp python -m benchmarks.int8_gpu --device cpu

First correctness at the sizes of Wan 2.1 1.3B and FLUX.1: the kernels against their specification, whose own error
against float64 is the bound; nothing is timed where that fails. Then milliseconds of a linear layer: quantising its
input, the product, and both, in int8 and fp8, bfloat16's product, and comfy-kitchen's layer where it is installed; with
--tiles the int8 product in other tiles too.
Then whole forwards with random weights in every mode, by turns. The tables come last, and OUT/int8_gpu.json is written
after every part. Needs no network. `--device cpu` runs the same lines at tiny sizes, of the eager specification.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.fused_kernels_gpu import STEPS, TINY_STEPS, Clock
from benchmarks.machine import describe_machine
from benchmarks.quantization_gpu import measure
from diffusion_runtime.kernels.fp8_rows import api as fp8
from diffusion_runtime.kernels.fp8_rows.reference import QuantizedRows
from diffusion_runtime.kernels.int8_rows import api as int8
from diffusion_runtime.kernels.int8_rows import reference, triton

DTYPE = torch.bfloat16
MODES = ("none", "fp8", "fp8-all", "int8")
# Relative error of a rotated int8 product of normal numbers, with room; fp8's is three times as large.
MAX_ERROR = 0.02
# Rows, columns and numbers per step of the product's tiles that --tiles times.
TILES = ((128, 256, 128), (128, 128, 128), (128, 256, 64), (64, 256, 128), (128, 128, 64))


@dataclass(frozen=True)
class Layer:
    """A linear layer on the tokens of one step. activation: of its input, which is quantised in the same pass."""

    name: str
    num_tokens: int
    inner: int
    outer: int
    gelu: bool = False


LAYERS = {
    "wan": (
        Layer("Wan 1.3B qkv", 32760, 1536, 4608),
        Layer("Wan 1.3B up", 32760, 1536, 8960),
        Layer("Wan 1.3B down", 32760, 8960, 1536, gelu=True),
    ),
    "flux1": (
        Layer("FLUX.1 qkv", 4608, 3072, 9216),
        Layer("FLUX.1 qkv and up", 4608, 3072, 21504),
        Layer("FLUX.1 down", 4608, 12288, 3072, gelu=True),
        Layer("FLUX.1 out", 4608, 15360, 3072),
    ),
}
TINY_LAYERS = (Layer("tiny", 40, 64, 96), Layer("tiny, gelu", 24, 256, 64, gelu=True))


def tensors_of(layer: Layer, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Input with one channel forty times the others', weight and bias."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    x, weight = random(layer.num_tokens, layer.inner), random(layer.outer, layer.inner) * layer.inner**-0.5
    x[:, 7] *= 40
    return x.to(DTYPE), weight.to(DTYPE), random(layer.outer).to(DTYPE)


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def check(layer: Layer, device: torch.device) -> dict[str, float]:
    """Errors of a layer. Raises ValueError where the kernels are farther off than their specification allows."""
    x, weight, bias = tensors_of(layer, device)
    rows = x[:1024]
    group, gelu_from = reference.group_size_of(layer.inner), 0 if layer.gelu else None
    own, wanted = (
        quantize(rows, group, gelu_from=gelu_from) for quantize in (int8.quantize_rows, reference.quantize_rows)
    )
    of_weight = int8.quantize_rows(weight, group)
    steps = (own.values.int() - wanted.values.int()).abs()
    found = int8.multiply_rows(own, of_weight, bias, DTYPE)
    expected = reference.multiply_rows(own, of_weight, bias, torch.float32)
    hidden = F.gelu(rows.double(), approximate="tanh") if layer.gelu else rows.double()
    exact = hidden @ weight.double().T + bias.double()
    specified = reference.multiply_rows(wanted, reference.quantize_rows(weight, group), bias, DTYPE)
    result = {
        "values_that_differ": float((steps > 0).float().mean()),
        "largest_step": float(steps.max()),
        "scales": relative(own.scales, wanted.scales.double()),
        "product": relative(found, expected.double()),
        "to_float64": relative(found, exact),
        "specification_to_float64": relative(specified, exact),
    }
    if (
        result["largest_step"] > 1
        or result["values_that_differ"] > 5e-3
        or result["scales"] > 1e-5
        or result["product"] > 4e-3
        or result["to_float64"] > max(MAX_ERROR, 1.02 * result["specification_to_float64"])
    ):
        raise ValueError(f"{layer.name}: the int8 kernels are wrong: {result}")
    return result


def time_layer(layer: Layer, device: torch.device, repeats: int, *, tiles: bool) -> dict[str, float | None]:
    """Median milliseconds. None for what the device does not have."""
    clock = Clock(device)
    x, weight, bias = tensors_of(layer, device)
    group, gelu_from = reference.group_size_of(layer.inner), 0 if layer.gelu else None
    of_weight, rows = int8.quantize_rows(weight, group), int8.quantize_rows(x, group, gelu_from=gelu_from)

    def linear() -> torch.Tensor:
        hidden = F.gelu(x, approximate="tanh") if layer.gelu else x
        return F.linear(hidden, weight, bias)

    runs: dict[str, Callable[[], object]] = {
        "bf16": linear,
        "int8: quantise": lambda: int8.quantize_rows(x, group, gelu_from=gelu_from),
        "int8: product": lambda: int8.multiply_rows(rows, of_weight, bias, DTYPE),
        "int8": lambda: int8.multiply_rows(int8.quantize_rows(x, group, gelu_from=gelu_from), of_weight, bias, DTYPE),
    }
    if fp8.product_refusal(device, DTYPE, layer.inner, layer.outer) is None:
        fp8_weight, fp8_rows = fp8.quantize_rows(weight), fp8.quantize_rows(x, gelu_from=gelu_from)
        runs |= {
            "fp8: quantise": lambda: fp8.quantize_rows(x, gelu_from=gelu_from),
            "fp8: product": lambda: fp8.multiply_rows(fp8_rows, fp8_weight, bias),
            "fp8": lambda: fp8.multiply_rows(fp8.quantize_rows(x, gelu_from=gelu_from), fp8_weight, bias),
        }
    if device.type == "cuda":
        if importlib.util.find_spec("comfy_kitchen") is not None:
            runs["comfy-kitchen: int8"] = of_comfy_kitchen(x, of_weight, bias, group, gelu=layer.gelu)
        runs["torch._int_mm, without scales"] = lambda: torch._int_mm(rows.values, of_weight.values.t())
    times: dict[str, float | None] = {}
    for name, run in runs.items():
        try:
            times[name] = clock.median_ms(lambda _, run=run: run(), repeats, 5)
        except RuntimeError as error:
            print(f"{layer.name}: {name}: {str(error).splitlines()[0]}", flush=True)
            times[name] = None
    if tiles and device.type == "cuda":
        times |= time_tiles(clock, lambda: int8.multiply_rows(rows, of_weight, bias, DTYPE), repeats)
    return times


def of_comfy_kitchen(
    x: torch.Tensor, weight: QuantizedRows, bias: torch.Tensor, group: int, *, gelu: bool
) -> Callable[[], torch.Tensor]:
    """Return the same layer by comfy-kitchen. Raises ValueError where its result is another."""
    import comfy_kitchen

    def run() -> torch.Tensor:
        activation = "gelu_tanh" if gelu else None
        made: torch.Tensor = comfy_kitchen.int8_linear(
            x, weight.values, weight.scales.flatten(), bias, DTYPE, True, group, activation
        )
        return made

    own = int8.multiply_rows(int8.quantize_rows(x, group, gelu_from=0 if gelu else None), weight, bias, DTYPE)
    error = relative(run(), own.double())
    if not error <= MAX_ERROR:
        raise ValueError(f"comfy-kitchen's layer is {error:.3f} from ours")
    return run


def time_tiles(clock: Clock, product: Callable[[], object], repeats: int) -> dict[str, float | None]:
    """Milliseconds of the int8 product by tile; None for one that does not compile."""
    kept, times = dict(triton._TILES), {}
    for tile in TILES:
        triton._TILES.update(dict.fromkeys(kept, tile))
        triton._products = triton.LaunchCache()
        try:
            times[f"int8: product in {tile}"] = clock.median_ms(lambda _: product(), repeats, 5)
        except Exception as error:  # any exception of a compiler
            print(f"tile {tile}: {type(error).__name__}: {str(error).splitlines()[:1]}", flush=True)
            times[f"int8: product in {tile}"] = None
    triton._TILES.update(kept)
    triton._products = triton.LaunchCache()
    return times


def table(document: dict[str, Any]) -> None:
    for row in document["layers"]:
        base = row["ms"]["bf16"]
        print(f"\n{row['layer']}  error to float64 {row['errors']['to_float64']:.4f}")
        for name, ms in row["ms"].items():
            print(f"  {name:34} {'-' if ms is None else f'{ms:9.3f} ms  {base / ms:5.2f}x of bf16'}")
    for row in document["steps"]:
        base = row["modes"]["none"]["ms"]
        print(f"\n{row['step']}")
        for mode, entry in row["modes"].items():
            print(
                f"  {mode:8} {entry['ms']:9.1f} ms  {base / entry['ms']:5.2f}x of none  {entry['weights_gb']:6.2f} GB  "
                f"velocity {entry['relative_difference']:.4f} from none  {entry['products']}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(os.environ.get("OUT", ".")) / "int8_gpu.json")
    parser.add_argument("--only", default="wan,flux1", help=f"of {','.join(LAYERS)}, with commas between")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--tiles", action="store_true", help="time the int8 product in other tiles too")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    is_cpu = device.type == "cpu"
    names = [name for name in arguments.only.split(",") if name]
    layers = TINY_LAYERS if is_cpu else [layer for name in names for layer in LAYERS[name]]
    document: dict[str, Any] = {
        "schema": "diffusion_runtime.int8_gpu/1",
        "machine": describe_machine(device),
        "layers": [{"layer": layer.name, "errors": check(layer, device)} for layer in layers],
        "steps": [],
    }
    print("the kernels are within their specification's error", flush=True)

    def keep() -> None:
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")

    keep()
    for layer, row in zip(layers, document["layers"], strict=True):
        row["ms"] = time_layer(layer, device, 2 if is_cpu else arguments.repeats, tiles=arguments.tiles)
        keep()
    for step in TINY_STEPS[:1] if is_cpu else [STEPS[name] for name in names]:
        document["steps"].append(measure(step, device, 1 if is_cpu else 5, MODES))
        keep()
        gc.collect()
        if not is_cpu:
            torch.cuda.empty_cache()
    table(document)


if __name__ == "__main__":
    main()
