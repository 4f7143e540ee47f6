"""The result of a tuning: what was measured, on what, and the config file that `generate --config` takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusion_runtime.attention.config import AttentionConfig
from diffusion_runtime.config import RuntimeConfig, runtime_options
from diffusion_runtime.core.token_layout import Extent
from diffusion_runtime.errors import BUDGET_NOT_MET
from diffusion_runtime.media.publish import publish_text
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.tuning.measurement import Figures
from diffusion_runtime.tuning.search import Outcome
from diffusion_runtime.tuning.sensitivity import Sensitivity
from diffusion_runtime.untrusted.yaml_text import yaml_document

SCHEMA = "diffusion_runtime.tune/1"
TUNED = "tuned"


def written_options(runtime: RuntimeConfig) -> dict[str, Any]:
    """Return the options of a tuned config that are not the default's."""
    defaults = RuntimeConfig()
    return {
        name: _plain(getattr(runtime, name))
        for name, option in runtime_options().items()
        if option.written_by_tune and getattr(runtime, name) != getattr(defaults, name)
    }


@dataclass(frozen=True)
class TuneResult:
    """uniform: by method, the sparsest one choice for all layers and steps under the same budget. chosen: the name (see
    by_name) of the setting that the file holds. fewer_steps: dense attention with as many steps as take that setting's
    time here, None where that is all of them. num_frontier: settings that none beats in both pairs and predicted loss.
    config_sha256: of the model folder's config files."""

    budgets: tuple[str, ...]
    methods: tuple[str, ...]
    runtime: RuntimeConfig
    request: GenerationRequest
    dense: AttentionConfig
    grid: Extent
    measured_prompts: Sequence[tuple[str, int | None]]
    verified_prompts: Sequence[tuple[str, int | None]]
    cells: tuple[int, int, int]
    sensitivities: Sequence[Sensitivity]
    num_frontier: int
    dense_measured: Figures
    dense_verified: Figures
    tuned: Outcome
    uniform: Mapping[str, Outcome]
    chosen: str
    fewer_steps: Figures | None
    versions: Mapping[str, str]
    device: str
    dtype: str
    config_sha256: str
    seconds: float

    def __repr__(self) -> str:
        """One line: every measurement is in `record()`."""
        state = "within" if self.setting.is_met else "not within"
        return f"<TuneResult: {self.chosen}, {self.setting.point.kept:.3f} kept, {state} {' '.join(self.budgets)}>"

    @property
    def setting(self) -> Outcome:
        """Return the setting that the file holds: the sparsest one within the budget, tuned or uniform; else the
        nearest."""
        return by_name(self.tuned, self.uniform)[self.chosen]

    @property
    def best_uniform(self) -> tuple[str, Outcome] | None:
        """Method and outcome of the sparsest uniform setting within the budget."""
        met = [(method, outcome) for method, outcome in self.uniform.items() if outcome.is_met]
        return min(met, key=lambda each: each[1].point.kept) if met else None

    @property
    def exit_code(self) -> int:
        return 0 if self.setting.is_met else BUDGET_NOT_MET

    @property
    def attention(self) -> dict[str, Any]:
        rules = AttentionConfig(self.dense.default, self.dense.per_role, tuple(self.setting.point.rules))  # type: ignore[arg-type]
        return rules.to_dict()

    def record(self) -> dict[str, Any]:
        """Return what was measured, on what, with which versions."""

        def prompts(pairs: Sequence[tuple[str, int | None]]) -> list[dict[str, Any]]:
            return [{"prompt": prompt, "seed": seed} for prompt, seed in pairs]

        best = self.best_uniform
        return {
            "budget": list(self.budgets),
            "budget_met": self.setting.is_met,
            "setting": self.chosen,
            "methods": list(self.methods),
            "model": self.runtime.model_path,
            "config_sha256": self.config_sha256,
            "device": self.device,
            "dtype": self.dtype,
            "versions": dict(self.versions),
            "grid": list(self.grid),
            "layer_ranges": self.cells[0],
            "step_ranges": self.cells[1],
            "head_ranges": self.cells[2],
            "frontier_settings": self.num_frontier,
            "tuned": self.tuned.to_dict(),
            "dense": {"measured": self.dense_measured.to_dict(), "verified": self.dense_verified.to_dict()},
            "uniform": {method: outcome.to_dict() for method, outcome in self.uniform.items()},
            "best_uniform": None if best is None else best[0],
            "fewer_dense_steps": None if self.fewer_steps is None else self.fewer_steps.to_dict(),
            "sensitivity": [each.to_dict() for each in self.sensitivities],
            "measured_prompts": prompts(self.measured_prompts),
            "verified_prompts": prompts(self.verified_prompts),
            "seconds": round(self.seconds, 1),
        }

    def config(self) -> dict[str, Any]:
        """`runtime` and `request` as `generate --config` takes them, and `tuning`, the record."""
        own = ("prompt", "negative_prompt", "seed")
        request = {key: value for key, value in self.request.to_dict().items() if value is not None and key not in own}
        return {
            "runtime": {
                "model_path": self.runtime.model_path,
                **written_options(self.runtime),
                "attention": self.attention,
            },
            "request": request,
            "tuning": self.record(),
        }

    def to_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **self.config(), "exit_code": self.exit_code}

    def write(self, path: Path, first_line: str = "") -> None:
        """The whole file or none, over one that is there. first_line: a comment before all others. Raises
        OutputError."""
        state = "within" if self.setting.is_met else "NOT within"
        name = ", ".join(self.methods) if self.chosen == TUNED else self.chosen
        head = (
            f"# {name}: {self.setting.point.kept:.3f} of self-attention's pairs, {state} the budget "
            f"{' '.join(self.budgets)} on {len(self.verified_prompts)} prompts that were not measured.\n"
            "# `tuning` says what was measured and is not read by generate.\n"
        )
        publish_text(path, first_line + head + yaml_document(self.config()), "--output-path")


def by_name(tuned: Outcome, uniform: Mapping[str, Outcome]) -> dict[str, Outcome]:
    """`tuned`, and `uniform METHOD` of each method."""
    return {TUNED: tuned, **{f"uniform {method}": outcome for method, outcome in uniform.items()}}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
