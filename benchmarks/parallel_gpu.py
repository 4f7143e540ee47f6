"""One video over several GPUs: a forward pass and a guided step of Wan 1.3B at 480p, against one GPU, in one run.

    torchrun --standalone --nproc-per-node 4 -m benchmarks.parallel_gpu --output benchmarks/results/parallel_gpu.json

Random weights, bfloat16, 81 frames: 32760 tokens, 30 layers, 12 heads of 128. Correctness first: the error of every
variant against one GPU in float32, beside the error of one GPU in bfloat16. Then the times, round after round with all
variants in each, so that a machine that slows down slows all of them: the median over rounds of the slowest process.
Where a variant uses fewer GPUs than there are, the others compute the same beside it. Last, from a profile, how long
the kernels that communicate ran, and how much of that no other kernel hid. `--device cpu --small` is a trial run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.communication_volume import ForwardShape, communication_volume
from benchmarks.machine import describe_machine
from diffusion_runtime.attention import AttentionConfig, AttentionContext, AttentionPolicy, StepInfo
from diffusion_runtime.core.latent_geometry import ClipSize, LatentGeometry
from diffusion_runtime.denoising.guidance import with_guidance
from diffusion_runtime.models.interface import DenoiserInputs
from diffusion_runtime.models.wan.config import WanTransformerConfig
from diffusion_runtime.models.wan.family import FAMILY
from diffusion_runtime.models.wan.transformer import WanTransformer
from diffusion_runtime.parallel.branches import BranchExchange
from diffusion_runtime.parallel.collectives import RankGroup
from diffusion_runtime.parallel.groups import ProcessMesh
from diffusion_runtime.text_encoders.interface import Conditions

PATCH = (1, 2, 2)
WAN = WanTransformerConfig(
    num_layers=30,
    num_heads=12,
    head_dim=128,
    ffn_dim=8960,
    num_channels=16,
    text_dim=4096,
    num_waves=256,
    patch=PATCH,
    norm_cross=True,
    eps=1e-6,
    has_gate=True,
)
SMALL = dataclasses.replace(WAN, num_layers=2, num_heads=4, head_dim=16, ffn_dim=128, text_dim=64)
VSA = {"backend": "video_sparse_attn", "extra": {"sparsity": 0.9}}
GUIDANCE_SCALE = 5.0


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to compute. target: how much quicker than one GPU it is to be.

    kind: `forward` (one pass), `sparse` (one pass with VSA) or `guided` (a step of both branches).
    """

    name: str
    kind: str = "forward"
    ulysses: int = 1
    ring: int = 1
    ring_inside: bool = False
    splits_branches: bool = False
    num_head_groups: int = 1
    guidance_mode: str = "batched"
    target: float | None = None

    @property
    def num_processes(self) -> int:
        return self.ulysses * self.ring * (2 if self.splits_branches else 1)


VARIANTS = (
    Variant("one GPU"),
    Variant("ulysses 2", ulysses=2, target=1.85),
    Variant("ulysses 2, 2 head groups", ulysses=2, num_head_groups=2),
    Variant("ulysses 2, 3 head groups", ulysses=2, num_head_groups=3),
    Variant("ring 2", ring=2, target=1.7),
    Variant("ulysses 4", ulysses=4, target=3.4),
    Variant("ulysses 4, 3 head groups", ulysses=4, num_head_groups=3),
    Variant("ring 4", ring=4),
    Variant("usp 2x2", ulysses=2, ring=2),
    Variant("usp 2x2, rings inside", ulysses=2, ring=2, ring_inside=True),
    Variant("one GPU, VSA 0.9", "sparse"),
    Variant("ulysses 2, VSA 0.9", "sparse", ulysses=2),
    Variant("ulysses 4, VSA 0.9", "sparse", ulysses=4, target=2.8),
    Variant("one GPU, guided, one batch", "guided"),
    Variant("one GPU, guided, two passes", "guided", guidance_mode="two_pass"),
    Variant("branches 2, guided", "guided", splits_branches=True),
    Variant("ulysses 2 x branches 2, guided", "guided", ulysses=2, splits_branches=True, target=3.6),
    Variant("ulysses 4, guided", "guided", ulysses=4),
)


@dataclasses.dataclass(frozen=True)
class Problem:
    """What every variant computes, the same on every process."""

    config: WanTransformerConfig
    weights: dict[str, torch.Tensor]
    latents: torch.Tensor
    timestep: torch.Tensor
    text: torch.Tensor
    backend: str | None

    @property
    def device(self) -> torch.device:
        return self.latents.device

    @property
    def num_tokens(self) -> int:
        frames, height, width = self.latents.shape[2:]
        return frames * height * width // (PATCH[0] * PATCH[1] * PATCH[2])


def make_problem(
    config: WanTransformerConfig, grid: tuple[int, int, int], device: torch.device, backend: str | None
) -> Problem:
    """Weights as of a model at the start of training, but with gates and modulations that do something."""
    torch.manual_seed(0)
    with torch.device(device):
        model = WanTransformer(
            config, LatentGeometry(config.num_channels, 8, 4, PATCH), AttentionPolicy(device=str(device))
        )
    weights = {}
    for name, parameter in model.named_parameters():
        drawn = torch.randn(parameter.shape, device=device)
        fan_in = parameter.shape[-1] if parameter.dim() > 1 and "modulation" not in name else 0
        if fan_in:
            weights[name] = drawn * fan_in**-0.5
        else:
            weights[name] = 0.1 * drawn + (1.0 if "norm" in name and name.endswith("weight") else 0.0)
    for tensor in weights.values():
        dist.broadcast(tensor, 0)
    frames, height, width = (extent * side for extent, side in zip(grid, PATCH, strict=True))
    latents = torch.randn(1, config.num_channels, frames, height, width, device=device)
    text = torch.randn(1, 512, config.text_dim, device=device)
    dist.broadcast(latents, 0)
    dist.broadcast(text, 0)
    return Problem(config, weights, latents, torch.tensor([700.0], device=device), text, backend)


def build(problem: Problem, variant: Variant, mesh: ProcessMesh, dtype: torch.dtype) -> WanTransformer:
    """The variant's transformer; weights of one dtype are shared by all of them."""
    config: Any = VSA if variant.kind == "sparse" else problem.backend
    policy = AttentionPolicy(
        config=AttentionConfig.parse({"per_role": {"self": config}} if config else None),
        device=str(problem.device),
        dtype=dtype,
        environment=None,
        mesh=mesh,
        num_head_groups=variant.num_head_groups,
    )
    geometry = LatentGeometry(problem.config.num_channels, 8, 4, PATCH)
    with torch.device("meta"):
        model = WanTransformer(problem.config, geometry, policy)
    model.load_state_dict(problem.weights, assign=True)
    return model.requires_grad_(False).eval()


def in_dtype(weights: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """As a checkpoint is loaded."""
    return {name: x if FAMILY.weights.stays_float32(name) else x.to(dtype) for name, x in weights.items()}


Run = Callable[[], torch.Tensor]
Meshes = dict[tuple[int, int, bool, bool], ProcessMesh]


def make_meshes(variants: Iterable[Variant]) -> Meshes:
    """A mesh for every variant, in an order that is the same on all processes. What a variant does not use of them is
    a branch axis, along which it does not exchange."""
    meshes: Meshes = {}
    for variant in variants:
        key = (variant.ulysses, variant.ring, variant.ring_inside, variant.splits_branches)
        if variant.num_processes == 1 or key in meshes:
            continue
        sharers = variant.ulysses * variant.ring
        rest = dist.get_world_size() // sharers
        if variant.splits_branches and rest > 2:
            # Two branches and further copies: a pair is as far apart as a mesh of this size has it.
            degrees = {"ulysses_degree": variant.ulysses, "ring_degree": rest // 2, "branch_degree": 2}
            wide = ProcessMesh.create(**degrees)
            narrow = RankGroup((dist.get_rank(),)) if variant.ulysses == 1 else wide.ulysses
            meshes[key] = ProcessMesh(ulysses=narrow, sequence=narrow, branch=wide.branch)
            continue
        meshes[key] = ProcessMesh.create(
            ulysses_degree=variant.ulysses,
            ring_degree=variant.ring,
            branch_degree=rest,
            ring_inside=variant.ring_inside,
        )
    return meshes


def mesh_of(variant: Variant, meshes: Meshes) -> ProcessMesh:
    if variant.num_processes == 1:
        return ProcessMesh()
    return meshes[variant.ulysses, variant.ring, variant.ring_inside, variant.splits_branches]


def prepare(problem: Problem, variant: Variant, meshes: Meshes, dtype: torch.dtype) -> Run:
    """What is timed: velocity of one forward pass, or guided velocity of one step, whole on every process."""
    mesh = mesh_of(variant, meshes)
    model = build(problem, variant, mesh, dtype)
    size = ClipSize(480, 832, 81, 16)
    cond, uncond = problem.text, problem.text.flip(1)
    texts = {"cond": cond, "uncond": uncond, "both": torch.cat([cond, uncond])}
    inputs = {branch: DenoiserInputs(Conditions.of(text.to(dtype)), size) for branch, text in texts.items()}
    context = AttentionContext(sharding=mesh.sharding)

    def predict(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
        timestep = problem.timestep.expand(latents.shape[0])
        return model(latents, timestep, inputs[step.branch], dataclasses.replace(context, step=step))

    if variant.kind != "guided":
        return lambda: predict(problem.latents, StepInfo(20, 50))
    branches = BranchExchange.of(mesh) if variant.splits_branches else None
    guided = with_guidance(predict, GUIDANCE_SCALE, variant.guidance_mode, branches=branches)
    return lambda: guided(problem.latents, StepInfo(20, 50))


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def meet(device: torch.device) -> None:
    """Wait until every process is here and its device idle."""
    over_processes(0.0, dist.ReduceOp.SUM, device)
    synchronise(device)


def milliseconds(run: Run, device: torch.device) -> float:
    """One call, from when all processes are ready."""
    meet(device)
    start = time.perf_counter()
    run()
    synchronise(device)
    return 1e3 * (time.perf_counter() - start)


def over_processes(value: float, operation: dist.ReduceOp.RedOpType, device: torch.device) -> float:
    tensor = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(tensor, operation)
    return float(tensor)


def measure_errors(problem: Problem, runs: dict[str, Run], variants: dict[str, Variant]) -> dict[str, dict[str, float]]:
    """Relative to one GPU in float32, for sparse variants to one GPU in bfloat16; and to one GPU of the same kind."""
    exact: dict[str, torch.Tensor] = {}
    one_gpu: dict[str, torch.Tensor] = {}
    float_problem = dataclasses.replace(problem, weights=in_dtype(problem.weights, torch.float32))
    errors = {}
    for name, run in runs.items():
        variant = variants[name]
        if variant.kind not in exact and variant.kind != "sparse":
            reference = Variant("float32", variant.kind, guidance_mode="two_pass")
            plain = dataclasses.replace(float_problem, backend="torch_sdpa")
            exact[variant.kind] = prepare(plain, reference, {}, torch.float32)().double()
        out = run().double()
        one_gpu.setdefault(variant.kind, out)
        errors[name] = {"against_one_gpu": _relative(out, one_gpu[variant.kind])}
        if variant.kind in exact:
            errors[name]["against_float32"] = _relative(out, exact[variant.kind])
    return errors


def _relative(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((x - y).norm() / y.norm())


def measure_times(runs: dict[str, Run], device: torch.device, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of the slowest process, round by round."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round_index in range(rounds + 1):
        for name, run in runs.items():
            slowest = over_processes(milliseconds(run, device), dist.ReduceOp.MAX, device)
            if round_index:
                times[name].append(slowest)
    return times


def measure_communication(run: Run, device: torch.device) -> dict[str, float]:
    """Of this process, in ms: kernels of NCCL, and that part of them during which no other kernel ran."""
    meet(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        synchronise(device)
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and event.time_range.elapsed_us() > 0:
            spans["nccl" in event.name.lower()].append((event.time_range.start, event.time_range.end))
    busy = _union(spans[False])
    total = sum(stop - start for start, stop in _union(spans[True]))
    both = sum(stop - start for start, stop in _union([*spans[True], *spans[False]]))
    return {"nccl_ms": total / 1e3, "exposed_ms": (both - sum(stop - start for start, stop in busy)) / 1e3}


def _union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


def sent_bytes(problem: Problem, variant: Variant) -> int:
    """By formula, from the busiest process."""
    batch = 2 if variant.kind == "guided" and not variant.splits_branches and variant.guidance_mode == "batched" else 1
    shape = ForwardShape(
        num_grid_tokens=problem.num_tokens,
        num_layers=problem.config.num_layers,
        num_heads=problem.config.num_heads,
        head_dim=problem.config.head_dim,
        batch=batch,
        has_gate=variant.kind == "sparse",
        out_channels=problem.config.patch_channels,
    )
    branches = 2 if variant.splits_branches else 1
    return communication_volume(
        shape,
        ulysses=variant.ulysses,
        ring=variant.ring,
        branches=branches,
        num_head_groups=variant.num_head_groups,
    ).total


def backend_of(problem: Problem, variant: Variant, meshes: Meshes) -> str:
    """Of self-attention."""
    model = build(problem, variant, mesh_of(variant, meshes), torch.bfloat16)
    return next(iter(model.attention_layers())).decisions.possible[0][1].backend


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--only", default="", help="variants whose name contains this, and those on one GPU")
    parser.add_argument("--backend", help="of self-attention; without it the platform's default")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="a tiny model and grid, to try the script")
    arguments = parser.parse_args()
    is_cuda = arguments.device == "cuda"
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
        dist.init_process_group("nccl")
    else:
        dist.init_process_group("gloo")
    world = dist.get_world_size()
    variants = {
        variant.name: variant
        for variant in VARIANTS
        if world % variant.num_processes == 0 and (variant.num_processes == 1 or arguments.only in variant.name)
    }
    meshes = make_meshes(variants.values())
    config, grid = (SMALL, (3, 6, 10)) if arguments.small else (WAN, (21, 30, 52))
    problem = make_problem(config, grid, device, arguments.backend)
    half = dataclasses.replace(problem, weights=in_dtype(problem.weights, torch.bfloat16))
    runs = {name: prepare(half, variant, meshes, torch.bfloat16) for name, variant in variants.items()}
    errors = measure_errors(problem, runs, variants)
    times = measure_times(runs, device, arguments.rounds)
    rows = []
    fastest: dict[str, float] = {}
    for name, variant in variants.items():
        if variant.num_processes == 1:
            median = statistics.median(times[name])
            fastest[variant.kind] = min(median, fastest.get(variant.kind, median))
    for name, variant in variants.items():
        median = statistics.median(times[name])
        row: dict[str, Any] = {
            "name": name,
            **{key: getattr(variant, key) for key in ("kind", "ulysses", "ring", "splits_branches", "num_head_groups")},
            "backend": backend_of(half, variant, meshes),
            "ms": median,
            "rounds_ms": times[name],
            "speedup": fastest[variant.kind] / median,
            "target": variant.target,
            "sent_bytes": sent_bytes(problem, variant),
            **errors[name],
        }
        if is_cuda:
            row |= measure_communication(runs[name], device)
        rows.append(row)
    if dist.get_rank() == 0:
        report(rows, problem, world, arguments)
    meet(device)
    dist.destroy_process_group()
    return 0


def report(rows: list[dict[str, Any]], problem: Problem, world: int, arguments: argparse.Namespace) -> None:
    """One table on stdout, and the JSON."""
    heads = ("ms", "speedup", "target", "nccl ms", "exposed", "GB sent", "error")
    print(f"{'variant':32}" + "".join(f"{head:>9}" for head in heads))
    for row in rows:
        error = row.get("against_float32", row["against_one_gpu"])
        target = "" if row["target"] is None else f"{row['target']:.2f}"
        print(
            f"{row['name']:32}{row['ms']:9.1f}{row['speedup']:9.2f}{target:>9}{row.get('nccl_ms', 0.0):9.1f}"
            f"{row.get('exposed_ms', 0.0):9.1f}{row['sent_bytes'] / 1e9:9.2f}{error:9.1e}"
        )
    if arguments.output is None:
        return
    document = {
        "schema": "diffusion_runtime.parallel_gpu/1",
        "machine": {**describe_machine(problem.device), "num_devices": world},
        "num_tokens": problem.num_tokens,
        "config": dataclasses.asdict(problem.config),
        "rows": rows,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
