"""Tune: sensitivity by layer and step range, a knapsack, and a search along its frontier under a quality budget."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from diffusion_runtime.attention.config import AttentionSpec
from diffusion_runtime.core.hardware import detect_hardware
from diffusion_runtime.explanation.estimate import estimate_text
from diffusion_runtime.generation.interface import InspectablePipeline
from diffusion_runtime.models.lora_sources import recorded_loras
from diffusion_runtime.quality.clip_score import ClipScore
from diffusion_runtime.session.reporter import Reporter
from diffusion_runtime.tuning.budget import all_met, least_slack
from diffusion_runtime.tuning.clip_metrics import TunedPrompt
from diffusion_runtime.tuning.clip_progress import counted_clips
from diffusion_runtime.tuning.journal import Journal
from diffusion_runtime.tuning.measurement import Figures, Measurement, Rules
from diffusion_runtime.tuning.plan import ROLE, Plan, Tuning
from diffusion_runtime.tuning.result import TuneResult, by_name
from diffusion_runtime.tuning.search import IsMet, Outcome, Point, best_of, search, thinned
from diffusion_runtime.tuning.sensitivity import Sensitivity, cells_to_measure, frontier, sensitivities

# Of the frontier, between which the search bisects.
MAX_POINTS = 16


def tune(tuning: Tuning, reporter: Reporter, journal_path: Path | None = None) -> TuneResult:
    """journal_path: where measurements are kept until the end, so that an interrupted tuning goes on.

    Raises ConfigError, RequestError, BackendUnavailableError before any weight is read for what cannot be tuned.
    """
    plan = Plan.of(tuning)
    pipeline = plan.load(reporter)
    try:
        return _Run(tuning, plan, pipeline, reporter, journal_path).tuned()
    finally:
        pipeline.close()


@dataclass
class _Run:
    tuning: Tuning
    plan: Plan
    pipeline: InspectablePipeline
    reporter: Reporter
    journal_path: Path | None
    started: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        prompts = [
            TunedPrompt(request, attributes)
            for request, attributes in zip(self.plan.requests, self.tuning.attributes, strict=True)
        ]
        self.measured, self.verified = prompts[: self.tuning.num_measured], prompts[self.tuning.num_measured :]
        metrics = dict.fromkeys(["latent", *(budget.metric for budget in self.tuning.budgets)])
        if len(metrics) > 1 and all(prompt.attributes is not None for prompt in prompts):
            # It costs next to nothing beside a clip that is decoded anyway.
            metrics["accuracy"] = None
        journal = Journal(self.journal_path, self._identity())
        if journal.num_found:
            self.reporter.say(f"going on with {journal.num_found} measurements of {self.journal_path}")
        clip_path = self.tuning.clip_path
        clip = ClipScore(clip_path, str(self.pipeline.device)) if "clip" in metrics and clip_path else None
        self.measurement = Measurement(self.pipeline, self.plan.dense, tuple(metrics), journal, clip)

    def _identity(self) -> dict[str, Any]:
        """Return what every measurement depends on, in addition to its rules and its prompt."""
        description = self.plan.prepared.description
        return {
            "model": description.config.model_path,
            "config_sha256": description.model_folder.digest,
            "device": description.device,
            "dtype": description.dtype,
            "lora": recorded_loras(description.config.lora),
            "quantization": description.config.quantization,
            "clip_path": self.tuning.clip_path,
            "dense": self.plan.dense.to_dict(),
            "request": {**self.plan.requests[0].to_dict(), "prompt": None, "seed": None},
            "versions": self._versions(),
        }

    def _versions(self) -> dict[str, str]:
        """Return the versions of this package, of torch and of the installed kernel packages."""
        own = {"diffusion_runtime": str(self.pipeline.recipe["version"]), "torch": str(torch.__version__)}
        return {**own, **detect_hardware(str(self.pipeline.device)).packages}

    def tuned(self) -> TuneResult:
        measured = self._sensitivities()
        line = [point for _, point in frontier(self.plan.cells, measured)]
        dense_measured = self._figures("dense, measured prompts", [], self.measured)
        dense_verified = self._figures("dense, prompts for verification", [], self.verified)
        tuned = self._search("tuned", thinned(line, MAX_POINTS), dense_measured, dense_verified)
        uniform = {}
        for method, specs in self.plan.uniform.items():
            points = [Point([], 1.0), *self._uniform_points(specs)]
            uniform[method] = self._search(f"uniform {method}", points, dense_measured, dense_verified)
        outcomes = by_name(tuned, uniform)
        chosen = best_of(outcomes, lambda figures: self._slack(figures, dense_verified))
        description = self.plan.prepared.description
        return TuneResult(
            budgets=tuple(map(str, self.tuning.budgets)),
            methods=tuple(self.tuning.methods),
            runtime=self.tuning.runtime,
            request=self.plan.requests[0],
            dense=self.plan.dense,
            grid=self.plan.explanation.grid,
            measured_prompts=[(each.request.prompt, each.request.seed) for each in self.measured],
            verified_prompts=[(each.request.prompt, each.request.seed) for each in self.verified],
            cells=(self.tuning.layer_ranges, self.tuning.step_ranges, self.tuning.head_ranges),
            sensitivities=measured,
            num_frontier=len(line),
            dense_measured=dense_measured,
            dense_verified=dense_verified,
            tuned=tuned,
            uniform=uniform,
            chosen=chosen,
            fewer_steps=self._fewer_steps(outcomes[chosen], dense_verified),
            versions=self._versions(),
            device=description.device,
            dtype=description.dtype,
            config_sha256=description.model_folder.digest,
            seconds=time.perf_counter() - self.started,
        )

    def _sensitivities(self) -> list[Sensitivity]:
        todo = cells_to_measure(self.plan, list(self.plan.ladders))
        count = len(todo) * len(self.measured)
        self._say_how_much(count)
        with counted_clips(self.reporter, f"sensitivity of {len(self.plan.cells)} cells", count) as done:
            return sensitivities(todo, self.measured, self.measurement.distance, done)

    def _say_how_much(self, num_passes: int) -> None:
        """Say how much will be computed at least, before minutes of work on a CPU: the dense clips, and one clip from
        its cell on for each cell and choice, on average half of it."""
        if self.pipeline.device.type != "cpu":
            return
        num_clips = len(self.measured) + len(self.verified) + num_passes / 2
        operations = num_clips * sum(part.operations for part in self.plan.explanation.parts)
        self.reporter.say(
            f"{num_passes} measurements, then a search that verifies on {len(self.verified)} prompts: the former are "
            f"{estimate_text(operations, torch.float32)}"
        )

    def _uniform_points(self, specs: Sequence[AttentionSpec]) -> list[Point]:
        points = [Point([{"role": ROLE, **spec.to_dict()}], self.plan.kept(spec, self.plan.cells)) for spec in specs]
        return sorted((point for point in points if point.kept < 1.0), key=lambda point: -point.kept)

    def _search(self, name: str, points: Sequence[Point], measured: Figures, verified: Figures) -> Outcome:
        def is_within(dense: Figures) -> IsMet:
            return lambda figures: all_met(self.tuning.budgets, figures.values, dense.values)

        return search(
            points,
            lambda point: self._figures(f"{name}, {point.kept:.3f} kept", point.rules, self.measured),
            is_within(measured),
            lambda point: self._figures(f"{name}, {point.kept:.3f} kept, verification", point.rules, self.verified),
            is_within(verified),
            lambda figures: self._slack(figures, verified),
        )

    def _slack(self, figures: Figures, dense: Figures) -> float:
        return least_slack(self.tuning.budgets, figures.values, dense.values)

    def _figures(self, name: str, rules: Rules, prompts: Sequence[TunedPrompt]) -> Figures:
        with counted_clips(self.reporter, name, len(prompts)) as done:
            for prompt in prompts:
                self.measurement.clip(rules, prompt)
                done()
        return self.measurement.figures(rules, prompts)

    def _fewer_steps(self, chosen: Outcome, dense: Figures) -> Figures | None:
        """Dense attention with as many steps as take the chosen setting's time; None where that saves none."""
        if chosen.verified is None or dense.seconds <= 0:
            return None
        count = max(1, round(chosen.verified.seconds / (dense.seconds / dense.num_steps)))
        if count >= dense.num_steps:
            return None
        levels: Mapping[str, Any] = {"sigmas": None, "sigmas_before_shift": None}
        shorter = [
            self.pipeline.resolve(dataclasses.replace(each.request, num_inference_steps=count, **levels))
            for each in self.verified
        ]
        self.reporter.say(f"dense, {count} steps")
        return self.measurement.fewer_steps(self.verified, shorter)
