"""Plan of a tuning: what is known before the weights: the grid, cells, ladders, and what each choice would compute."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from diffusion_runtime.attention.config import AttentionConfig, AttentionSpec, ScheduleRule
from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.core.step_info import LayerInfo
from diffusion_runtime.core.token_layout import TokenLayout
from diffusion_runtime.errors import ConfigError, RequestError
from diffusion_runtime.explanation.explanation import Explanation, explain, inspected
from diffusion_runtime.loading import prepare
from diffusion_runtime.loading.interface import InspectableModel
from diffusion_runtime.pipeline import Pipeline
from diffusion_runtime.quality.worlds import Wanted
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.rules.combinations import check_combinations
from diffusion_runtime.rules.features import ChosenRuntime
from diffusion_runtime.session.reporter import Reporter
from diffusion_runtime.tuning.budget import Budget
from diffusion_runtime.tuning.cells import Cell, make_cells
from diffusion_runtime.tuning.ladders import density_of, ladder

# The role that sparse methods are made for, of every model family.
ROLE = "self"
# Levels of the uniform settings that a tuning is compared with: twice as fine as a cell's.
UNIFORM_LEVELS = 8


@dataclass(frozen=True)
class Tuning:
    """The input of a tuning. requests: not resolved, the first num_measured of them measure, the others verify;
    attributes: what a clip of each must show, None where unknown. methods: backends with a ladder; levels: of each.
    layer_ranges, step_ranges, head_ranges: the cells. clip_path: of a CLIP model."""

    runtime: RuntimeConfig
    requests: Sequence[GenerationRequest]
    attributes: Sequence[Wanted | None]
    num_measured: int
    budgets: Sequence[Budget]
    methods: Sequence[str]
    preset: str | None = None
    layer_ranges: int = 3
    step_ranges: int = 4
    levels: int = 4
    clip_path: str | None = None
    head_ranges: int = 1


@dataclass(frozen=True)
class Plan:
    """requests: resolved. dense: the choices that everything is laid over. ladders, uniform: by method, the choices of
    a cell, and those of all layers and steps together. num_layers: of ROLE."""

    prepared: InspectableModel
    explanation: Explanation
    requests: tuple[GenerationRequest, ...]
    dense: AttentionConfig
    cells: list[Cell]
    ladders: dict[str, list[AttentionSpec]]
    uniform: dict[str, list[AttentionSpec]]
    num_layers: int

    @classmethod
    def of(cls, tuning: Tuning) -> Plan:
        """Raises ConfigError, RequestError and BackendUnavailableError for what cannot be tuned; reads no weights."""
        runtime, dense = _dense_choices(tuning.runtime)
        prepared = prepare(runtime)
        requests = tuple(prepared.rules.resolve(request, tuning.preset) for request in tuning.requests)
        _check_request(requests[0])
        native = inspected(prepared)
        explanation = explain(native, requests[0])
        layers = [row for row in explanation.schedule if row.role == ROLE]
        if not layers:
            raise ConfigError(f"tune: this model has no attention of role {ROLE}")
        if any(share != 1.0 for row in layers for share in row.density):
            raise ConfigError(
                "tune: the attention config is sparse already; give the dense choices, tune makes the others"
            )
        grid = explanation.grid
        is_by_head = tuning.head_ranges > 1
        ladders = {method: ladder(method, grid, tuning.levels, is_by_head=is_by_head) for method in tuning.methods}
        uniform = {method: ladder(method, grid, UNIFORM_LEVELS) for method in tuning.methods}
        cells = make_cells(
            {ROLE: len(layers)},
            explanation.num_steps,
            tuning.layer_ranges,
            tuning.step_ranges,
            _num_heads(native),
            tuning.head_ranges,
        )
        plan = cls(native, explanation, requests, dense, cells, ladders, uniform, len(layers))
        specs = [spec for several in (*ladders.values(), *uniform.values()) for spec in several]
        if not any(plan.kept(spec, cells) < 1.0 for spec in specs):
            raise ConfigError(
                f"tune: a grid of {' x '.join(map(str, grid))} tokens is too small for any setting of "
                f"{', '.join(tuning.methods)} to leave anything out; tune at the size that you generate"
            )
        # Every choice is checked now, and what it needs of the weights is loaded.
        rules = tuple(ScheduleRule.parse({"role": ROLE, **spec.to_dict()}, "ladder") for spec in specs)
        every = AttentionConfig(dense.default, dense.per_role, rules)
        again = prepare(dataclasses.replace(runtime, attention_override=every))
        return dataclasses.replace(plan, prepared=inspected(again))

    def load(self, reporter: Reporter) -> Pipeline:
        reporter.say(f"loading {self.prepared.description.config.model_path}")
        return self.prepared.load(None, self.requests)

    def kept(self, spec: AttentionSpec, cells: Sequence[Cell]) -> float:
        """The share of the cells' pairs, text included, that a choice computes."""
        layout = TokenLayout(grid=self.explanation.grid, num_suffix_tokens=self.explanation.num_text_tokens)
        of_grid = (layout.num_grid_tokens / layout.num_tokens) ** 2
        shares = []
        for cell in cells:
            for index in cell.layers:
                layer = LayerInfo(index, self.num_layers, ROLE)
                density = density_of(spec, layout, layer, self.explanation.num_steps)
                shares += [1 - of_grid * (1 - (1.0 if density is None else density))] * len(cell.steps)
        return statistics.fmean(shares)


def _num_heads(prepared: InspectableModel) -> int:
    """Query heads of a layer of ROLE."""
    return next(layer.num_heads_total for layer in prepared.transformer.attention_layers() if layer.layer.role == ROLE)


def _dense_choices(runtime: RuntimeConfig) -> tuple[RuntimeConfig, AttentionConfig]:
    """The choices that are given, and the same RuntimeConfig with them on the command line's level alone."""
    check_combinations("tuning", ChosenRuntime(runtime))
    given = runtime.attention if runtime.attention_override is None else runtime.attention_override
    dense = AttentionConfig.parse(given)
    if dense.schedule:
        raise ConfigError("tune: the attention config has a schedule already, which is what tune makes; leave it out")
    return dataclasses.replace(runtime, attention=None, attention_override=dense, cuda_graphs="off"), dense


def _check_request(request: GenerationRequest) -> None:
    for name in ("step_cache", "cfg_gate", "progressive_resolution"):
        if getattr(request, name) is not None:
            raise RequestError(f"tune: {name}: what is reused or made smaller hides what attention does; leave it out")
