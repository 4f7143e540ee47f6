"""How far the seconds that `--dry-run` says are from those that a generation takes: embedded models and random weights.

    OMP_NUM_THREADS=1 python -m benchmarks.stage_times_cpu --output benchmarks/results/stage_times_cpu.json

Each model is measured at three sizes with few steps, as `bench generate` does, and makes clips at four sizes or more
with more steps, some of them between the measured ones. Every generation is the first of a process of its own, as a
command's is. Measuring and making take turns, so that a machine that becomes slower or faster does so for both; what
was expected of a clip is asked when all sizes of a round were measured. All of it is repeated, with nothing kept in
between; per size and stage the median of the errors counts.

By default the clock counts the CPU time of the process in place of wall time (--clock wall), with one thread: waiting
for a core is no part of it, but a neighbour on the same core still is, by half of it and more in single runs. The
program that encodes an mp4 is a process of its own, and `write` is then without it. Exit code 1 for an error above
15 %.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine
from diffusion_runtime.benchmark.generation import GenerationChoice, benchmark_generation
from diffusion_runtime.benchmark.random_pipeline import random_pipeline
from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.core.cache_folder import ENVIRONMENT_VARIABLE
from diffusion_runtime.explanation.expected_time import expected_time
from diffusion_runtime.explanation.stage_times import DECODE, DENOISE
from diffusion_runtime.generation.interface import GenerationPipeline
from diffusion_runtime.loading import load_pipeline
from diffusion_runtime.media.file_writer import FileWriter
from diffusion_runtime.request.generation_request import GenerationRequest

MAX_ERROR = 0.15
# Stages of shorter times than this, in seconds, are in the sum alone.
LEAST_SECONDS = 0.05
NUM_STEPS_MEASURED = 4

Changes = Mapping[str, Mapping[str, object]]
Size = tuple[int, int, int]


@dataclass(frozen=True)
class Model:
    """measured, made: sizes (frames, height, width) of the benchmarks and of the generations. changes: of a published
    model's json, which then has random weights of sizes that a CPU computes."""

    name: str
    measured: tuple[Size, ...]
    made: tuple[Size, ...]
    num_steps: int
    changes: Changes | None = None


CLIPS, MADE = ((5, 64, 64), (9, 96, 96), (13, 144, 144)), ((5, 64, 64), (5, 96, 96), (9, 128, 128), (13, 144, 144))
MODELS = (
    Model("shapes", CLIPS, MADE, 12),
    # Of three chunks, and of more.
    Model(
        "shapes-causal",
        ((9, 64, 64), (21, 96, 96), (9, 144, 144)),
        ((9, 64, 64), (9, 80, 80), (9, 128, 128), (9, 144, 144), (13, 96, 96), (17, 80, 80)),
        4,
    ),
    Model(
        "wan2.1-1.3b",
        ((5, 96, 96), (9, 128, 128), (13, 192, 192)),
        ((5, 96, 96), (5, 160, 160), (9, 160, 160), (13, 192, 192)),
        8,
        {
            "transformer/config.json": {
                "num_layers": 4,
                "num_attention_heads": 4,
                "ffn_dim": 2048,
                "text_dim": 512,
            },
            "vae/config.json": {"base_dim": 16, "num_res_blocks": 1},
        },
    ),
    Model(
        "z-image-turbo",
        ((1, 128, 128), (1, 320, 320), (1, 512, 512)),
        ((1, 128, 128), (1, 224, 224), (1, 384, 384), (1, 512, 512)),
        8,
        {
            "transformer/config.json": {
                "n_layers": 4,
                "n_refiner_layers": 1,
                "n_heads": 6,
                "n_kv_heads": 6,
                "dim": 768,
                "cap_feat_dim": 512,
            },
            "vae/config.json": {"block_out_channels": [32, 64, 64, 64], "layers_per_block": 1},
        },
    ),
)


def main() -> int:
    arguments = parse_arguments()
    machine = describe_machine("cpu")
    rows: list[dict[str, Any]] = []
    for model in MODELS:
        if arguments.models and model.name not in arguments.models:
            continue
        runs: dict[Size, list[dict[str, Any]]] = {size: [] for size in model.made}
        for _ in range(arguments.repeats):
            with tempfile.TemporaryDirectory() as cache:
                os.environ[ENVIRONMENT_VARIABLE] = cache
                took: dict[Size, dict[str, float]] = {}
                for measured, made in itertools.zip_longest(model.measured, model.made):
                    if measured is not None:
                        in_new_process(measure, model, measured, arguments.clock)
                    took[made] = in_new_process(make, model, made, arguments.clock)
                for size in model.made:
                    runs[size].append({**in_new_process(expect, model, size, arguments.clock), "took": took[size]})
        rows += [compare(model, size, runs[size]) for size in model.made]
        print("\n".join(map(shown, rows[-len(model.made) :])), file=sys.stderr)
    worst = max(row["largest_error"] for row in rows)
    document = {
        "schema": "diffusion_runtime.stage_times_cpu/1",
        "machine": machine,
        "load_average_after": [round(load, 2) for load in os.getloadavg()],
        "clock": arguments.clock,
        "repeats": arguments.repeats,
        "measured_steps": NUM_STEPS_MEASURED,
        "rows": rows,
        "largest_error": worst,
        "within_limit": worst <= MAX_ERROR,
    }
    text = json.dumps(document, indent=1) + "\n"
    if arguments.output is None:
        print(text, end="")
    else:
        arguments.output.write_text(text)
    print("\n".join(map(shown, rows)))
    return 0 if document["within_limit"] else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--clock", choices=("process", "wall"), default="process")
    parser.add_argument("--models", nargs="*", choices=[model.name for model in MODELS])
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def in_new_process(work: Callable[[Model, Size, str], Any], model: Model, size: Size, clock: str) -> Any:
    """Run in a process forked from this one, which has imported what takes long and computed nothing."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        return pool.submit(work, model, size, clock).result()


def measure(model: Model, size: Size, clock: str) -> None:
    use_clock(clock)
    values = {**request_values(size), "num_inference_steps": NUM_STEPS_MEASURED}
    benchmark_generation(GenerationChoice(config_of(model), values, None, 2, False, model.changes))


def expect(model: Model, size: Size, clock: str) -> dict[str, Any]:
    """Return the seconds that are expected of a generation by stage, and what they rest on."""
    use_clock(clock)
    pipeline, request = loaded(model, size)
    expected = expected_time(pipeline.recipe, pipeline.rules, request, file_format(size))
    return {"expected": dict(expected.seconds), "basis": expected.basis}


def make(model: Model, size: Size, clock: str) -> dict[str, float]:
    """Return the seconds that a generation takes by stage."""
    use_clock(clock)
    pipeline, request = loaded(model, size)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"made.{file_format(size)}"
        with FileWriter(path) as writer:
            # As the command runs it: with its progress.
            media = pipeline(request, on_progress=lambda _: None, open_sink=writer.open)
            begin = time.perf_counter()
            media.save(path, writer=writer)
            return {**media.timings, "write": time.perf_counter() - begin}


def loaded(model: Model, size: Size) -> tuple[GenerationPipeline, GenerationRequest]:
    """Return a model and the resolved request of a clip."""
    pipeline: GenerationPipeline
    if model.changes is None:
        pipeline = load_pipeline(config_of(model))
    else:
        pipeline = random_pipeline(model.name, config_of(model), lambda _: None, model.changes)
    values = {**request_values(size), "num_inference_steps": model.num_steps}
    return pipeline, pipeline.resolve(GenerationRequest("a blue star moving up", **values))


def file_format(size: Size) -> str:
    """Return the format of what is made."""
    return "png" if size[0] == 1 else "mp4"


def use_clock(clock: str) -> None:
    """Let every stage of this process be timed by CPU time in place of wall time."""
    if clock == "process":
        time.perf_counter = time.process_time


def config_of(model: Model) -> RuntimeConfig:
    return RuntimeConfig(model_path=model.name, device="cpu", dtype="float32")


def request_values(size: Size) -> dict[str, int]:
    return dict(zip(("num_frames", "height", "width"), size, strict=True))


def compare(model: Model, size: Size, runs: list[dict[str, Any]]) -> dict[str, Any]:
    each = [errors_of(run) for run in runs]
    names = [name for name in each[0] if all(name in errors for errors in each)]
    errors = {name: statistics.median(one[name] for one in each) for name in names}
    expected, took = (
        {name: statistics.median(run[kind][name] for run in runs) for name in runs[0]["expected"]}
        for kind in ("expected", "took")
    )
    return {
        "model": model.name,
        "weights": "of the model" if model.changes is None else "random",
        "size": list(size),
        "is_measured_size": size in model.measured,
        "num_steps": model.num_steps,
        "basis": runs[0]["basis"],
        "expected_s": {name: round(value, 4) for name, value in expected.items()},
        "took_s": {name: round(value, 4) for name, value in took.items()},
        "all_errors": [{name: round(value, 4) for name, value in one.items()} for one in each],
        "errors": {name: round(value, 4) for name, value in errors.items()},
        "largest_error": round(max(map(abs, errors.values())), 4),
    }


def errors_of(run: Mapping[str, Any]) -> dict[str, float]:
    expected = run["expected"]
    took = {name: run["took"][name] for name in expected}
    long = [name for name in (DENOISE, DECODE) if expected[name] >= LEAST_SECONDS]
    return {
        **{name: took[name] / expected[name] - 1 for name in long},
        "together": sum(took.values()) / sum(expected.values()) - 1,
    }


def shown(row: Mapping[str, Any]) -> str:
    frames, height, width = row["size"]
    errors = ", ".join(f"{name} {value:+.1%}" for name, value in row["errors"].items())
    where = "measured" if row["is_measured_size"] else "between"
    total = sum(row["expected_s"].values()), sum(row["took_s"].values())
    times = f"expected {total[0]:.2f} s, took {total[1]:.2f}"
    return f"{row['model']} {frames} x {height} x {width} ({where}): {times}; {errors}"


if __name__ == "__main__":
    sys.exit(main())
