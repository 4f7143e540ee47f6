"""One forward of MiniMax-H3 at its published size on one GPU, with random weights, beside diffusers' own.

    python -m benchmarks.minimax_h3_gpu --output $OUT/minimax_h3_gpu.json [--modes eager,fp8] [--small]
    python -m benchmarks.minimax_h3_gpu --output $OUT/minimax_h3_24gb.json --memory-limit 24GB

Correctness first: three blocks of the published widths at a small size, in float32 by eager operations and torch's
attention; bfloat16 with the fused kernels, and 8 bits, may differ from that by what they round, and diffusers' model,
where it can be imported, by less. Then the whole model: 33 B parameters are made on the device, one forward is timed
in every mode, and diffusers' transformer with the same weights after ours is gone. `--small` runs every path at sizes
that a CPU computes.

`--memory-limit` measures the same forward within a card's memory in place of all that (benchmarks/offload_gpu.py): all
weights on the device, then the blocks that the plan streams with torch's memory fraction at the limit, the same bits,
and the ratio of their times. The decoder's 5.5 GB are taken meanwhile, as in a generation.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import importlib.util
import json
import os
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import describe_machine
from benchmarks.offload_gpu import Loaded, build_model, run_limits
from diffusion_runtime.attention import AttentionConfig, AttentionContext, AttentionPolicy
from diffusion_runtime.benchmark.step import StepChoice, StepEffort, benchmark_step
from diffusion_runtime.benchmark.step_model import StepModel, open_step_model
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.core.memory_size import parse_size
from diffusion_runtime.diffusers_bridge.sample_inputs import StepInputs
from diffusion_runtime.kernels.implementation import VARIABLE
from diffusion_runtime.memory.device_memory import use_expandable_segments
from diffusion_runtime.memory.transfers import transfers_of

MODEL = "minimax-h3"
# Of both autoencoders in bfloat16, which stay on the device.
DECODER_BYTES = 2 * (2604 + 151) * 10**6
# Relative L2 from float32 by eager operations, of three blocks.
BOUNDS = {"bfloat16": 0.02, "fp8": 0.08, "int8": 0.08, "diffusers": 0.02}
# Widths of --small.
TINY = {
    "num_attention_heads": 2,
    "attention_head_dim": 32,
    "hidden_size": 64,
    "num_layers": 3,
    "num_refiner_layers": 1,
    "ffn_dim": 96,
    "text_dim": 32,
    "freq_dim": 32,
    "time_embed_hidden_dim": 32,
    "time_embed_dim": 32,
    "rope_freq_dim": 4,
}
# Published: 2045 ms a step on two H100; what this project is to reach on one H200.
BARS_MS = {"ours, eager": 5600.0, "ours, fp8": 4600.0}


def opened(size: ClipSize, num_layers: int | None, *, is_small: bool) -> StepModel:
    model = open_step_model(MODEL, None if is_small else num_layers, changes=TINY if is_small else {})
    return dataclasses.replace(model, size=size)


@contextlib.contextmanager
def eager_operations() -> Iterator[None]:
    """Without the fused kernels."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "reference"
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def released(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def check(device: torch.device, *, is_small: bool) -> dict[str, Any]:
    """Return the relative L2 of every way from float32 by eager operations."""
    model = opened(ClipSize(192, 320, 124, 24), 3, is_small=is_small)
    half = torch.float32 if is_small else torch.bfloat16
    inputs = model.inputs(device, torch.float32)
    latents, timestep, conditions = inputs.ours
    # Numbers that bfloat16 holds, so that both get the same.
    latents = latents.to(half).float()

    def ours(dtype: torch.dtype, quantization: str, backend: str | None) -> torch.Tensor:
        policy = AttentionPolicy(cli=AttentionConfig.parse(backend), device=str(device), dtype=dtype)
        transformer, _ = model.build(policy, device, dtype, quantization)
        given = latents.to(dtype), timestep, _in_dtype(conditions, dtype)
        with torch.inference_mode():
            found: torch.Tensor = transformer(*given, AttentionContext()).double()
        del transformer
        released(device)
        return found

    with eager_operations():
        expected = ours(torch.float32, "none", "torch_sdpa")
    ways: dict[str, Callable[[], torch.Tensor]] = {"bfloat16": lambda: ours(half, "none", None)}
    if device.type == "cuda":
        ways["fp8"] = lambda: ours(half, "fp8-all", None)
        ways["int8"] = lambda: ours(half, "int8", None)
    if importlib.util.find_spec("diffusers") is not None:

        def theirs() -> torch.Tensor:
            transformer = model.build_theirs(device, half)
            given = {
                name: value.to(half) if name.endswith("hidden_states") else value
                for name, value in inputs.theirs.items()
            }
            with torch.inference_mode():
                found = inputs.theirs_to_velocity(transformer(**given)).double()
            del transformer
            released(device)
            return found

        ways["diffusers"] = theirs
    errors: dict[str, Any] = {}
    for name, run in ways.items():
        try:
            errors[name] = float((run() - expected).norm() / expected.norm())
        except Exception as error:
            traceback.print_exc()
            errors[name] = f"{type(error).__name__}: {error}"
        print(f"three blocks, {name}: {errors[name]}", flush=True)
    wrong = [name for name, error in errors.items() if isinstance(error, str) or not error < BOUNDS[name]]
    return {"model": model.describe(), "relative_l2": errors, "bounds": BOUNDS, "wrong": wrong}


def _in_dtype(conditions: Any, dtype: torch.dtype) -> Any:
    return dataclasses.replace(conditions, text=conditions.text.to(conditions.text.embeddings.device, dtype))


def timed(device: torch.device, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the rows of one forward at the published size."""
    size = ClipSize(64, 96, 124, 24) if arguments.small else ClipSize(768, 1344, arguments.num_frames, 24)
    model = opened(size, arguments.layers, is_small=arguments.small)
    modes = ("eager",) if device.type == "cpu" else tuple(arguments.modes.split(","))
    result = benchmark_step(
        model,
        StepChoice(modes, not arguments.no_diffusers, arguments.attention_backend),
        device,
        torch.float32 if device.type == "cpu" else torch.bfloat16,
        StepEffort(arguments.repeats, 512 if arguments.small else 8192),
        on_progress=lambda text: print(f"{time.strftime('%H:%M:%S')} {text}", flush=True),
    )
    rows = [{**asdict(row), "median_ms": row.milliseconds} for row in result.rows]
    for row in rows:
        print(f"{row['name']}: {row['state']} {row['reason']} {row['median_ms']} ms, {row['detail']}", flush=True)
    return {
        "model": result.model,
        "dtype": result.dtype,
        "operations": result.operations,
        "rows": rows,
        "bars_ms": BARS_MS,
    }


@dataclasses.dataclass(frozen=True)
class _Step:
    """The step of a model, as offload_gpu measures it."""

    model: StepModel

    def make_inputs(self, device: torch.device, dtype: torch.dtype) -> StepInputs:
        return self.model.inputs(device, dtype)


def limited(device: torch.device, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the rows of one forward with all weights on the device, and within a limit."""
    size = ClipSize(64, 96, 124, 24) if arguments.small else ClipSize(768, 1344, arguments.num_frames, 24)
    model = opened(size, arguments.layers, is_small=arguments.small)
    decoder = 0 if arguments.small else DECODER_BYTES
    # Tiny models get one that lets a few blocks stay.
    limits = (0,) if arguments.small else (parse_size(arguments.memory_limit, "--memory-limit"),)
    transfers, step = transfers_of(device), _Step(model)

    rows = []
    for quantization in arguments.limited_weights.split(","):

        def built(limit: int | None, quantization: str = quantization) -> Loaded:
            return build_model(model.model, step, quantization, device, limit, transfers, decoder)

        case = {"case": MODEL, "quantization": quantization}
        for row in run_limits(case, built, step, limits, device, arguments.repeats, decoder):
            rows.append(row)
            print(json.dumps(row), flush=True)
        print(f"{quantization}: {rows[-1]['over_resident']:.3f} of the time with all weights on the device", flush=True)
        # After each, so that a run that ends early leaves what it measured.
        arguments.output.with_suffix(".part.json").write_text(json.dumps(rows, indent=2) + "\n")
        released(device)
    return {"model": model.describe(), "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--small", action="store_true", help="sizes that a CPU computes")
    parser.add_argument("--modes", default="eager,fp8", help="of `bench step`")
    parser.add_argument("--layers", type=int, default=None, help="blocks of the timed model, all by default")
    parser.add_argument("--num-frames", type=int, default=124)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-diffusers", action="store_true")
    parser.add_argument("--attention-backend", default=None)
    parser.add_argument("--skip-check", action="store_true")
    parser.add_argument("--memory-limit", default=None, help="measure one forward within it alone, such as 24GB")
    parser.add_argument("--limited-weights", default="none", help="of --memory-limit: none, fp8, or none,fp8")
    arguments = parser.parse_args()
    # With its number: a memory fraction is of one device.
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    result: dict[str, Any] = {"machine": describe_machine(device.type), "failures": {}}
    parts: dict[str, Callable[[], dict[str, Any]]] = {}
    if arguments.memory_limit is not None:
        use_expandable_segments(device)
        parts["limited"] = lambda: limited(device, arguments)
    elif not arguments.skip_check:
        parts["correctness"] = lambda: check(device, is_small=arguments.small)
    if arguments.memory_limit is None:
        parts["forward"] = lambda: timed(device, arguments)
    for name, run in parts.items():
        try:
            result[name] = run()
        except Exception as error:
            traceback.print_exc()
            result["failures"][name] = f"{type(error).__name__}: {error}"
        released(device)
        # After each, so that a run that ends early leaves what it measured.
        arguments.output.write_text(json.dumps(result, indent=2, default=str) + "\n")
    wrong = result.get("correctness", {}).get("wrong", [])
    print(json.dumps({"failures": result["failures"], "wrong": wrong}))
    if result["failures"] or wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
