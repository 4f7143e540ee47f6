"""Streamed transformer blocks on one GPU: the same numbers as all-resident, in how much memory, and at which speed.

    python -m benchmarks.offload_gpu --output benchmarks/results/offload_gpu.json [--only wan14b,flux1,flux1-fp8]
    python -m benchmarks.offload_gpu --device cpu --output /tmp/offload.json

Random weights of the published shapes, made on the device and held where offloading holds them. First the step with all
weights on the device: its velocity, milliseconds, peak. Then, for every limit, what the plan streams, with torch's
memory fraction set to the limit so that taking more is an error: the velocity must be the same bit for bit; then
milliseconds, the peak beside the planned one, and how many copies came late. `--device cpu` runs every path at tiny
sizes. A step is one forward pass of one guidance branch; the first one, which also projects the text, is not timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib
import json
import statistics
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.families.step import FamilyStep, StepInputs
from benchmarks.families_gpu import reading, write_folder
from benchmarks.fused_kernels_gpu import TINY_STEPS
from benchmarks.machine import describe_machine
from benchmarks.quantization_gpu import CASES as STEPS
from diffusion_runtime.attention import AttentionConfig, AttentionContext, AttentionPolicy, RequestCache, StepInfo
from diffusion_runtime.loading.native_model import load_transformer
from diffusion_runtime.memory.offloading import Offloading
from diffusion_runtime.memory.plan import MemoryDemand, MemoryPlan, PartSize, make_plan, plans_of
from diffusion_runtime.memory.transfers import Transfers, transfers_of
from diffusion_runtime.models.family import Model
from diffusion_runtime.models.interface import DiffusionTransformer
from diffusion_runtime.models.memory_demand import PlannedRequest, part_size, step_bytes
from diffusion_runtime.models.quantization import Quantization
from diffusion_runtime.models.registry import family_for_folder

DTYPE = torch.bfloat16
GB = 10**9
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


class NamedRandom:
    """A checkpoint whose tensors are random numbers that depend on their names alone, made on the device; stands in for
    models.checkpoint.Checkpoint."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> None:
        self.folder = Path("memory/transformer")
        self.shapes = dict(shapes)
        self.is_elsewhere = False
        self._generator = torch.Generator(device)

    def is_changed(self, name: str) -> bool:  # noqa: ARG002
        return False

    def quantized(self, name: str) -> tuple[()]:  # noqa: ARG002
        return ()

    def copy_into(self, name: str, target: torch.Tensor) -> None:
        generator = self._generator.manual_seed(zlib.crc32(name.encode()))
        is_norm_weight = target.dim() == 1 and name.endswith("weight")
        width = target.shape[-1] if target.dim() < 3 else target[0].numel()
        made = torch.empty(target.shape, dtype=target.dtype, device=generator.device)
        made.normal_(float(is_norm_weight), 0.02 if target.dim() < 2 else width**-0.5, generator=generator)
        target.copy_(made)

    def __enter__(self) -> NamedRandom:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@dataclass(frozen=True)
class Loaded:
    """A transformer with random weights, and what it takes. seconds: of filling its weights."""

    transformer: DiffusionTransformer
    offloading: Offloading | None
    plan: MemoryPlan
    seconds: float


def planned_request(inputs: StepInputs) -> PlannedRequest:
    given = inputs.ours[2]
    return PlannedRequest(given.size, 1, False, False, given.request, given.guidance)


def build(case: Case, device: torch.device, limit: int | None, transfers: Transfers) -> Loaded:
    """limit: None for all weights on the device; 0 for one that lets a few blocks stay."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_folder(folder, case.step)
        model = family_for_folder(folder).describe(folder)
        policy = AttentionPolicy(cli=AttentionConfig.parse(None), device=str(device), dtype=DTYPE)
        empty = model.build_transformer(policy)
        quantization = Quantization.of(model.family.name, case.quantization, ())
        if quantization is not None:
            quantization.apply(model.modules(empty))
        demand = demand_of(model, empty, case.step, device)
        if limit == 0:
            (part,) = demand.transformers
            limit = plans_of(demand, 1, ["layers"])[0].peak + max(part.blocks)
        plan = make_plan(demand, ["none" if limit is None else "layers"], limit)
        offloading = None if limit is None else Offloading(plan, transfers)
        pieces = model.pieces(model.transformer_components[0])
        shapes = {piece.name: piece.shape for several in pieces.values() for piece in several}
        module = importlib.import_module("diffusion_runtime.models.family")
        begin = time.perf_counter()
        with reading(module, NamedRandom(shapes, device)):  # type: ignore[arg-type]
            load_transformer(model, empty, device, DTYPE, (), offloading)
        return Loaded(empty, offloading, plan, time.perf_counter() - begin)


def demand_of(
    model: Model[Any, Any], transformer: DiffusionTransformer, step: FamilyStep, device: torch.device
) -> MemoryDemand:
    """The transformer's alone: without encoders and decoder."""
    model.set_loaded_dtypes(transformer, DTYPE)
    shapes = model.family.text_shapes(model.folder, model.config)
    planned = planned_request(step.make_inputs(device, DTYPE))
    nothing = PartSize("decoder", 0)
    activations = step_bytes(model, transformer, shapes, DTYPE, planned)
    return MemoryDemand(
        dataclasses.replace(nothing, name="text_encoder"),
        (part_size("transformer", transformer),),
        nothing,
        0,
        activations,
        0,
    )


@dataclass(frozen=True)
class Measured:
    velocity: torch.Tensor
    ms: float
    first_ms: float
    peak: int


@torch.inference_mode()
def measure(loaded: Loaded, step: FamilyStep, device: torch.device, repeats: int) -> Measured:
    inputs = step.make_inputs(device, DTYPE)
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    state, times, velocity = RequestCache(), [], torch.empty(0)
    for _ in range(1 + repeats):
        begin = time.perf_counter()
        velocity = loaded.transformer(*inputs.ours, AttentionContext(state=state, step=StepInfo(branch="cond")))
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
    whole = build(case, device, None, transfers)
    resident = measure(whole, case.step, device, case.repeats)
    row = {"case": name, "step": case.step.name, "quantization": case.quantization}
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
    for limit in case.limits or (0,):
        loaded = build(case, device, limit, transfers)
        assert loaded.offloading is not None
        (part,) = loaded.offloading.parts
        speed = copy_speed(loaded, device)
        free(device)
        if device.type == "cuda":
            assert loaded.plan.limit is not None
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(loaded.plan.limit / total, device)
        try:
            found = measure(loaded, case.step, device, case.repeats)
            is_identical = torch.equal(found.velocity, resident.velocity)
            if not is_identical:
                raise ValueError(f"{name}: the velocity is not that of all weights on the device")
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", default="", help=f"of {','.join(CASES)}, with commas between")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    arguments = parser.parse_args()
    # With its number: a memory fraction is of one device.
    device = torch.device("cuda:0" if arguments.device == "cuda" else "cpu")
    cases = TINY_CASES if device.type == "cpu" else CASES
    names = [name for name in arguments.only.split(",") if name] or list(cases)
    document: dict[str, Any] = {
        "schema": "diffusion_runtime.offload_gpu/1",
        "machine": describe_machine(device),
        "rows": [],
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    for name in names:
        begin = time.perf_counter()
        for row in run_case(name, cases[name], device):
            document["rows"].append(row)
            arguments.output.write_text(json.dumps(document, indent=1) + "\n")
            shown = "  ".join(
                f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
            )
            print(shown, flush=True)
        print(f"{name}: {time.perf_counter() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
