"""Trials: clips of combinations, each beside the clip as given. What was measured is kept in the journal."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from diffusion_runtime.attention.config import AttentionConfig
from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.errors import DiffusionRuntimeError
from diffusion_runtime.generation.interface import InspectablePipeline
from diffusion_runtime.loading import prepare
from diffusion_runtime.media import GeneratedMedia
from diffusion_runtime.pipeline import Pipeline
from diffusion_runtime.profiling.instruments import attention_choices, watched_latents
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.tuning.clip_metrics import ClipMetrics, ReferenceClip, TunedPrompt
from diffusion_runtime.tuning.combination import STAGES, Combination, Trial
from diffusion_runtime.tuning.journal import Journal
from diffusion_runtime.tuning.time_limit import TimeLimit

# Of one clip on a GPU, whose times vary by several percent.
_MOST_REPEATS, _REPEATED_SECONDS = 3, 1.0


@dataclass
class Trials:
    """runtime: what every pipeline is loaded with, in addition to a combination's own; its attention choices have what
    sparse methods need of the weights. dense: the choices that were given, which combinations are laid over. requests:
    as given, not resolved, by prompt and seed; preset: of the model. limit: is given a sign at every step.

    On a GPU the first clip of a setting on a loaded pipeline counts for nothing: it imports and compiles kernels, for
    longer than the clip takes, and so do libraries' plans. The next ones are repeated while they take less than a
    second together, and the quickest counts.
    """

    runtime: RuntimeConfig
    dense: AttentionConfig
    requests: Mapping[tuple[str, int | None], GenerationRequest]
    preset: str | None
    metrics: ClipMetrics
    journal: Journal
    limit: TimeLimit = field(default_factory=TimeLimit)
    num_made: int = 0
    _timed: list[float] = field(default_factory=list)
    _warm: set[str] = field(default_factory=set)
    _running: str = ""
    _loaded: tuple[RuntimeConfig, Pipeline] | None = None
    _references: dict[tuple[str, int | None], ReferenceClip] = field(default_factory=dict)

    def trial(self, combination: Combination, prompts: Sequence[TunedPrompt], done: Callable[[], None]) -> Trial:
        """Measure what is not measured yet. Raises what loading and generating raise, TimeIsOverError, and
        DiffusionRuntimeError for a setting that an earlier run found to hang."""
        rows = []
        for prompt in prompts:
            self._running = self._name(combination, prompt)
            rows.append(self.journal.value(self._running, partial(self._row, combination, prompt)))
            if "failed" in rows[-1]:
                raise DiffusionRuntimeError(rows[-1]["failed"])
            done()
        names = rows[0]["values"]
        values = {name: statistics.fmean(row["values"][name] for row in rows) for name in names}
        right = tuple(bool(row["values"]["accuracy"]) for row in rows) if "accuracy" in names else ()
        quickest = min(rows, key=lambda row: sum(row["seconds"].values()))
        return Trial(values, right, quickest["seconds"], rows[0]["num_steps"])

    def warm_up(self, prompt: TunedPrompt) -> None:
        """Make a clip as given that counts for nothing."""
        given = Combination()
        pipeline = self.pipeline(given)
        self._made(pipeline, given, self.resolved(given, _key(prompt), pipeline.resolve))
        self._warm.add(_warm_name(given))

    def keep_hang(self, reason: str) -> None:
        """Keep in the journal that the clip under way hangs, and why it is left out from now on."""
        self.journal.keep(self._running, {"failed": reason})

    def is_measured(self, combination: Combination, prompts: Sequence[TunedPrompt]) -> bool:
        return all(self.journal.has(self._name(combination, prompt)) for prompt in prompts)

    def pipeline(self, combination: Combination) -> Pipeline:
        """Return the pipeline that a combination runs on; one is loaded at a time."""
        runtime = combination.runtime(self.runtime)
        if self._loaded is not None and self._loaded[0] == runtime:
            return self._loaded[1]
        self.close()
        self._warm.clear()
        prepared = prepare(runtime)
        loaded = prepared.load(None, [self.resolved(combination, key, prepared.rules.resolve) for key in self.requests])
        assert isinstance(loaded, Pipeline)
        self._loaded = (runtime, loaded)
        return loaded

    def resolved(self, combination: Combination, key: tuple[str, int | None], resolve: Any) -> GenerationRequest:
        """resolve: of the model's rules."""
        return resolve(combination.request(self.requests[key]), self.preset)  # type: ignore[no-any-return]

    def refusal_of(self, combination: Combination, num_steps: int) -> DiffusionRuntimeError | None:
        """Return why a combination cannot run here, before any weight is read; None where it can. num_steps: that were
        given."""
        choices = combination.attention(self.dense, num_steps)
        try:
            prepared = prepare(dataclasses.replace(combination.runtime(self.runtime), attention_override=choices))
            self.resolved(combination, next(iter(self.requests)), prepared.rules.resolve)
        except DiffusionRuntimeError as error:
            return error
        return None

    @property
    def seconds_per_clip(self) -> float | None:
        """Return the seconds that a clip takes by the clock on the wall, without those that compiled; None where none
        was made."""
        return statistics.fmean(self._timed) if self._timed else None

    def close(self) -> None:
        if self._loaded is not None:
            self._loaded[1].close()
            self._loaded = None

    def _row(self, combination: Combination, prompt: TunedPrompt) -> dict[str, Any]:
        key = _key(prompt)
        reference = None
        if combination.choices:
            # First, as it may be loaded otherwise.
            reference = self._reference(prompt)
        pipeline = self.pipeline(combination)
        request = self.resolved(combination, key, pipeline.resolve)
        latents, media, seconds = self._quickest(pipeline, combination, request)
        if reference is None:
            reference = self._kept(key, latents, media)
        assert request.num_inference_steps is not None
        return {
            "values": self.metrics.of(latents, media.frames, reference, prompt),
            "seconds": seconds,
            "num_steps": request.num_inference_steps,
        }

    def _quickest(
        self, pipeline: InspectablePipeline, combination: Combination, request: GenerationRequest
    ) -> tuple[torch.Tensor, GeneratedMedia, dict[str, float]]:
        """Return `_made` of a clip; on a GPU, of the quickest of up to _MOST_REPEATS, after one that warms up."""
        name, is_cpu = _warm_name(combination), pipeline.device.type == "cpu"
        if not is_cpu and name not in self._warm:
            self._made(pipeline, combination, request)
        self._warm.add(name)
        best, total, count = None, 0.0, 0
        while best is None or (not is_cpu and count < _MOST_REPEATS and total < _REPEATED_SECONDS):
            started = time.perf_counter()
            made = self._made(pipeline, combination, request)
            total, count = total + time.perf_counter() - started, count + 1
            if best is None or sum(made[2].values()) < sum(best[2].values()):
                best = made
        self._timed.append(total)
        return best

    def _made(
        self, pipeline: InspectablePipeline, combination: Combination, request: GenerationRequest
    ) -> tuple[torch.Tensor, GeneratedMedia, dict[str, float]]:
        """Final latents on the CPU, the clip, and its seconds by stage: on a CPU those of the processor, which do not
        count what else the machine does."""
        last: list[torch.Tensor] = []

        def watch(step: StepInfo, latents: torch.Tensor) -> None:
            if step.index == step.num_steps - 1:
                last[:] = [latents.detach().float().cpu().clone()]

        choices = combination.attention(self.dense, request.num_inference_steps or 1)
        with attention_choices(pipeline, choices), watched_latents(pipeline, watch):
            self.limit.sign()
            begin = time.process_time()
            media = pipeline(request, on_progress=self.limit.sign)
            processor = time.process_time() - begin
        self.num_made += 1
        seconds = {stage: float(media.timings.get(stage, 0.0)) for stage in STAGES}
        total = sum(seconds.values())
        scale = processor / total if pipeline.device.type == "cpu" and total > 0 else 1.0
        return last[0], media, {stage: scale * value for stage, value in seconds.items()}

    def _reference(self, prompt: TunedPrompt) -> ReferenceClip:
        """The clip as given; made again where the journal has its figures and nobody its latents."""
        key = _key(prompt)
        if key not in self._references:
            given = Combination()
            pipeline = self.pipeline(given)
            self._kept(key, *self._made(pipeline, given, self.resolved(given, key, pipeline.resolve))[:2])
        return self._references[key]

    def _kept(self, key: tuple[str, int | None], latents: torch.Tensor, media: GeneratedMedia) -> ReferenceClip:
        kept = ReferenceClip(latents, media.frames if self.metrics.compare_frames else None)
        self._references[key] = kept
        return kept

    def _name(self, combination: Combination, prompt: TunedPrompt) -> str:
        """Return the name of a row in the journal: all that a combination sets."""
        row = ["trial", sorted(self.metrics.metrics), _effects(combination), *_key(prompt)]
        return json.dumps(row, sort_keys=True, default=str)


def _warm_name(combination: Combination) -> str:
    return json.dumps(_effects(combination), sort_keys=True, default=str)


def _effects(combination: Combination) -> list[dict[str, Any]]:
    """Return all that a combination sets."""
    return [
        {
            "runtime": dict(choice.runtime),
            "request": dict(choice.request),
            "backend": choice.backend,
            "cells": [(str(cell), spec.to_dict()) for cell, spec in choice.cells if spec is not None],
            "made_for": choice.num_steps,
        }
        for _, choice in combination.choices
    ]


def _key(prompt: TunedPrompt) -> tuple[str, int | None]:
    return prompt.request.prompt, prompt.request.seed
