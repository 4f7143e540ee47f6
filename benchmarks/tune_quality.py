"""Dense attention, the best uniform and the tuned sparse setting on prompts that were not measured, embedded model.

    python -m benchmarks.tune_quality --prompts 8 --held-out 64 --test 64 --seconds 900 --journal tune_journal.json \\
        --output benchmarks/results/tune_quality.json

For each method by itself: `tune` with the budget `accuracy>=dense-0.02`, sensitivities and search on --prompts seeded
prompts, figures on --held-out others. Recorded for dense, uniform and tuned: the share of self-attention's pairs that
they keep, prompt accuracy with its Wilson 95 % interval, McNemar's test against dense on the same prompts, latent
distance and seconds of denoising. The search steps back on the held-out prompts, so --test others, which nothing
chose by, judge what it chose, beside dense attention in every number of steps: `dense_steps_needed` is the least
number that gets as many of them right as the tuned setting, which pays where it takes a smaller share of dense
attention's time than that is of the steps. --judge FILE does that with the settings of an earlier run, on this machine.
The output is written after each method. --seconds is shared out among the methods that are left; one that does not
finish in its share is recorded as such, and the same command with the same --journal goes on with it. The JSON says
`is_small` below SMALL held-out prompts, whose intervals tell little.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import math
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import describe_machine
from diffusion_runtime import GenerationRequest
from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.core.hardware import resolve_device
from diffusion_runtime.core.progress import Progress
from diffusion_runtime.memory.cpu_memory import tune_cpu_allocator
from diffusion_runtime.quality.paired_test import mcnemar
from diffusion_runtime.quality.shapes.scoring import wilson
from diffusion_runtime.quality.worlds import WORLDS
from diffusion_runtime.tuning.budget import all_met, parse_budgets
from diffusion_runtime.tuning.clip_metrics import TunedPrompt
from diffusion_runtime.tuning.journal import Journal
from diffusion_runtime.tuning.ladders import METHODS
from diffusion_runtime.tuning.measurement import Figures, Measurement, Rules
from diffusion_runtime.tuning.plan import Plan, Tuning
from diffusion_runtime.tuning.result import TuneResult
from diffusion_runtime.tuning.search import Outcome
from diffusion_runtime.tuning.tune import tune

# Held-out prompts below which a result is marked small: at 32 a Wilson interval spans about 20 points.
SMALL = 32
# Noise levels that were given belong to their number of steps.
OWN_LEVELS: dict[str, Any] = {"sigmas": None, "sigmas_before_shift": None}


class OutOfTime(Exception):
    """The seconds of a method are over; what it measured is in the journal."""


class Lines:
    """A reporter that prints lines, and raises OutOfTime after a clip that ends past `deadline` (time.monotonic)."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline

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
        if time.monotonic() > self._deadline:
            raise OutOfTime


def figures_of(figures: Figures, dense: Figures) -> dict[str, Any]:
    """Held-out figures with the interval of their accuracy, and McNemar's test against dense on the same prompts."""
    proportion = wilson(sum(figures.right), len(figures.right))
    test = mcnemar(dense.right, figures.right)
    return {
        **figures.to_dict(),
        "accuracy_interval": [round(proportion.low, 4), round(proportion.high, 4)],
        "mcnemar": {"only_dense": test.only_first, "only_this": test.only_second, "p": test.p},
    }


def setting(name: str, outcome: Outcome, dense: Figures) -> dict[str, Any]:
    """One line of the table. kept_within: 1 where no sparse setting is within the budget, as dense attention then is
    what to use; `kept` and the figures are those of the setting that came nearest."""
    return {
        "setting": name,
        **outcome.to_dict(),
        "kept_within": round(outcome.point.kept, 4) if outcome.is_met else 1.0,
        "verified": None if outcome.verified is None else figures_of(outcome.verified, dense),
    }


@dataclass
class TestPrompts:
    """The third set. dense_steps: dense attention in fewer steps on it, which is the same for all methods."""

    requests: tuple[GenerationRequest, ...]
    attributes: tuple[Any, ...]
    dense_steps: dict[int, Figures] = field(default_factory=dict)

    def judged(
        self, tuning: Tuning, tuned_rules: Rules, uniform_rules: Rules, method: str, reporter: Lines
    ) -> dict[str, Any]:
        """Figures of dense attention, the uniform and the tuned setting, and of dense attention in fewer steps."""
        own = dataclasses.replace(tuning, requests=self.requests, attributes=self.attributes, num_measured=1)
        plan = Plan.of(own)
        prompts = [TunedPrompt(*each) for each in zip(plan.requests, self.attributes, strict=True)]
        pipeline = plan.load(reporter)
        try:
            measurement = Measurement(pipeline, plan.dense, ("latent", "accuracy"), Journal(None, {}))
            reporter.say(f"{method}: {len(prompts)} prompts that nothing was chosen by")
            dense = measurement.figures([], prompts)
            tuned = measurement.figures(tuned_rules, prompts)
            uniform = measurement.figures(uniform_rules, prompts)
            for count in range(1, dense.num_steps) if not self.dense_steps else ():
                shorter = [
                    pipeline.resolve(dataclasses.replace(request, num_inference_steps=count, **OWN_LEVELS))
                    for request in plan.requests
                ]
                self.dense_steps[count] = measurement.fewer_steps(prompts, shorter)
        finally:
            pipeline.close()
        right = {count: sum(figures.right) for count, figures in self.dense_steps.items()}
        right[dense.num_steps] = sum(dense.right)
        return {
            "dense": figures_of(dense, dense),
            "uniform": figures_of(uniform, dense),
            "tuned": figures_of(tuned, dense),
            "budget_met": all_met(tuning.budgets, tuned.values, dense.values),
            "dense_steps_right": {str(count): right[count] for count in sorted(right)},
            "dense_steps_needed": steps_needed(right, sum(tuned.right)),
            "num_steps": dense.num_steps,
        }


def steps_needed(right: Mapping[int, int], wanted: int) -> int:
    """The fewest steps with as many right as wanted; of a setting that beats every count, the most steps."""
    return min((count for count, number in right.items() if number >= wanted), default=max(right))


def row_of(method: str, result: TuneResult, judged: dict[str, Any] | None) -> dict[str, Any]:
    dense = result.dense_verified
    tuned, uniform = setting("tuned", result.tuned, dense), setting("uniform", result.uniform[method], dense)
    return {
        "method": method,
        "finished": True,
        # Formally: where no uniform setting is within the budget, dense attention is what would be used.
        "tuned_keeps_fewer": tuned["kept_within"] < uniform["kept_within"],
        "uniform_is_within": uniform["kept_within"] < 1.0,
        "test": judged,
        "dense": {"setting": "dense", "kept": 1.0, "verified": figures_of(dense, dense)},
        "uniform": uniform,
        "tuned": tuned,
        "fewer_dense_steps": None if result.fewer_steps is None else figures_of(result.fewer_steps, dense),
        "frontier_settings": result.num_frontier,
        "sensitivity": [each.to_dict() for each in result.sensitivities],
        "seconds": round(result.seconds, 1),
    }


def table(document: dict[str, Any]) -> str:
    lines = [
        f"{'method':18} {'setting':14} {'kept':>6} {'budget':>7} {'right':>9} {'95 % interval':>15} {'latent':>7} s"
    ]
    for row in document["rows"]:
        if not row["finished"]:
            lines.append(f"{row['method']:18} not finished: {row['reason']}")
            continue
        fewer = row["fewer_dense_steps"]
        settings = [row["dense"], row["uniform"], row["tuned"]]
        if fewer is not None:
            settings.append({"setting": f"{fewer['num_inference_steps']} dense steps", "kept": 1.0, "verified": fewer})
        for each in settings:
            figures = each["verified"]
            start = f"{row['method']:18} {each['setting']:14} {each['kept']:6.3f} "
            met = {True: "met", False: "missed", None: "-"}[each.get("budget_met")]
            if figures is None:
                lines.append(f"{start}{met:>7} not run")
                continue
            low, high = figures["accuracy_interval"]
            right = f"{figures['right']} of {figures['prompts']}"
            # Clips of fewer steps have no latent distance: their grids of noise levels differ.
            latent = f"{figures['latent']:7.3f}" if "latent" in figures else f"{'-':>7}"
            interval = f"{low:.3f} to {high:.3f}"
            lines.append(f"{start}{met:>7} {right:>9} {interval:>15} {latent} {figures['denoise_seconds']:.2f}")
        if (test := row.get("test")) is not None:
            right = ", ".join(f"{name} {test[name]['right']}" for name in ("dense", "uniform", "tuned"))
            lines.append(
                f"{row['method']:18} of {test['dense']['prompts']} other prompts right: {right}; as many as tuned by "
                f"{test['dense_steps_needed']} of {test['num_steps']} dense steps"
            )
    return "\n".join(lines)


def judge_file(arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """The document of a run with the figures of its settings on prompts that nothing was chosen by: --test many behind
    those of that run, measured here. Written after each method."""
    document: dict[str, Any] = json.loads(arguments.judge.read_text())
    first = document["prompts"] + document["held_out"]
    every = WORLDS["shapes"].prompt_set(first + arguments.test, document["prompt_seed"])[first:]
    steps = document["request"]["num_inference_steps"]
    requests = tuple(GenerationRequest(each.text, seed=each.seed, num_inference_steps=steps) for each in every)
    test = TestPrompts(requests, tuple(each.attributes for each in every))
    document["test"], document["test_machine"] = arguments.test, describe_machine(device)
    for row in document["rows"]:
        if not row["finished"] or row["method"] not in arguments.methods:
            continue
        tuning = Tuning(
            runtime=RuntimeConfig(document["model"], device=arguments.device),
            requests=requests,
            attributes=test.attributes,
            num_measured=1,
            budgets=parse_budgets(document["budget"]),
            methods=(row["method"],),
            preset=document["preset"],
            **{name: document[name] for name in ("layer_ranges", "step_ranges", "levels")},
        )
        rules = row["tuned"]["attention"], row["uniform"]["attention"]
        row["test"] = test.judged(tuning, *rules, row["method"], Lines(math.inf))
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")
    return document


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="shapes")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--preset", default="draft")
    parser.add_argument("--prompts", type=int, default=8, help="for the sensitivities and the search")
    parser.add_argument("--held-out", type=int, default=64, help="prompts that figures are reported on")
    parser.add_argument("--test", type=int, default=0, help="prompts that nothing is chosen by, which judge; 0: none")
    parser.add_argument(
        "--judge", type=Path, help="the file of a run, whose settings are judged on --test prompts alone"
    )
    parser.add_argument("--steps", type=int, default=None, help="of denoising; default: the preset's")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seconds", type=float, default=None, help="wall clock of the whole run; default: no limit")
    parser.add_argument("--journal", type=Path, default=None, help="a file of measurements, to go on from")
    parser.add_argument("--budget", nargs="+", default=["accuracy>=dense-0.02"])
    parser.add_argument("--prompt-seed", type=int, default=17)
    parser.add_argument("--layer-ranges", type=int, default=2)
    parser.add_argument("--step-ranges", type=int, default=3)
    parser.add_argument("--levels", type=int, default=3)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    started = time.monotonic()
    # VSA warns with every generation that the embedded model has no trained gate.
    logging.getLogger("diffusion_runtime.attention").setLevel(logging.ERROR)
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    device = resolve_device(arguments.device)
    if device.type == "cpu":
        tune_cpu_allocator()
    if arguments.judge is not None:
        if not arguments.test:
            parser.error("--judge: how many prompts? give --test 64")
        print(table(judge_file(arguments, device)))
        return
    every = WORLDS["shapes"].prompt_set(arguments.prompts + arguments.held_out + arguments.test, arguments.prompt_seed)
    requests = tuple(
        GenerationRequest(prompt.text, seed=prompt.seed, num_inference_steps=arguments.steps) for prompt in every
    )
    attributes, num_tuned = tuple(prompt.attributes for prompt in every), arguments.prompts + arguments.held_out
    test = TestPrompts(requests[num_tuned:], attributes[num_tuned:])
    given = ("preset", "prompts", "held_out", "test", "seconds", "budget", "prompt_seed", "layer_ranges", "step_ranges")
    document: dict[str, Any] = {
        "schema": "diffusion_runtime.tune_quality/3",
        "machine": describe_machine(device),
        "model": arguments.model,
        **{name: getattr(arguments, name) for name in (*given, "levels")},
        "is_small": arguments.held_out < SMALL,
        "rows": [],
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    for index, method in enumerate(arguments.methods):
        begun = time.monotonic()
        deadline = math.inf
        if arguments.seconds is not None:
            deadline = begun + (started + arguments.seconds - begun) / (len(arguments.methods) - index)
        tuning = Tuning(
            runtime=RuntimeConfig(arguments.model, device=arguments.device),
            requests=requests[:num_tuned],
            attributes=attributes[:num_tuned],
            num_measured=arguments.prompts,
            budgets=parse_budgets(arguments.budget),
            methods=(method,),
            preset=arguments.preset,
            layer_ranges=arguments.layer_ranges,
            step_ranges=arguments.step_ranges,
            levels=arguments.levels,
        )
        try:
            result = tune(tuning, Lines(deadline), arguments.journal)
            rules = result.tuned.point.rules, result.uniform[method].point.rules
            judged = test.judged(tuning, *rules, method, Lines(math.inf)) if test.requests else None
            row = row_of(method, result, judged)
            request = result.request.to_dict()
            document["request"] = {key: value for key, value in request.items() if key not in ("prompt", "seed")}
        except OutOfTime:
            row = {
                "method": method,
                "finished": False,
                "reason": f"its share of --seconds was over after {time.monotonic() - begun:.0f} s",
            }
        document["rows"].append(row)
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")
    print(table(document))


if __name__ == "__main__":
    main()
