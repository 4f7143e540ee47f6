"""Prompt accuracy: the share of seeded prompts whose clip the checker finds right, with its 95 % interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from diffusion_runtime.quality.shapes.attributes import SceneAttributes
from diffusion_runtime.quality.shapes.checker import Verdict, check_clip
from diffusion_runtime.quality.shapes.prompts import EvaluationPrompt

ATTRIBUTES = ("count", "colour", "shape", "motion", "background")
"""Parts of a verdict; all of them together are `joint`."""
Generate = Callable[[Sequence[str], Sequence[int]], Tensor]
"""(prompts, seeds) -> frames, uint8 [batch, frames, height, width, 3]."""
CheckClips = Callable[[Sequence[SceneAttributes], Tensor], list[Verdict]]
"""(each prompt's attributes, frames) -> one verdict per clip."""


@dataclass(frozen=True)
class Proportion:
    """A count of successes with the 95 % Wilson score interval of its rate."""

    right: int
    total: int
    rate: float
    low: float
    high: float


def wilson(right: int, total: int) -> Proportion:
    """Wilson, "Probable inference, the law of succession, and statistical inference" (1927), at z = 1.96."""
    if not 0 <= right <= total or total == 0:
        raise ValueError(f"right must be between 0 and total, and total above 0; got {right} of {total}")
    z, rate = 1.959964, right / total
    scale = 1 + z * z / total
    centre = (rate + z * z / (2 * total)) / scale
    half = z * math.sqrt(rate * (1 - rate) / total + z * z / (4 * total * total)) / scale
    low = 0.0 if right == 0 else centre - half
    high = 1.0 if right == total else centre + half
    return Proportion(right, total, rate, low, high)


@dataclass(frozen=True)
class Accuracy:
    """Prompt accuracy per attribute and joint."""

    count: Proportion
    colour: Proportion
    shape: Proportion
    motion: Proportion
    background: Proportion
    joint: Proportion

    def to_dict(self) -> dict[str, dict[str, float]]:
        """Plain numbers for JSON."""
        return asdict(self)


def summarise(verdicts: Sequence[Verdict]) -> Accuracy:
    """Accuracy over verdicts."""

    def part(name: str) -> Proportion:
        return wilson(sum(bool(getattr(verdict, name)) for verdict in verdicts), len(verdicts))

    return Accuracy(part("count"), part("colour"), part("shape"), part("motion"), part("background"), part("joint"))


def check_in_order(attributes: Sequence[SceneAttributes], clips: Tensor) -> list[Verdict]:
    """Check clips one after the other in this process."""
    return [check_clip(wanted, clip) for wanted, clip in zip(attributes, clips, strict=True)]


def evaluate(
    generate: Generate,
    prompts: Sequence[EvaluationPrompt],
    *,
    batch_size: int = 32,
    check: CheckClips = check_in_order,
) -> tuple[Accuracy, list[Verdict]]:
    """Generate every prompt with its own seed and check the clips; verdicts are in the order of the prompts.

    `check` may spread the clips over processes; one clip of 29 frames takes about 0.1 s of one CPU core.
    """
    verdicts: list[Verdict] = []
    for first in range(0, len(prompts), batch_size):
        batch = prompts[first : first + batch_size]
        frames = generate([prompt.text for prompt in batch], [prompt.seed for prompt in batch])
        if frames.dtype != torch.uint8 or frames.ndim != 5 or frames.shape[0] != len(batch):
            raise ValueError(
                f"generate must return uint8 [batch, frames, height, width, 3] for {len(batch)} prompts; "
                f"got {frames.dtype} {tuple(frames.shape)}"
            )
        verdicts += check([prompt.attributes for prompt in batch], frames)
    return summarise(verdicts), verdicts
