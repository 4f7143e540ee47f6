"""Tuned sparse attention beside the best uniform setting under the same budget, on the embedded model.

    python -m benchmarks.tune_quality --output benchmarks/results/tune_quality.json

For each method by itself: `tune` with the budget `accuracy>=dense-0.02`, sensitivities on the first prompts of a seeded
set and everything that is reported on the others. Recorded: the share of self-attention's pairs that the tuned setting
and the sparsest uniform one keep, with prompt accuracy (95 % interval) and latent distance of both on the prompts for
verification. The file is written after each method; --journal keeps measurements, so that a run can be interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import describe_machine
from diffusion_runtime import GenerationRequest
from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.hardware import resolve_device
from diffusion_runtime.memory.cpu_memory import tune_cpu_allocator
from diffusion_runtime.progress import Progress
from diffusion_runtime.quality.paired_test import mcnemar
from diffusion_runtime.quality.shapes.prompts import prompt_set
from diffusion_runtime.quality.shapes.scoring import wilson
from diffusion_runtime.tuning.budget import parse_budgets
from diffusion_runtime.tuning.ladders import METHODS
from diffusion_runtime.tuning.measurement import Figures
from diffusion_runtime.tuning.plan import Tuning
from diffusion_runtime.tuning.result import TuneResult
from diffusion_runtime.tuning.search import Outcome
from diffusion_runtime.tuning.tune import tune


class Lines:
    """A reporter that prints lines."""

    def say(self, text: str, /) -> None:
        print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)

    def error(self, text: str, trace: str = "", /) -> None:
        self.say(text + trace)

    @contextlib.contextmanager
    def progress(self, title: str, /) -> Iterator[Lines]:
        self.say(title)
        yield self

    def update(self, progress: Progress, /) -> None:
        if progress.step % 20 == 0:
            self.say(f"  {progress.step} of {progress.num_steps}, {progress.seconds:.0f} s")


def with_interval(outcome: Outcome, dense: Figures) -> dict[str, Any]:
    """An outcome with the interval of its accuracy, and McNemar's test against dense on the same prompts."""
    figures = outcome.verified
    if figures is None:
        return outcome.to_dict()
    proportion = wilson(sum(figures.right), len(figures.right))
    test = mcnemar(dense.right, figures.right)
    return {
        **outcome.to_dict(),
        "accuracy_interval": [round(proportion.low, 4), round(proportion.high, 4)],
        "mcnemar": {"only_dense": test.only_first, "only_this": test.only_second, "p": test.p},
    }


def row_of(method: str, result: TuneResult) -> dict[str, Any]:
    uniform = result.uniform[method]
    tuned_kept, uniform_kept = (each.point.kept if each.is_met else 1.0 for each in (result.tuned, uniform))
    return {
        "method": method,
        "tuned_kept": round(tuned_kept, 4),
        "uniform_kept": round(uniform_kept, 4),
        "tuned_keeps_fewer": tuned_kept < uniform_kept,
        "tuned": with_interval(result.tuned, result.dense_verified),
        "uniform": with_interval(uniform, result.dense_verified),
        "dense": {"measured": result.dense_measured.to_dict(), "verified": result.dense_verified.to_dict()},
        "fewer_dense_steps": None if result.fewer_steps is None else result.fewer_steps.to_dict(),
        "frontier_settings": result.num_frontier,
        "sensitivity": [each.to_dict() for each in result.sensitivities],
        "seconds": round(result.seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="shapes")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--preset", default="draft")
    parser.add_argument("--num-inference-steps", type=int, default=None, help="None: the preset's")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--budget", nargs="+", default=["accuracy>=dense-0.02"])
    parser.add_argument("--num-measured", type=int, default=2, help="prompts for the sensitivities and the search")
    parser.add_argument("--num-verified", type=int, default=16)
    parser.add_argument("--prompt-seed", type=int, default=17)
    parser.add_argument("--layer-ranges", type=int, default=2)
    parser.add_argument("--step-ranges", type=int, default=4)
    parser.add_argument("--levels", type=int, default=3)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--journal", type=Path, default=None, help="a folder")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--merge", nargs="+", type=Path, help="join these files into --output instead of measuring")
    arguments = parser.parse_args()
    if arguments.merge:
        parts = [json.loads(path.read_text()) for path in arguments.merge]
        document = {**parts[0], "rows": [row for part in parts for row in part["rows"]]}
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")
        return
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    device = resolve_device(arguments.device)
    if device.type == "cpu":
        tune_cpu_allocator()
    prompts = prompt_set(arguments.num_measured + arguments.num_verified, arguments.prompt_seed)
    given = ("preset", "budget", "num_measured", "num_verified", "prompt_seed", "layer_ranges", "step_ranges", "levels")
    document: dict[str, Any] = {
        "schema": "diffusion_runtime.tune_quality/1",
        "machine": describe_machine(device),
        "model": arguments.model,
        **{name: getattr(arguments, name) for name in given},
        "rows": [],
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    for method in arguments.methods:
        tuning = Tuning(
            runtime=RuntimeConfig(arguments.model, device=arguments.device),
            requests=tuple(
                GenerationRequest(prompt.text, seed=prompt.seed, num_inference_steps=arguments.num_inference_steps)
                for prompt in prompts
            ),
            attributes=tuple(prompt.attributes for prompt in prompts),
            num_measured=arguments.num_measured,
            budgets=parse_budgets(arguments.budget),
            methods=(method,),
            preset=arguments.preset,
            layer_ranges=arguments.layer_ranges,
            step_ranges=arguments.step_ranges,
            levels=arguments.levels,
        )
        journal = None if arguments.journal is None else arguments.journal / f"{method}.json"
        result = tune(tuning, Lines(), journal)
        row = row_of(method, result)
        document["request"] = {
            key: value for key, value in result.request.to_dict().items() if key not in ("prompt", "seed")
        }
        document["rows"].append(row)
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")
        print(f"{method}: tuned {row['tuned_kept']}, uniform {row['uniform_kept']}, {row['seconds']} s", flush=True)


if __name__ == "__main__":
    main()
