"""Regional compilation on one GPU: forwards of whole transformers with `--compile off` and `regional`, by turns.

    python -m benchmarks.compile_gpu --output compile_gpu.json [--only flux1,wan] [--device cpu]

Models are at real size with random weights (no download). The velocities are compared first. Then: seconds of the first
forward, in which the blocks are compiled, milliseconds of a later one, milliseconds of the host, the peak of device
memory, and the graphs that were made: as many as kinds of blocks, and none for another step and another text.
`--device cpu` runs every path at tiny sizes with a backend that needs no compiler.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from benchmarks.families.step import FamilyStep, StepInputs
from benchmarks.fused_kernels_gpu import MAX_DIFFERENCE, STEPS, TINY_STEPS, Clock, build
from benchmarks.machine import describe_machine
from diffusion_runtime.attention import AttentionContext, RequestCache
from diffusion_runtime.benchmark.replayed_step import steps_around
from diffusion_runtime.layers.compiled_blocks import CompiledBlocks
from diffusion_runtime.layers.modulation_rows import plan_steps
from diffusion_runtime.models.interface import DiffusionTransformer


class Forward:
    """Forwards of one request. compiled: the blocks, None where they are not."""

    def __init__(self, model: DiffusionTransformer, inputs: StepInputs, compiled: CompiledBlocks | None) -> None:
        self.model = model
        self.inputs = inputs
        self.compiled = compiled
        self.state = RequestCache()
        steps = steps_around(inputs.ours[1], 4)
        plan_steps(self.state, steps)
        self.step = steps[2]

    def velocity(self, step: int = 0) -> torch.Tensor:
        now = dataclasses.replace(self.step, index=step)
        context = AttentionContext(step=now, state=self.state, is_compiled=self.compiled is not None)
        out: torch.Tensor = self.model(*self.inputs.ours, context)
        return out


def with_shorter_text(inputs: StepInputs) -> StepInputs:
    """The same with two thirds of the text's tokens."""
    latents, timestep, ours = inputs.ours
    text = ours.text
    num_tokens = max(1, 2 * text.embeddings.shape[1] // 3)
    lengths = tuple(min(length, num_tokens) for length in text.lengths)
    shorter = dataclasses.replace(text, embeddings=text.embeddings[:, :num_tokens].contiguous(), lengths=lengths)
    return dataclasses.replace(inputs, ours=(latents, timestep, dataclasses.replace(ours, text=shorter)))


@torch.inference_mode()
def row_of(step: FamilyStep, device: torch.device, dtype: torch.dtype, backend: str, repeats: int) -> dict[str, Any]:
    clock, inputs = Clock(device), step.make_inputs(device, dtype)
    eager = build(step, device, dtype, None)
    model = build(step, device, dtype, None)
    model.load_state_dict(eager.state_dict(), assign=True)
    blocks = CompiledBlocks(backend)
    blocks.compile(model)
    forwards = {"off": Forward(eager, inputs, None), "regional": Forward(model, inputs, blocks)}
    row: dict[str, Any] = {"step": step.name, "compiler": backend, "first_s": {}, "ms": {}, "host_ms": {}}
    found = {}
    for setting, forward in forwards.items():
        begin = time.perf_counter()
        found[setting] = forward.velocity().float()
        clock.synchronize()
        row["first_s"][setting] = time.perf_counter() - begin
    row["relative_difference"] = float((found["regional"] - found["off"]).norm() / found["off"].norm())
    row["correct"] = row["relative_difference"] < MAX_DIFFERENCE
    row["num_blocks"], row["num_graphs"] = blocks.num_blocks, blocks.num_graphs
    times: dict[str, list[float]] = {setting: [] for setting in forwards}
    hosts: dict[str, list[float]] = {setting: [] for setting in forwards}
    for repeat in range(repeats):
        for setting, forward in forwards.items():
            times[setting].append(clock.median_ms(lambda _, f=forward, r=repeat: f.velocity(r % 4), 1, 0))
            hosts[setting].append(clock.host_ms(lambda f=forward, r=repeat: f.velocity(r % 4)))
    row["ms"] = {setting: statistics.median(several) for setting, several in times.items()}
    row["host_ms"] = {setting: statistics.median(several) for setting, several in hosts.items()}
    if device.type == "cuda":
        row["peak_gb"] = {}
        for setting, forward in forwards.items():
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            forward.velocity()
            row["peak_gb"][setting] = (torch.cuda.max_memory_allocated() - before) / 1e9
    Forward(model, with_shorter_text(inputs), blocks).velocity(1)
    clock.synchronize()
    row["num_recompilations"] = blocks.num_graphs - row["num_graphs"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", default="", help=f"of {','.join(STEPS)}")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--compiler", help="torch.compile's backend; inductor, on the CPU aot_eager")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    on_gpu = device.type == "cuda"
    compiler = arguments.compiler or ("inductor" if on_gpu else "aot_eager")
    names = [name for name in arguments.only.split(",") if name] or ["flux1", "wan", "z_image", "qwen_image"]
    result: dict[str, Any] = {"machine": describe_machine(arguments.device), "rows": [], "failures": {}}
    for step in [STEPS[name] for name in names] if on_gpu else TINY_STEPS:
        try:
            row = row_of(step, device, torch.bfloat16, compiler, arguments.repeats)
            result["rows"].append(row)
            print(json.dumps(row), flush=True)
            if not row["correct"] or row["num_recompilations"]:
                result["failures"][step.name] = "another velocity, or compiled anew"
        except Exception as error:
            traceback.print_exc()
            result["failures"][step.name] = f"{type(error).__name__}: {error}"
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
