"""Measurement of a setting: distance of the final latents from dense attention's, and figures of whole clips.

A clip whose first steps are dense shares them with the dense clip, prediction by prediction, so they are replayed and
not computed again.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from diffusion_runtime.attention.config import AttentionConfig
from diffusion_runtime.comparison.latent_distance import relative_l2
from diffusion_runtime.core.progress import OnProgress, Progress
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.denoising.interface import Predict
from diffusion_runtime.generation.interface import InspectablePipeline
from diffusion_runtime.media import GeneratedMedia
from diffusion_runtime.profiling.instruments import attention_choices, watched_latents, wrapped_predictions
from diffusion_runtime.quality.clip_score import ClipScore
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.tuning.clip_metrics import ClipMetrics, ReferenceClip, TunedPrompt
from diffusion_runtime.tuning.journal import Journal

Rules = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Figures:
    """The figures of a setting's clips. values: means by metric (budget.METRICS); right: by prompt, where accuracy was
    measured. seconds: of denoising one clip, the median without the first; num_steps: of each clip."""

    values: dict[str, float]
    right: tuple[bool, ...]
    seconds: float
    num_steps: int

    def to_dict(self) -> dict[str, Any]:
        return {
            **{name: round(value, 5) for name, value in self.values.items()},
            **({"right": sum(self.right), "prompts": len(self.right)} if self.right else {}),
            "denoise_seconds": round(self.seconds, 3),
            "num_inference_steps": self.num_steps,
        }


@dataclass
class Measurement:
    """Clips of one loaded pipeline under attention rules on top of `dense`, the choices of a dense run.

    metrics: of budget.METRICS, that `figures` computes; clip_score: where `clip` is one of them. sign: called at every
    step; what it raises ends the clip.
    """

    pipeline: InspectablePipeline
    dense: AttentionConfig
    metrics: Sequence[str]
    journal: Journal
    clip_score: ClipScore | None = None
    sign: OnProgress | None = None
    _dense: dict[tuple[str, int | None], ReferenceClip] = field(default_factory=dict)
    # The predictions of one dense clip, by the step of each call: they are as large as its latents, times its steps.
    _recorded: tuple[GenerationRequest, list[tuple[int, torch.Tensor]]] | None = None

    def __post_init__(self) -> None:
        self._clip_metrics = ClipMetrics(self.metrics, self.clip_score)

    def distance(self, rules: Rules, prompt: TunedPrompt, first_step: int) -> float:
        """Relative L2 distance of the final latents from the dense clip's, with the steps before first_step dense."""

        def measure() -> float:
            predictions = self._predictions(prompt.request)
            latents = self._latents(rules, prompt.request, predictions, first_step)
            dense = self._dense_clip(prompt.request)
            found = relative_l2(latents, dense.latents)
            assert found is not None
            return found

        return float(self.journal.value(_name("distance", rules, prompt.request), measure))

    def figures(self, rules: Rules, prompts: Sequence[TunedPrompt]) -> Figures:
        """Return the mean figures of whole clips."""
        return _mean_figures([self.clip(rules, prompt) for prompt in prompts], prompts[0].request)

    def clip(self, rules: Rules, prompt: TunedPrompt) -> dict[str, Any]:
        """`values` by metric and the `seconds` of denoising of one clip."""
        name = _name("+".join(sorted(self.metrics)), rules, prompt.request)
        return dict(self.journal.value(name, lambda: self._clip(rules, prompt)))

    def fewer_steps(self, prompts: Sequence[TunedPrompt], shorter: Sequence[GenerationRequest]) -> Figures:
        """Figures of dense clips with fewer steps, beside those of the prompts. shorter: resolved, one per prompt."""
        return _mean_figures([self._shorter_clip(*each) for each in zip(prompts, shorter, strict=True)], shorter[0])

    def _shorter_clip(self, prompt: TunedPrompt, request: GenerationRequest) -> dict[str, Any]:
        name = _name(f"{'+'.join(sorted(self.metrics))} {request.num_inference_steps} steps", [], prompt.request)
        return dict(self.journal.value(name, lambda: self._clip([], prompt, request)))

    def _clip(self, rules: Rules, prompt: TunedPrompt, request: GenerationRequest | None = None) -> dict[str, Any]:
        made = _Made([])
        with attention_choices(self.pipeline, self._with(rules)), watched_latents(self.pipeline, made.watch):
            media = self._made(request or prompt.request, decoded=self._clip_metrics.need_frames, made=made)
        if not rules and request is None:
            self._keep(prompt.request, made, media)
        frames = None if media is None else media.frames
        values = self._clip_metrics.of(made.latents, frames, self._dense_clip(prompt.request), prompt)
        return {"values": values, "seconds": made.seconds}

    def _keep(self, request: GenerationRequest, made: _Made, media: GeneratedMedia | None) -> None:
        frames = media.frames if media is not None and self._clip_metrics.compare_frames else None
        self._dense[request.prompt, request.seed] = ReferenceClip(made.latents, frames)

    def _dense_clip(self, request: GenerationRequest) -> ReferenceClip:
        """Made again where the journal has its figures and nobody its latents."""
        key = request.prompt, request.seed
        if key not in self._dense:
            made = _Made([])
            with attention_choices(self.pipeline, self._with([])), watched_latents(self.pipeline, made.watch):
                media = self._made(request, decoded=self._clip_metrics.compare_frames, made=made)
            self._keep(request, made, media)
        return self._dense[key]

    def _predictions(self, request: GenerationRequest) -> list[tuple[int, torch.Tensor]]:
        """Return the predictions of the dense clip, in the order of the sampler's calls."""
        if self._recorded is not None and self._recorded[0] == request:
            return self._recorded[1]
        predictions: list[tuple[int, torch.Tensor]] = []

        def recorded(predict: Predict) -> Predict:
            def record(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
                found = predict(latents, step)
                predictions.append((step.index, found.clone()))
                return found

            return record

        made = _Made([])
        with (
            attention_choices(self.pipeline, self._with([])),
            watched_latents(self.pipeline, made.watch),
            wrapped_predictions(self.pipeline, recorded),
        ):
            media = self._made(request, decoded=self._clip_metrics.compare_frames, made=made)
        self._keep(request, made, media)
        self._recorded = (request, predictions)
        return predictions

    def _latents(
        self, rules: Rules, request: GenerationRequest, predictions: Sequence[tuple[int, torch.Tensor]], first_step: int
    ) -> torch.Tensor:
        """Final latents; the steps before first_step take the given predictions."""
        made = _Made([])

        def replayed(predict: Predict) -> Predict:
            left = iter(predictions)

            def replay(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
                index, prediction = next(left, (-1, latents))
                if step.index < first_step and index == step.index:
                    return prediction.clone()
                return predict(latents, step)

            return replay

        with (
            attention_choices(self.pipeline, self._with(rules)),
            watched_latents(self.pipeline, made.watch),
            wrapped_predictions(self.pipeline, replayed),
        ):
            self._made(request, decoded=False, made=made)
        return made.latents

    def _made(self, request: GenerationRequest, *, decoded: bool, made: _Made) -> GeneratedMedia | None:
        """Make a clip; None where it is not to be decoded."""

        def watch(progress: Progress) -> None:
            if self.sign is not None:
                self.sign(progress)
            if progress.stage == "denoise" and progress.step == progress.num_steps:
                made.seconds = progress.seconds

        if decoded:
            return self.pipeline(request, on_progress=watch)
        self.pipeline.latents(request, on_progress=watch)
        return None

    def _with(self, rules: Rules) -> AttentionConfig:
        return AttentionConfig(self.dense.default, self.dense.per_role, tuple(rules))  # type: ignore[arg-type]


@dataclass
class _Made:
    """The observations of a clip while it was made: latents after the last step, on the CPU, and seconds of
    denoising."""

    last: list[torch.Tensor]
    seconds: float = 0.0

    def watch(self, step: StepInfo, latents: torch.Tensor) -> None:
        if step.index == step.num_steps - 1:
            self.last[:] = [latents.detach().float().cpu().clone()]

    @property
    def latents(self) -> torch.Tensor:
        return self.last[0]


def _mean_figures(rows: Sequence[dict[str, Any]], request: GenerationRequest) -> Figures:
    """rows: of `clip`, by prompt; request: one of them."""
    values = {name: statistics.fmean(row["values"][name] for row in rows) for name in rows[0]["values"]}
    timed = [row["seconds"] for row in rows[1:]] or [rows[0]["seconds"]]
    right = tuple(bool(row["values"]["accuracy"]) for row in rows) if "accuracy" in values else ()
    assert request.num_inference_steps is not None
    return Figures(values, right, statistics.median(timed), request.num_inference_steps)


def _name(what: str, rules: Rules, request: GenerationRequest) -> str:
    return json.dumps([what, list(rules), request.prompt, request.seed], sort_keys=True, default=str)
