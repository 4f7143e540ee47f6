"""Streamed transformer blocks on one GPU: the same numbers as all-resident, in how much memory, and at which speed.

    python -m benchmarks.offload_gpu --output benchmarks/results/offload_gpu.json [--only wan14b,flux1,flux1-fp8]
    python -m benchmarks.offload_gpu --output /tmp/offload.json --only wan-a14b   # or flux2: whole generations
    python -m benchmarks.offload_gpu --device cpu --output /tmp/offload.json
    python -m benchmarks.offload_gpu --dry-run                                    # the plans, on any machine

Random weights of the published shapes, made on the device and held where offloading holds them. First the step with all
weights on the device: its velocity, milliseconds, peak. Then, for every limit, what the plan streams, with torch's
memory fraction set to the limit so that taking more is an error: the velocity must be the same bit for bit; then
milliseconds, the peak beside the planned one, and how many copies came late. `--device cpu` runs every path at tiny
sizes. A step is one forward pass of one guidance branch, in the middle of a generation of 50; the first one, which also
projects the text and computes the rows of modulation of all steps, is not timed.
Whole generations (benchmarks/offloaded_generation.py) have their encoder and decoder, and their experts in turn. Each
row is written when it is measured; with --append those that --output has already stay.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks.families.step import FamilyStep, StepInputs
from benchmarks.families_gpu import write_folder
from benchmarks.fused_kernels_gpu import TINY_STEPS
from benchmarks.machine import describe_machine
from benchmarks.offloaded_generation import (
    GENERATIONS,
    TINY_GENERATIONS,
    Generation,
    open_generation,
    plans_for,
    run_generation,
)
from benchmarks.quantization_gpu import CASES as STEPS
from diffusion_runtime.attention import AttentionConfig, AttentionContext, AttentionPolicy, RequestCache
from diffusion_runtime.benchmark.replayed_step import steps_around
from diffusion_runtime.layers.modulation_rows import plan_steps
from diffusion_runtime.loading.native_model import fill_transformer
from diffusion_runtime.memory.device_memory import use_expandable_segments
from diffusion_runtime.memory.offloading import Offloading
from diffusion_runtime.memory.plan import MemoryDemand, MemoryPlan, PartSize, make_plan, plans_of
from diffusion_runtime.memory.transfers import Transfers, transfers_of
from diffusion_runtime.models.family import Model
from diffusion_runtime.models.interface import DiffusionTransformer
from diffusion_runtime.models.memory_demand import PlannedRequest, part_size, step_demand
from diffusion_runtime.models.random_weights import fill_randomly
from diffusion_runtime.models.registry import family_for_folder
from diffusion_runtime.weights.quantization import Quantization

DTYPE = torch.bfloat16
GB = 10**9
# Of the generation that a step is one of: whose rows of modulation are computed before the first.
NUM_STEPS = 50
# Copied to measure the speed of copies.
COPY_BYTES = 512 * 2**20


@dataclass(frozen=True)
class Case:
    """limits: bytes of the device, none for tiny models, whose limit lets a few blocks stay."""

    step: FamilyStep
    quantization: str = "none"
    limits: tuple[int, ...] = ()
    repeats: int = 5


CASES: Mapping[str, Case] = {
    "wan14b": Case(STEPS["wan14b"], limits=(int(11.5 * GB), 8 * GB), repeats=2),
    "flux1": Case(STEPS["flux1"], limits=(12 * GB,)),
    "flux1-fp8": Case(STEPS["flux1"], quantization="fp8", limits=(12 * GB,)),
}
# With blocks enough that some are streamed.
_TINY = [
    dataclasses.replace(TINY_STEPS[0], config={**TINY_STEPS[0].config, "num_layers": 6}),
    dataclasses.replace(TINY_STEPS[1], config={**TINY_STEPS[1].config, "num_layers": 2, "num_single_layers": 6}),
]
TINY_CASES = {
    **{f"tiny-{index}": Case(step, repeats=1) for index, step in enumerate(_TINY)},
    "tiny-fp8": Case(_TINY[0], quantization="fp8-all", repeats=1),
}


@dataclass(frozen=True)
class Loaded:
    """A transformer with random weights, and what it takes. seconds: of filling its weights."""

    transformer: DiffusionTransformer
    offloading: Offloading | None
    plan: MemoryPlan
    seconds: float


def planned_request(inputs: StepInputs) -> PlannedRequest:
    given = inputs.ours[2]
    request = dataclasses.replace(given.request, num_inference_steps=NUM_STEPS)
    return PlannedRequest(given.size, 1, False, False, request, given.guidance)


def build(case: Case, device: torch.device, limit: int | None, transfers: Transfers) -> Loaded:
    """limit: None for all weights on the device; 0 for one that lets a few blocks stay."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_folder(folder, case.step)
        model = family_for_folder(folder).describe(folder)
        return build_model(model, case.step, case.quantization, device, limit, transfers)


class MakesInputs(Protocol):
    """The step that a model runs."""

    def make_inputs(self, device: torch.device, dtype: torch.dtype) -> StepInputs: ...


def build_model(
    model: Model[Any, Any],
    step: MakesInputs,
    quantized: str,
    device: torch.device,
    limit: int | None,
    transfers: Transfers,
    decoder: int = 0,
) -> Loaded:
    """`build` of a model that is open. decoder: bytes that stay on the device in addition."""
    policy = AttentionPolicy(cli=AttentionConfig.parse(None), device=str(device), dtype=DTYPE)
    empty = model.build_transformer(policy)
    quantization = Quantization.of(model.family.name, quantized, ())
    if quantization is not None:
        quantization.apply(model.modules(empty))
    demand = demand_of(model, empty, step, device, decoder)
    if limit == 0:
        (part,) = demand.transformers
        limit = plans_of(demand, 1, ["layers"])[0].peak + max(part.blocks)
    plan = make_plan(demand, ["none" if limit is None else "layers"], limit)
    offloading = None if limit is None else Offloading(plan, transfers)
    begin = time.perf_counter()
    fill_transformer(
        model,
        empty,
        offloading,
        lambda room_for: fill_randomly(model, empty, device, DTYPE, room_for=room_for),
        takes_pages=True,
    )
    return Loaded(empty, offloading, plan, time.perf_counter() - begin)


def demand_of(
    model: Model[Any, Any], transformer: DiffusionTransformer, step: MakesInputs, device: torch.device, decoder: int = 0
) -> MemoryDemand:
    """The transformer's alone: without encoders, and with so many bytes of a decoder."""
    model.weights.set_loaded_dtypes(transformer, DTYPE)
    shapes = model.family.text.shapes(model.folder, model.config)
    planned = planned_request(step.make_inputs(device, DTYPE))
    nothing = PartSize("decoder", decoder)
    found = step_demand(model, transformer, shapes, DTYPE, planned)
    return MemoryDemand(
        PartSize("text_encoder", 0),
        (part_size("transformer", transformer),),
        nothing,
        0,
        found.total,
        0,
        modulation_rows=found.rows,
    )


@dataclass(frozen=True)
class Measured:
    velocity: torch.Tensor
    ms: float
    first_ms: float
    peak: int


@torch.inference_mode()
def measure(loaded: Loaded, step: MakesInputs, device: torch.device, repeats: int) -> Measured:
    inputs = step.make_inputs(device, DTYPE)
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    state, times, velocity = RequestCache(), [], torch.empty(0)
    steps = steps_around(inputs.ours[1], NUM_STEPS)
    plan_steps(state, steps)
    for _ in range(1 + repeats):
        begin = time.perf_counter()
        velocity = loaded.transformer(*inputs.ours, AttentionContext(state=state, step=steps[NUM_STEPS // 2]))
        synchronize(device)
        times.append(1000 * (time.perf_counter() - begin))
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return Measured(velocity.cpu(), statistics.median(times[1:]), times[0], peak)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def copy_speed(loaded: Loaded, device: torch.device) -> float:
    """GB per second from the arena to the device."""
    assert loaded.offloading is not None
    source = loaded.offloading.parts[0].arena.bytes[:COPY_BYTES]
    target = torch.empty_like(source, device=device)
    target.copy_(source, non_blocking=True)
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(4):
        target.copy_(source, non_blocking=True)
    synchronize(device)
    return 4 * source.nbytes / 1e9 / (time.perf_counter() - begin)


def run_case(name: str, case: Case, device: torch.device) -> Iterator[dict[str, Any]]:
    transfers = transfers_of(device)
    row = {"case": name, "step": case.step.name, "quantization": case.quantization}

    def built(limit: int | None) -> Loaded:
        return build(case, device, limit, transfers)

    yield from run_limits(row, built, case.step, case.limits or (0,), device, case.repeats)


def run_limits(
    row: Mapping[str, Any],
    built: Callable[[int | None], Loaded],
    step: MakesInputs,
    limits: Sequence[int],
    device: torch.device,
    repeats: int,
    decoder: int = 0,
) -> Iterator[dict[str, Any]]:
    """Measure a step with all weights on the device, and within each limit. row: what the rows begin with. decoder:
    bytes of it, which are taken meanwhile."""
    held = torch.empty(decoder, dtype=torch.uint8, device=device)
    whole = built(None)
    resident = measure(whole, step, device, repeats)
    planned = whole.plan.phases["denoise"]
    yield {
        **row,
        "offload": "none",
        "ms": resident.ms,
        "first_ms": resident.first_ms,
        "peak_gb": resident.peak / 1e9,
        "planned_gb": planned / 1e9,
        "fill_s": whole.seconds,
    }
    del whole
    free(device)
    for limit in limits:
        loaded = built(limit)
        assert loaded.offloading is not None
        (part,) = loaded.offloading.parts
        speed = copy_speed(loaded, device)
        free(device)
        if device.type == "cuda":
            assert loaded.plan.limit is not None
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(loaded.plan.limit / total, device)
        try:
            found = measure(loaded, step, device, repeats)
            is_identical = torch.equal(found.velocity, resident.velocity)
            if not is_identical:
                raise ValueError(f"{row['case']}: the velocity is not that of all weights on the device")
            planned, stream = loaded.plan.phases["denoise"], part.stream
            yield {
                **row,
                "offload": "layers",
                "limit_gb": (loaded.plan.limit or 0) / 1e9,
                "is_identical": is_identical,
                "resident_blocks": loaded.plan.resident["transformer"],
                "streamed_blocks": 0 if stream is None else stream.num_blocks,
                "late_copies": 0 if stream is None else stream.num_late_copies,
                "is_pinned": part.arena.is_pinned,
                "copy_gb_per_s": speed,
                "ms": found.ms,
                "first_ms": found.first_ms,
                "over_resident": found.ms / resident.ms,
                "peak_gb": found.peak / 1e9,
                "planned_gb": planned / 1e9,
                "fill_s": loaded.seconds,
            }
        finally:
            if device.type == "cuda":
                torch.cuda.set_per_process_memory_fraction(1.0, device)
            loaded.offloading.close()
        del loaded, part
        free(device)
    del held


def show_plans(cases: Mapping[str, Case | Generation]) -> None:
    """What each case takes on a GPU with as much memory as its limits, and which plan fits; nothing is computed."""
    cpu = torch.device("cpu")
    for name, case in cases.items():
        with tempfile.TemporaryDirectory() as folder:
            if isinstance(case, Generation):
                plans = list(plans_for(case, open_generation(case, Path(folder), cpu)))
            else:
                write_folder(Path(folder), case.step)
                model = family_for_folder(Path(folder)).describe(Path(folder))
                policy = AttentionPolicy(cli=AttentionConfig.parse(None), device="cpu", dtype=DTYPE)
                empty = model.build_transformer(policy)
                quantization = Quantization.of(model.family.name, case.quantization, ())
                if quantization is not None:
                    quantization.apply(model.modules(empty))
                demand = demand_of(model, empty, case.step, cpu)
                plans = [make_plan(demand, ["none"], None)]
                plans += [make_plan(demand, ["layers"], limit) for limit in case.limits]
        for plan in plans:
            phases = ", ".join(f"{phase} {size / 1e9:.2f}" for phase, size in plan.phases.items())
            print(
                f"{name}: {plan.offload}, peak {plan.peak / 1e9:.2f} GB of {(plan.limit or 0) / 1e9:.2f} ({phases}), "
                f"machine {plan.host / 1e9:.2f} GB, blocks that stay {dict(plan.resident)}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("offload.json"))
    parser.add_argument("--append", action="store_true", help="keep the rows of other cases in --output")
    parser.add_argument("--dry-run", action="store_true", help="show the plans alone")
    parser.add_argument("--only", default="", help=f"of {','.join((*CASES, *GENERATIONS))}, with commas between")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    arguments = parser.parse_args()
    # With its number: a memory fraction is of one device.
    device = torch.device("cuda:0" if arguments.device == "cuda" else "cpu")
    is_tiny = device.type == "cpu" and not arguments.dry_run
    cases: dict[str, Case | Generation] = {**TINY_CASES, **TINY_GENERATIONS} if is_tiny else {**CASES, **GENERATIONS}
    names = [name for name in arguments.only.split(",") if name] or list(cases)
    if arguments.dry_run:
        show_plans({name: cases[name] for name in names})
        return
    document: dict[str, Any] = {
        "schema": "diffusion_runtime.offload_gpu/1",
        "machine": describe_machine(device),
        "rows": [],
    }
    if arguments.append and arguments.output.is_file():
        before = json.loads(arguments.output.read_text())["rows"]
        document["rows"] = [row for row in before if row["case"] not in names]
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    use_expandable_segments(device)
    for name in names:
        begin = time.perf_counter()
        case = cases[name]
        run = run_case(name, case, device) if isinstance(case, Case) else run_generation(name, case, device)
        for row in run:
            document["rows"].append(row)
            arguments.output.write_text(json.dumps(document, indent=1) + "\n")
            shown = "  ".join(
                f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
            )
            print(shown, flush=True)
        print(f"{name}: {time.perf_counter() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
