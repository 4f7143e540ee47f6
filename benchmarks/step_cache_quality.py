"""Step caches on a model and at settings of yours: their cost in quality, beside fewer plain steps of the same cost.

    python -m benchmarks.step_cache_quality --device cpu --output benchmarks/results/step_cache_quality.json

Every setting generates the same seeded prompts as the full run. Recorded: the share of branch forwards that were
computed (the two branches of guidance count one each), seconds of denoising over those of the full run, the relative L2
distance of the final latents from the full run's, the PSNR of the frames, and prompt accuracy with its 95 % interval.
Behind the caches stand runs of the same sampler with so many plain steps as the caches computed: what a cache has to
beat. benchmarks/faster_quality.py measures fixed settings of every way to be faster on the embedded model.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from benchmarks.clip_quality import Clips, generate_clips, joint_rates, quality_prompts, write_rows
from diffusion_runtime import Pipeline, load_pipeline
from diffusion_runtime.quality.shapes.prompts import EvaluationPrompt

# Request values of each cache, from little to much.
CACHES: list[dict[str, Any]] = [
    *({"step_cache": f"easycache:threshold={threshold}"} for threshold in (0.05, 0.1, 0.2, 0.4)),
    *({"cfg_gate": gate} for gate in (0.75, 0.5)),
    {"step_cache": "easycache:threshold=0.1", "cfg_gate": 0.5},
]


@dataclass(frozen=True)
class Run:
    """num_forwards: of guidance branches. processor_seconds: of everything, text and decoding included; unlike those of
    the clock, they do not count other work on the machine."""

    clips: Clips
    num_forwards: int
    processor_seconds: float


def run(pipeline: Pipeline, prompts: list[EvaluationPrompt], values: dict[str, Any]) -> Run:
    started = time.process_time()
    clips = generate_clips(pipeline, prompts, values)
    computed = [sum(row.num_computed for row in report.steps) for reports in clips.reports for report in reports]
    # Nothing is counted where no cache is.
    num_forwards = sum(count or 2 * values["num_inference_steps"] for count in computed)
    return Run(clips, num_forwards, time.process_time() - started)


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row per setting: the full run, the caches, then plain steps."""
    prompts = quality_prompts(arguments.num_prompts)
    pipeline = load_pipeline(arguments.model, device=arguments.device, dtype=arguments.dtype)
    full_values = {"num_inference_steps": arguments.steps, **arguments.request}
    run(pipeline, prompts[:1], full_values)
    full = run(pipeline, prompts, full_values)

    def row(values: dict[str, Any], made: Run) -> dict[str, Any]:
        seconds = sum(made.clips.denoise_seconds)
        return {
            "request": values,
            "computed_share": made.num_forwards / full.num_forwards,
            "time_ratio": seconds / sum(full.clips.denoise_seconds),
            "processor_time_ratio": made.processor_seconds / full.processor_seconds,
            "seconds_per_clip": seconds / len(prompts),
            **made.clips.beside(full.clips),
        }

    yield row(full_values, full)
    counts = set()
    for values in track(arguments.caches, "caches", console=Console(stderr=True)):
        found = row({**full_values, **values}, run(pipeline, prompts, {**full_values, **values}))
        counts.add(max(1, round(found["computed_share"] * arguments.steps)))
        yield found
    for count in track(sorted(counts - {arguments.steps}, reverse=True), "plain steps", console=Console(stderr=True)):
        values = {**full_values, "num_inference_steps": count}
        yield row(values, run(pipeline, prompts, values))


def print_row(row: dict[str, Any]) -> None:
    print(
        f"computed {row['computed_share']:.3f}  time {row['time_ratio']:.3f} (processor "
        f"{row['processor_time_ratio']:.3f})  latents {row['latent_relative_l2']:.4f}  PSNR {row['psnr_db']:5.1f} dB  "
        f"joint {joint_rates(row)}  {row['request']}",
        flush=True,
    )


def printed(rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for row in rows:
        print_row(row)
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="shapes")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--num-prompts", type=int, default=64, help="of each kind")
    parser.add_argument("--steps", type=int, default=24, help="of the full run")
    parser.add_argument("--request", type=json.loads, default={}, help="more request values, as JSON")
    parser.add_argument("--caches", type=json.loads, default=CACHES, help="a JSON list of request values")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    write_rows(
        arguments,
        "diffusion_runtime.step_cache_quality/1",
        printed(measure(arguments)),
        model=arguments.model,
        dtype=arguments.dtype,
        num_prompts=arguments.num_prompts,
    )


if __name__ == "__main__":
    main()
