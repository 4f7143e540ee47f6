"""Weights shared by two GPUs (tensor parallel) against one GPU, and against a shared sequence (Ulysses), in one run.

    NCCL_NVLS_ENABLE=0 torchrun --standalone --nproc-per-node 2 -m benchmarks.tensor_parallel_gpu \
        --output benchmarks/results/tensor_parallel_gpu.json

One forward pass of one branch: an expert of Wan 2.2 A14B (14 B parameters, 40 heads of 128, `--layers` of its 40
blocks) at 480p, 81 frames: 32760 tokens, random weights, bfloat16. Correctness first, with two blocks: the error of
every variant against one GPU in float32, beside the error of one GPU in bfloat16. Then the times, round after round
with all variants in each: the median over rounds of the slowest process. Memory: the weights that a GPU holds, and what
a forward pass takes beside them at most. Where a variant uses one GPU, the other computes the same beside it. Last,
from a profile, how long the kernels that communicate ran, and how much of that no other kernel hid. `--device cpu
--small` is a trial run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.machine import describe_machine
from benchmarks.parallel_gpu import (
    GUIDANCE_SCALE,
    Run,
    measure_communication,
    measure_times,
    meet,
    over_processes,
    synchronise,
)
from diffusion_runtime.attention import AttentionContext, AttentionPolicy, RequestCache, StepInfo
from diffusion_runtime.benchmark.replayed_step import steps_around
from diffusion_runtime.benchmark.step_model import StepModel, open_step_model, with_size
from diffusion_runtime.denoising.guidance import with_guidance
from diffusion_runtime.denoising.interface import Predict
from diffusion_runtime.layers.modulation_rows import plan_steps
from diffusion_runtime.models.interface import DiffusionTransformer
from diffusion_runtime.parallel.branches import BranchExchange
from diffusion_runtime.parallel.groups import ProcessMesh

MODEL, NUM_LAYERS = "wan2.2-t2v-a14b", 40
SIZE = {"height": 480, "width": 832, "num_frames": 81}
SMALL = {"num_attention_heads": 4, "attention_head_dim": 16, "ffn_dim": 128, "text_dim": 32}
SMALL_SIZE = {"height": 64, "width": 96, "num_frames": 5}
# Of two blocks, so that float32 is computed in seconds.
NUM_CHECKED_LAYERS = 2
# How far rounding may take a variant from float32, over what it takes one GPU.
MAX_ERROR_RATIO = 1.2


@dataclasses.dataclass(frozen=True)
class Variant:
    """bar, aim: how much quicker than one GPU it is to be. num_head_groups: see AttentionPolicy."""

    name: str
    tensor: int = 1
    ulysses: int = 1
    num_head_groups: int = 1
    quantization: str = "none"
    bar: float | None = None
    aim: float | None = None


VARIANTS = (
    Variant("one GPU"),
    Variant("tensor parallel 2", tensor=2, bar=1.6, aim=1.8),
    Variant("ulysses 2, 2 head groups", ulysses=2, num_head_groups=2),
    Variant("one GPU, fp8", quantization="fp8"),
    Variant("tensor parallel 2, fp8", tensor=2, quantization="fp8"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--layers", type=int, default=NUM_LAYERS, help="blocks of the model that is timed")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="variants whose name contains this, and one GPU")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="a tiny model and clip, to try the script")
    arguments = parser.parse_args()
    is_cuda, local_rank = arguments.device == "cuda", int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if is_cuda else "gloo")
    if dist.get_world_size() != 2:
        raise SystemExit(f"expected 2 processes, got {dist.get_world_size()}: torchrun --nproc-per-node 2")
    changes: Mapping[str, Any] = SMALL if arguments.small else {}
    size = SMALL_SIZE if arguments.small else SIZE
    meshes = {(2, 1): ProcessMesh.create(tensor_degree=2), (1, 2): ProcessMesh.create(ulysses_degree=2)}
    meshes[1, 1] = ProcessMesh()
    variants = [each for each in VARIANTS if arguments.only in each.name or each == VARIANTS[0]]
    with torch.inference_mode():
        errors = measure_errors(_opened(NUM_CHECKED_LAYERS, changes, size), variants, meshes, device)
        opened = _opened(arguments.layers, changes, size)
        models = {each.name: build_variant(opened, each, meshes, device, torch.bfloat16) for each in variants}
        runs = {
            each.name: run_of(opened, models[each.name], meshes[each.tensor, each.ulysses], device, torch.bfloat16)
            for each in variants
        }
        memory = {name: measure_memory(models[name], run, device) for name, run in runs.items()}
        times = measure_times(runs, device, arguments.rounds)
        communication = {name: measure_communication(run, device) if is_cuda else {} for name, run in runs.items()}
    rows = []
    for each in variants:
        alone = "one GPU, fp8" if each.quantization != "none" and "one GPU, fp8" in times else "one GPU"
        median = statistics.median(times[each.name])
        rows.append(
            {
                **dataclasses.asdict(each),
                "ms": median,
                "rounds_ms": times[each.name],
                "speedup": statistics.median(times[alone]) / median,
                **memory[each.name],
                **communication[each.name],
                **errors[each.name],
            }
        )
    wrong = [row["name"] for row in rows if row["error"] > MAX_ERROR_RATIO * row["error_of_one_gpu"]]
    if dist.get_rank() == 0:
        report(rows, opened, device, arguments.output)
        for name in wrong:
            print(f"WRONG: {name} is further from float32 than one GPU is")
    meet(device)
    dist.destroy_process_group()
    return 1 if wrong else 0


def _opened(num_layers: int, changes: Mapping[str, Any], size: Mapping[str, int]) -> StepModel:
    sizes = {"height": size["height"], "width": size["width"], "num_frames": size["num_frames"]}
    return with_size(open_step_model(MODEL, num_layers, changes), **sizes, batch=1)


def build_variant(
    opened: StepModel,
    variant: Variant,
    meshes: Mapping[tuple[int, int], ProcessMesh],
    device: torch.device,
    dtype: torch.dtype,
) -> DiffusionTransformer:
    mesh = meshes[variant.tensor, variant.ulysses]
    return build(opened, mesh, device, dtype, variant.quantization, variant.num_head_groups)


def build(
    opened: StepModel,
    mesh: ProcessMesh,
    device: torch.device,
    dtype: torch.dtype,
    quantization: str,
    num_head_groups: int,
) -> DiffusionTransformer:
    """This process's part of the transformer, with random weights that are the same on all."""
    policy = AttentionPolicy(
        device=str(device), dtype=dtype, environment=None, mesh=mesh, num_head_groups=num_head_groups
    )
    shared = dataclasses.replace(opened, model=opened.model.shared_by(mesh.tensor))
    return shared.build(policy, device, dtype, quantization)[0]


def run_of(
    opened: StepModel, model: DiffusionTransformer, mesh: ProcessMesh, device: torch.device, dtype: torch.dtype
) -> Run:
    """A forward pass of a later step: what depends on prompt and timesteps alone was computed by the first one."""
    predict, latents, step = _prediction(opened, model, mesh, device, dtype)
    return lambda: predict(latents, step)


def guided_run_of(
    opened: StepModel, model: DiffusionTransformer, mesh: ProcessMesh, device: torch.device, dtype: torch.dtype
) -> Run:
    """A guided step of two passes, or of one where the mesh has branches. The unconditional one sees the latents
    mirrored in place of another text, so that a branch taken for the other is an error."""
    predict, latents, step = _prediction(opened, model, mesh, device, dtype)

    def predict_branch(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
        return predict(latents.flip(-1) if step.branch == "uncond" else latents, step)

    guided = with_guidance(predict_branch, GUIDANCE_SCALE, "two_pass", branches=BranchExchange.of(mesh))
    return lambda: guided(latents, step)


def _prediction(
    opened: StepModel, model: DiffusionTransformer, mesh: ProcessMesh, device: torch.device, dtype: torch.dtype
) -> tuple[Predict, torch.Tensor, StepInfo]:
    latents, timestep, inputs = opened.inputs(device, dtype).ours
    steps = steps_around(timestep, 50)
    context = AttentionContext(sharding=mesh.sharding, step=steps[25], state=RequestCache())
    plan_steps(context.state, steps)

    def predict(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
        return model(latents, timestep, inputs, dataclasses.replace(context, step=step))

    return predict, latents, steps[25]


def measure_errors(
    opened: StepModel,
    variants: list[Variant],
    meshes: Mapping[tuple[int, int], ProcessMesh],
    device: torch.device,
) -> dict[str, dict[str, float]]:
    """Of a forward pass in bfloat16, relative to one GPU in float32, beside that of one GPU with the same weights."""

    def output(variant: Variant, dtype: torch.dtype) -> torch.Tensor:
        model = build_variant(opened, variant, meshes, device, dtype)
        mesh = meshes[variant.tensor, variant.ulysses]
        return run_of(opened, model, mesh, device, dtype)().double()

    exact = output(VARIANTS[0], torch.float32)
    errors = {each.name: _relative(output(each, torch.bfloat16), exact) for each in variants}
    alone = {"none": errors["one GPU"]}
    if "one GPU, fp8" in errors:
        alone["fp8"] = errors["one GPU, fp8"]
    largest = {name: over_processes(error, dist.ReduceOp.MAX, device) for name, error in errors.items()}
    return {
        each.name: {"error": largest[each.name], "error_of_one_gpu": alone.get(each.quantization, alone["none"])}
        for each in variants
    }


def _relative(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((x - y).norm() / y.norm())


def measure_memory(model: DiffusionTransformer, run: Run, device: torch.device) -> dict[str, float]:
    """Gigabytes of the GPU that has most: weights, and what a forward pass takes beside them at most."""
    weights = sum(tensor.nbytes for tensor in model.state_dict().values()) / 1e9
    run()
    taken = 0.0
    if device.type == "cuda":
        synchronise(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        synchronise(device)
        taken = (torch.cuda.max_memory_allocated(device) - before) / 1e9
    most = [over_processes(value, dist.ReduceOp.MAX, device) for value in (weights, taken)]
    return {"weights_gb": most[0], "activations_gb": most[1], "peak_gb": sum(most)}


def report(rows: list[dict[str, Any]], opened: StepModel, device: torch.device, output: Path | None) -> None:
    """One table on stdout, and the JSON."""
    print(opened.describe())
    heads = ("ms", "speedup", "bar", "weights", "peak GB", "nccl ms", "exposed", "error")
    print(f"{'variant':28}" + "".join(f"{head:>10}" for head in heads))
    for row in rows:
        bar = "" if row["bar"] is None else f"{row['bar']:.2f}"
        print(
            f"{row['name']:28}{row['ms']:10.1f}{row['speedup']:10.2f}{bar:>10}{row['weights_gb']:10.2f}"
            f"{row['peak_gb']:10.2f}{row.get('nccl_ms', 0.0):10.1f}{row.get('exposed_ms', 0.0):10.1f}"
            f"{row['error']:10.1e}"
        )
    if output is None:
        return
    document = {
        "schema": "diffusion_runtime.tensor_parallel_gpu/1",
        "machine": {**describe_machine(device), "num_devices": 2},
        "model": opened.describe(),
        "num_tokens": opened.num_tokens,
        "num_layers": opened.num_blocks,
        "config": dict(opened.config),
        "rows": rows,
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
