"""Combination of choices of several axes: what it sets, what it is expected to take and to lose."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diffusion_runtime.attention.config import AttentionConfig, AttentionSpec
from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.tuning.axes import CellSpecs, Choice
from diffusion_runtime.tuning.cells import schedule_rules

# The role that sparse methods and other kernels are chosen for; the others have few keys.
ROLE = "self"
STAGES = ("text", "denoise", "decode")
AS_GIVEN = "as given"


@dataclass(frozen=True)
class Combination:
    """choices: by axis, in the order of AXES; empty for the setting that was given."""

    choices: tuple[tuple[str, Choice], ...] = ()

    def __str__(self) -> str:
        return " + ".join(choice.name for _, choice in self.choices) or AS_GIVEN

    def runtime(self, given: RuntimeConfig) -> RuntimeConfig:
        """Return the config with what is set at load, but attention."""
        return dataclasses.replace(given, **self._fields("runtime"))

    def request(self, given: GenerationRequest) -> GenerationRequest:
        """given: not resolved."""
        return dataclasses.replace(given, **self._fields("request"))

    def attention(self, dense: AttentionConfig, num_steps: int) -> AttentionConfig:
        """Return the choices of self-attention over those that were given, for so many steps."""
        per_role = dict(dense.per_role)
        rules: list[Mapping[str, Any]] = []
        for _, choice in self.choices:
            if choice.backend is not None:
                per_role[ROLE] = AttentionSpec(choice.backend)
            rules += schedule_rules(stretched(choice.cells, choice.num_steps, num_steps))
        return AttentionConfig(dense.default, per_role, (*rules, *dense.schedule))  # type: ignore[arg-type]

    def _fields(self, kind: str) -> dict[str, Any]:
        return {name: value for _, choice in self.choices for name, value in getattr(choice, kind).items()}


def stretched(cells: CellSpecs, made_for: int, num_steps: int) -> CellSpecs:
    """Return cells with the same shares of other steps; those that get none are left out."""
    if made_for == num_steps or not cells:
        return cells

    def place(step: int) -> int:
        return round(step * num_steps / made_for)

    moved = [
        (dataclasses.replace(cell, steps=range(place(cell.steps.start), place(cell.steps.stop))), spec)
        for cell, spec in cells
    ]
    return tuple((cell, spec) for cell, spec in moved if len(cell.steps))


@dataclass(frozen=True)
class Trial:
    """The figures of a combination's clips. values: means by metric (budget.METRICS); right: by prompt, where accuracy
    was measured. seconds: by stage, of the quickest clip, as others on the machine only slow it down; num_steps: of
    each clip."""

    values: Mapping[str, float]
    right: tuple[bool, ...]
    seconds: Mapping[str, float]
    num_steps: int

    @property
    def total(self) -> float:
        """Seconds of a clip."""
        return sum(self.seconds.values())

    @property
    def loss(self) -> float:
        """Squared relative L2 distance of the final latents."""
        return self.values.get("latent", 0.0) ** 2

    def to_dict(self) -> dict[str, Any]:
        return {
            **{name: round(value, 5) for name, value in self.values.items()},
            **({"right": sum(self.right), "prompts": len(self.right)} if self.right else {}),
            "seconds": {name: round(value, 4) for name, value in self.seconds.items()},
            "seconds_total": round(self.total, 4),
            "num_inference_steps": self.num_steps,
        }


@dataclass(frozen=True)
class Expectation:
    """A combination with its expected seconds and loss: shares of each stage multiply, and losses add up."""

    combination: Combination
    seconds: float
    loss: float


def expected(parts: Sequence[tuple[tuple[str, Choice], Trial]], reference: Trial) -> Expectation:
    """parts: choices, each measured alone."""
    seconds = 0.0
    for stage in STAGES:
        its = reference.seconds.get(stage, 0.0)
        share = 1.0
        for _, trial in parts:
            share *= trial.seconds.get(stage, 0.0) / its if its > 0 else 1.0
        seconds += its * share
    return Expectation(Combination(tuple(part for part, _ in parts)), seconds, sum(trial.loss for _, trial in parts))
