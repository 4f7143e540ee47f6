"""Prompt accuracy of the `emoji` model: the share of seeded prompts whose clip the judge finds right."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from diffusion_runtime.quality.emoji.detector import Detector
from diffusion_runtime.quality.emoji.judge import Verdict, judge, read_clips
from diffusion_runtime.quality.emoji.prompts import EvaluationPrompt
from diffusion_runtime.quality.shapes.scoring import Proportion, wilson

PARTS = ("count", "thing", "motion", "scene", "time", "size", "place", "joint", "everything")
"""Of a verdict; `joint` is the first four together."""
Generate = Callable[[Sequence[str], Sequence[int]], Tensor]
"""(prompts, seeds) -> frames, uint8 [batch, frames, height, width, 3]."""


def summarise(verdicts: Sequence[Verdict]) -> dict[str, Proportion]:
    """Accuracy over verdicts, by part."""
    return {part: wilson(sum(bool(getattr(each, part)) for each in verdicts), len(verdicts)) for part in PARTS}


def evaluate(
    generate: Generate, prompts: Sequence[EvaluationPrompt], detector: Detector, *, batch_size: int = 32
) -> list[Verdict]:
    """Generate every prompt with its own seed and judge the clips; verdicts are in the order of the prompts."""
    verdicts: list[Verdict] = []
    for first in range(0, len(prompts), batch_size):
        batch = prompts[first : first + batch_size]
        frames = generate([prompt.text for prompt in batch], [prompt.seed for prompt in batch])
        readings = read_clips(detector, frames)
        verdicts += [judge(prompt.attributes, seen) for prompt, seen in zip(batch, readings, strict=True)]
    return verdicts
