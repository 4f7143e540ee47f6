"""One denoising step of every model family at its real size: our transformer beside diffusers', on one GPU.

    python -m benchmarks.families_gpu --output families.json [--only wan,flux1] [--steps "*I2V*"] [--repeats 3]

Weights are random (no download), the same in both. The outputs are compared first: a family whose outputs differ by
more than bfloat16 explains is reported as wrong and not timed. Then both are timed, alternately where both fit into
memory: milliseconds of one forward pass, and the peak of device memory above the weights.
"""

from __future__ import annotations

import argparse
import fnmatch
import gc
import importlib
import json
import pkgutil
import statistics
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import benchmarks.families
from benchmarks.families.step import FamilyStep, StepInputs
from benchmarks.machine import describe_machine
from diffusion_runtime.attention import AttentionConfig, AttentionContext, AttentionPolicy
from diffusion_runtime.diffusers_bridge.random_transformer import random_transformer
from diffusion_runtime.models.interface import DiffusionTransformer
from diffusion_runtime.models.random_weights import fill_randomly, taking_from
from diffusion_runtime.models.registry import family_for_folder

DTYPE = torch.bfloat16
# Two bfloat16 models of random weights that compute the same in another order differ by about this much.
MAX_DIFFERENCE = 0.05
SLOW_MS = 4000.0


@dataclass(frozen=True)
class Row:
    """family: its module here; step: model and size. backend: what served self-attention. difference: relative L2 of
    the velocities. milliseconds: medians of one forward; ratio: ours over theirs. peaks: GB above the weights."""

    family: str
    step: str
    backend: str
    num_parameters: int
    difference: float
    ours_ms: float
    theirs_ms: float
    ratio: float
    ours_peak_gb: float
    theirs_peak_gb: float
    weights_gb: float


def build_theirs(step: FamilyStep, device: torch.device) -> nn.Module:
    return random_transformer(step.transformer_class, step.config, device, DTYPE)


def build_ours(
    step: FamilyStep, backend: str | None, state: dict[str, torch.Tensor], device: torch.device, *, takes: bool
) -> DiffusionTransformer:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_folder(folder, step)
        model = family_for_folder(folder).describe(folder)
        policy = AttentionPolicy(cli=AttentionConfig.parse(backend), device=str(device), dtype=DTYPE)
        empty = model.build_transformer(policy)
        return fill_randomly(model, empty, device, DTYPE, make=taking_from(state, frees=takes))


def write_folder(folder: Path, step: FamilyStep) -> None:
    """The json files that a family reads before any weight."""
    index = {"transformer": ["diffusers", step.transformer_class], **step.index}
    (folder / "model_index.json").write_text(json.dumps(index))
    (folder / "scheduler").mkdir()
    scheduler = {"_class_name": "FlowMatchEulerDiscreteScheduler"}
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler))
    configs = {"transformer": step.config, "vae": step.vae_config, **step.other_configs}
    for name, values in configs.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(dict(values)))


@torch.inference_mode()
def measure(family: str, step: FamilyStep, backends: Sequence[str | None], repeats: int) -> Iterator[Row]:
    device = torch.device("cuda")
    theirs = build_theirs(step, device)
    inputs = step.make_inputs(device, DTYPE)
    weights = torch.cuda.memory_allocated()
    num_parameters = sum(parameter.numel() for parameter in theirs.parameters())
    expected, theirs_peak, theirs_times = run_first(lambda: step_of_theirs(theirs, inputs))
    # A step of many seconds says enough in one repeat.
    repeats = 1 if theirs_times[0] > SLOW_MS else repeats
    keeps_both = 2.3 * weights + theirs_peak < torch.cuda.get_device_properties(device).total_memory
    if not keeps_both:
        theirs_times += [timed(lambda: step_of_theirs(theirs, inputs)) for _ in range(repeats)]
    state = dict(theirs.state_dict())
    for backend in backends[: None if keeps_both and theirs_times[0] <= SLOW_MS else 1]:
        ours = build_ours(step, backend, state, device, takes=not keeps_both)
        found, ours_peak, ours_times = run_first(lambda ours=ours: step_of_ours(ours, inputs))
        difference = float((found.float() - expected.float()).norm() / expected.float().norm())
        if not difference < MAX_DIFFERENCE:
            raise ValueError(f"the outputs differ by {difference:.3g} (relative L2)")
        for _ in range(repeats):
            if keeps_both:
                theirs_times.append(timed(lambda: step_of_theirs(theirs, inputs)))
            ours_times.append(timed(lambda ours=ours: step_of_ours(ours, inputs)))
        ours_ms, theirs_ms = statistics.median(ours_times), statistics.median(theirs_times)
        used = (
            next(layer for layer in ours.attention_layers() if layer.layer.role == "self")
            .decisions.possible[0][1]
            .backend
        )
        yield Row(
            family=family,
            step=step.name,
            backend=used if backend is None else f"{used} (chosen)",
            num_parameters=num_parameters,
            difference=difference,
            ours_ms=ours_ms,
            theirs_ms=theirs_ms,
            ratio=ours_ms / theirs_ms,
            ours_peak_gb=ours_peak / 1e9,
            theirs_peak_gb=theirs_peak / 1e9,
            weights_gb=weights / 1e9,
        )
        del ours
        free()


def step_of_theirs(model: nn.Module, inputs: StepInputs) -> torch.Tensor:
    return inputs.theirs_to_velocity(model(**inputs.theirs))


def step_of_ours(model: DiffusionTransformer, inputs: StepInputs) -> torch.Tensor:
    # A state of its own each time: nothing is kept from the step before, as in diffusers.
    velocity: torch.Tensor = model(*inputs.ours, AttentionContext())
    return velocity


def run_first(run: Any) -> tuple[torch.Tensor, int, list[float]]:
    """Its result, the bytes it needed at its peak beyond what was there, and milliseconds of a second call; the first
    compiles and fills tables."""
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results: list[torch.Tensor] = []
    milliseconds = timed(lambda: results.append(run()))
    return results[0], torch.cuda.max_memory_allocated() - before, [milliseconds]


def timed(run: Any) -> float:
    """Milliseconds of one call, by the device's clock."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    run()
    stop.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(stop))


def free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def steps_of(module_name: str) -> tuple[FamilyStep, ...]:
    found: tuple[FamilyStep, ...] = importlib.import_module(f"benchmarks.families.{module_name}").STEPS
    return found


def write(path: Path, rows: Sequence[Row], failures: Mapping[str, str], repeats: int) -> None:
    result = {
        "machine": describe_machine("cuda"),
        "dtype": "bfloat16",
        "repeats": repeats,
        "rows": [asdict(row) for row in rows],
        "failures": dict(failures),
    }
    path.write_text(json.dumps(result, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", default="", help="modules of benchmarks/families, with commas between")
    parser.add_argument("--steps", default="*", help="a shell pattern of their names")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    modules = sorted(info.name for info in pkgutil.iter_modules(benchmarks.families.__path__) if info.name != "step")
    wanted = [name for name in arguments.only.split(",") if name] or modules
    rows: list[Row] = []
    failures: dict[str, str] = {}
    for name in wanted:
        for step in (each for each in steps_of(name) if fnmatch.fnmatchcase(each.name, arguments.steps)):
            try:
                for row in measure(name, step, (None, "torch_sdpa"), arguments.repeats):
                    rows.append(row)
                    print(
                        f"{row.step:44} {row.backend:24} ours {row.ours_ms:9.1f} ms  theirs {row.theirs_ms:9.1f} ms  "
                        f"{row.ratio:5.2f}  peaks {row.ours_peak_gb:5.1f} {row.theirs_peak_gb:5.1f} GB  "
                        f"difference {row.difference:.1e}",
                        flush=True,
                    )
            except Exception as error:
                traceback.print_exc()
                failures[step.name] = f"{type(error).__name__}: {error}"
            free()
            write(arguments.output, rows, failures, arguments.repeats)
    for step_name, failure in failures.items():
        print(f"FAILED {step_name}: {failure}")
    if failures:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
