"""The result of a search for the fastest setting: the config that `generate --config` takes, and what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusion_runtime.attention.config import AttentionConfig
from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.errors import BUDGET_NOT_MET
from diffusion_runtime.media.publish import publish_text
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.tuning.axes import plain_steps
from diffusion_runtime.tuning.combination import AS_GIVEN, Trial
from diffusion_runtime.tuning.found import Found
from diffusion_runtime.tuning.result import written_options
from diffusion_runtime.untrusted.yaml_text import yaml_document

SCHEMA = "diffusion_runtime.tune_fastest/1"
# Of a request that is written, as a config holds no prompt.
_OF_A_PROMPT = ("prompt", "negative_prompt", "seed")


@dataclass(frozen=True)
class FastestResult:
    """runtime, request, attention: of the setting that the file holds; request: resolved. minutes: that were allowed;
    num_candidates: choices over all axes; num_made: clips that were made, kept ones left out."""

    found: Found
    runtime: RuntimeConfig
    request: GenerationRequest
    attention: AttentionConfig
    budgets: tuple[str, ...]
    axes: tuple[str, ...]
    measured_prompts: Sequence[tuple[str, int | None]]
    verified_prompts: Sequence[tuple[str, int | None]]
    identity: Mapping[str, Any]
    minutes: float
    num_candidates: int
    num_made: int
    seconds: float

    @property
    def exit_code(self) -> int:
        return 0 if self.found.is_met else BUDGET_NOT_MET

    @property
    def is_plain(self) -> bool:
        """Return whether the setting is the plain alternative itself: fewer steps and nothing else."""
        plain = self.found.plain
        return plain is not None and str(self.found.chosen) == plain_steps(plain.num_steps).name

    @property
    def speed_up(self) -> float:
        """The time as given over that of the setting."""
        return self.found.reference.total / self.found.verified.total

    def rows(self) -> list[tuple[str, Trial, str]]:
        """Return the settings on the prompts for verification: name, figures, what became of it."""
        rows = [(AS_GIVEN, self.found.reference, "-")]
        rows += [(str(combination), trial, "missed") for combination, trial in self.found.missed]
        if self.found.is_met:
            rows.append((str(self.found.chosen), self.found.verified, "met"))
        if self.found.plain is not None and not self.is_plain:
            state = "met" if self.found.is_plain_met else "missed"
            rows.append((f"plain, {self.found.plain.num_steps} steps", self.found.plain, state))
        return rows

    def record(self) -> dict[str, Any]:
        """Return what was measured, on what, with which versions."""
        found = self.found

        def prompts(pairs: Sequence[tuple[str, int | None]]) -> list[dict[str, Any]]:
            return [{"prompt": prompt, "seed": seed} for prompt, seed in pairs]

        return {
            "budget": list(self.budgets),
            "budget_met": found.is_met,
            "setting": str(found.chosen),
            "speed_up": round(self.speed_up, 3),
            "over": list(self.axes),
            "minutes": self.minutes,
            "candidates": self.num_candidates,
            "ended_by": found.ended_by or None,
            "remarks": list(found.remarks),
            **{name: self.identity[name] for name in ("model", "config_sha256", "device", "dtype", "versions")},
            "verified": {
                "as_given": found.reference.to_dict(),
                "setting": found.verified.to_dict(),
                "plain_steps": None
                if found.plain is None
                else {"budget_met": found.is_plain_met, **found.plain.to_dict()},
                "missed": [{"setting": str(each), **trial.to_dict()} for each, trial in found.missed],
            },
            "measured": {
                "as_given": found.measured_reference.to_dict(),
                "alone": [
                    {"axis": axis, "choice": choice.name, **trial.to_dict()} for axis, choice, trial in found.alone
                ],
                "combined": [
                    {"setting": str(each), "budget_met": is_met, **trial.to_dict()}
                    for each, trial, is_met in found.tried
                    if len(each.choices) > 1
                ],
            },
            "left_out": [{"name": each.name, "reason": each.reason} for each in found.left_out],
            "measured_prompts": prompts(self.measured_prompts),
            "verified_prompts": prompts(self.verified_prompts),
            "clips_made": self.num_made,
            "seconds": round(self.seconds, 1),
        }

    def config(self) -> dict[str, Any]:
        """`runtime` and `request` as `generate --config` takes them, and `tuning`, the record."""
        request = {
            key: value for key, value in self.request.to_dict().items() if value is not None and key not in _OF_A_PROMPT
        }
        attention = self.attention.to_dict()
        return {
            "runtime": {
                "model_path": self.runtime.model_path,
                **written_options(self.runtime),
                **({"attention": attention} if attention else {}),
            },
            "request": request,
            "tuning": self.record(),
        }

    def to_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **self.config(), "exit_code": self.exit_code}

    def write(self, path: Path, first_line: str = "") -> None:
        """The whole file or none, over one that is there. first_line: a comment before all others. Raises
        OutputError."""
        what = f"{self.speed_up:.2f}x as fast as given, within" if self.found.is_met else "nothing faster is within"
        head = (
            f"# {self.found.chosen}: {what} the budget {' '.join(self.budgets)} on {len(self.verified_prompts)} "
            "prompts that were not measured.\n# `tuning` says what was measured and is not read by generate.\n"
        )
        publish_text(path, first_line + head + yaml_document(self.config()), "--output-path")
