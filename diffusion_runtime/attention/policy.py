"""The attention choices a model is built with, and the decisions they lead to."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from diffusion_runtime.attention.backends.capability import AttentionRequirements
from diffusion_runtime.attention.backends.requirements import dtype_name
from diffusion_runtime.attention.config import AttentionConfig
from diffusion_runtime.attention.force import ForcedChoice, current_force
from diffusion_runtime.attention.roles import role_category
from diffusion_runtime.attention.schedule import IndexRanges, Window
from diffusion_runtime.attention.select import ENVIRONMENT_VARIABLE, Decision, Levels, select
from diffusion_runtime.core.hardware import Hardware, detect_hardware, resolve_device
from diffusion_runtime.core.step_info import PHASES, LayerInfo, StepInfo
from diffusion_runtime.errors import ConfigError, shown
from diffusion_runtime.parallel.groups import ProcessMesh

_logger = logging.getLogger("diffusion_runtime.attention")

# Indexes of the schedule rules of cli and of config that hold at some moment.
HeldRules = tuple[tuple[int, ...], tuple[int, ...]]


class DecisionLog:
    """Logs lines, each once. is_silent: whether it logs none."""

    def __init__(self, *, is_silent: bool = False) -> None:
        self._lines: set[str] = set()
        self._is_silent = is_silent

    def add(self, line: str) -> None:
        if line not in self._lines and not self._is_silent:
            self._lines.add(line)
            _logger.info(line)


@dataclass(frozen=True)
class AttentionPolicy:
    """The choices of the command line and the config for one model on one device.

    cli, config: the two levels' choices. device, dtype: where and in what the model will run, known
    before any weight is there. environment: the value of DIFFUSION_ATTENTION_BACKEND when the policy was made.
    forced: the choices that were forced when it was made; layers built with it keep them.
    mesh: the processes that run the model together; what a model is given to cut its tokens with is mesh.sharding.
    self_check: whether a backend whose numbers a self-check found wrong is refused.
    num_head_groups: groups of heads in which Ulysses computes a call, sending one while it computes the one before;
    1 sends all heads before it computes.
    planned_on: the hardware that `device` stands for where it is not this machine's, of a dry run; None for this one's.
    decision_log: which of its decisions were logged.
    no_grid: as in AttentionRequirements, for a model of which it is not known where its tokens sit.
    has_phases: whether the model commits keys and values to a cache: of a video's chunks, or of a prefix.
    """

    cli: AttentionConfig = field(default_factory=AttentionConfig)
    config: AttentionConfig = field(default_factory=AttentionConfig)
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    environment: str | None = field(default_factory=lambda: os.environ.get(ENVIRONMENT_VARIABLE))
    forced: tuple[ForcedChoice, ...] = field(default_factory=current_force)
    mesh: ProcessMesh = field(default_factory=ProcessMesh)
    num_head_groups: int = 1
    no_grid: str = ""
    has_phases: bool = False
    self_check: bool = True
    planned_on: Hardware | None = None
    decision_log: DecisionLog = field(default_factory=DecisionLog, compare=False, repr=False)

    @classmethod
    def of_shapes(cls) -> AttentionPolicy:
        """Return the policy of a model that is built for the names and shapes of its weights alone: the platform's
        default, whatever the environment chooses, and nothing is logged."""
        return cls(environment=None, forced=(), decision_log=DecisionLog(is_silent=True))

    def requirements(
        self, layer: LayerInfo, *, head_dim: int, num_heads: int, num_kv_heads: int
    ) -> AttentionRequirements:
        """Return what is known of a layer before it is called."""
        return AttentionRequirements(
            role=layer.role,
            category=role_category(layer.role),
            head_dim=head_dim,
            dtype=dtype_name(self.dtype),
            hardware=self.hardware,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            no_grid=self.no_grid,
            unchecked=not self.self_check,
        )

    @property
    def hardware(self) -> Hardware:
        return detect_hardware(self.device) if self.planned_on is None else self.planned_on

    @property
    def torch_device(self) -> torch.device:
        """The device that calls will come from. Raises ConfigError where it is to be here and is not."""
        return resolve_device(self.device) if self.planned_on is None else torch.device(self.device)

    def hardware_of(self, device: torch.device) -> Hardware:
        """Return the hardware behind the device of a call."""
        return detect_hardware(str(device)) if self.planned_on is None else self.planned_on

    def rules_now(self, layer: LayerInfo, step: StepInfo) -> HeldRules:
        """The schedule rules that hold for this layer at this step."""
        if not self.cli.schedule and not self.config.schedule:
            return (), ()
        held = [
            tuple(index for index, rule in enumerate(level.schedule) if rule.window.holds(layer, step))
            for level in (self.cli, self.config)
        ]
        return held[0], held[1]

    def held_rules(self, layer: LayerInfo, num_steps: int | None = None) -> tuple[HeldRules, ...]:
        """Return every result that `rules_now` can have for this layer: at the steps of a request, or of any request
        for None.

        Options may be spread over rules and levels, so a rule is judged together with those that hold at the same time.
        """
        cli, config = (
            tuple((index, rule.window) for index, rule in enumerate(schedule) if rule.window.holds_in_layer(layer))
            for schedule in (self.cli.schedule, self.config.schedule)
        )
        every = PHASES if self.has_phases else PHASES[:1]
        return _combinations(cli, config, num_steps, every if layer.phase is None else (layer.phase,))

    def held_in_commits(self, layer: LayerInfo) -> tuple[HeldRules, ...]:
        """Return every result that `rules_now` can have for this layer in commits; empty for a model or layer without
        them."""
        if not self.has_phases or layer.phase not in (None, "commit"):
            return ()
        windows = [rule.window for level in (self.cli, self.config) for rule in level.schedule]
        commits = [StepInfo(chunk=chunk, phase="commit") for chunk in representative_chunks(windows)]
        return tuple(dict.fromkeys(self.rules_now(layer, step) for step in commits))

    def chunk_rules(self, step: StepInfo) -> tuple[bool, ...]:
        """Return, for each rule that names chunks, whether it holds in that of the step."""
        windows = [rule.window for level in (self.cli, self.config) for rule in level.schedule]
        return tuple(window.chunks.contains(step.chunk, 0) for window in windows if not window.chunks.is_every)

    def check_rules(self, layers: Iterable[LayerInfo]) -> None:
        """Raises ConfigError for a schedule rule that holds in none of a model's layers."""
        known = tuple(layers)
        for level in (self.cli, self.config):
            for index, rule in enumerate(level.schedule):
                of_role = [layer for layer in known if rule.role in (None, layer.role, role_category(layer.role))]
                phases = {layer.phase for layer in of_role}
                if of_role and not any(rule.window.holds_in_phase_of(layer) for layer in of_role):
                    raise ConfigError(
                        f"schedule[{index}] ({rule.window}): the layers of role {shown(rule.role)} run in "
                        f"{' and '.join(sorted(str(phase) for phase in phases))} passes alone; leave out the role, or "
                        "name their phase, without steps for commits"
                    )
                if of_role and not any(rule.window.holds_in_layer(layer) for layer in of_role):
                    count = max(layer.num_layers for layer in of_role)
                    raise ConfigError(
                        f"schedule[{index}].layers: expected layers from 0 to {count - 1}, which this model has, got "
                        f"{str(rule.window.layers)[:80]}"
                    )

    def levels(
        self,
        rules: HeldRules = ((), ()),
        forced_now: tuple[ForcedChoice, ...] = (),
    ) -> Levels:
        """Everything selection reads. forced_now: choices forced at the call; they come first."""
        forced = (*self.forced, *forced_now)
        return Levels(forced, self.cli, self.config, self.environment, cli_rules=rules[0], config_rules=rules[1])

    def possible_decisions(
        self, requirements: AttentionRequirements, layer: LayerInfo
    ) -> Iterator[tuple[str, Decision]]:
        """(when, decision) without a schedule rule and with each rule that can hold in this layer.

        Raises BackendUnavailableError or ConfigError for any that could not run, so that a choice for step 40 fails
        before the weights load and not at step 40.
        """
        yield "always", select(requirements, self.levels())
        for position, level in enumerate((self.cli, self.config)):
            for index, rule in enumerate(level.schedule):
                if rule.window.holds_in_layer(layer) and rule.applies_to(layer.role):
                    rules = ((index,), ()) if position == 0 else ((), (index,))
                    yield str(rule.window), select(requirements, self.levels(rules))

    def announce(self, decision: Decision, role: str) -> None:
        """Log a decision, once per policy."""
        self.decision_log.add(decision.log_line(role, self.hardware))


@functools.lru_cache(maxsize=256)
def _combinations(
    cli: tuple[tuple[int, Window], ...],
    config: tuple[tuple[int, Window], ...],
    num_steps: int | None,
    phases: tuple[str, ...],
) -> tuple[HeldRules, ...]:
    """The rules that can hold together. cli, config: index and window of each level's rules. phases: of the layer."""

    def held(rules: tuple[tuple[int, Window], ...], step: StepInfo) -> tuple[int, ...]:
        return tuple(index for index, window in rules if window.holds_at(step))

    windows = [window for _, window in (*cli, *config)]
    chunks = list(representative_chunks(windows))
    steps = [
        dataclasses.replace(step, chunk=chunk)
        for step in representative_steps([window.steps for window in windows], num_steps)
        for chunk in chunks
    ]
    if "denoise" not in phases:
        steps = []
    if "commit" in phases:
        # No rule by steps holds in a commit, so one step represents all.
        steps += [StepInfo(chunk=chunk, phase="commit") for chunk in chunks]
    return tuple(dict.fromkeys((held(cli, step), held(config, step)) for step in steps))


def representative_chunks(windows: Sequence[Window]) -> list[int]:
    """Chunks at which every combination of `windows` that can hold together does hold: the first one, and those where
    a range begins or has just ended."""
    pairs = [pair for window in windows for pair in window.chunks.ranges]
    return sorted({0} | {first for first, _ in pairs} | {last + 1 for _, last in pairs})


def representative_steps(windows: Sequence[IndexRanges], num_steps: int | None) -> Iterator[StepInfo]:
    """Steps at which every combination of `windows` that can hold together does hold.

    num_steps: of the request; None: of any, represented by a few step counts: which ranges overlap changes only where
    the count passes a number that is counted from the start, one that is counted from the end, or a sum of the two.
    """
    bounds = {bound for window in windows for pair in window.ranges for bound in pair}
    counts = [num_steps] if num_steps is not None else _representative_counts(bounds)
    for count in counts:
        edges = {bound + count if bound < 0 else bound for bound in bounds}
        # Between two edges nothing changes, so the edges and their neighbours decide everything.
        steps = {0} | {edge + shift for edge in edges for shift in (-1, 0, 1)}
        yield from (StepInfo(index=step, num_steps=count) for step in sorted(steps) if 0 <= step < count)


def _representative_counts(bounds: Collection[int]) -> list[int]:
    from_start = {0} | {bound for bound in bounds if bound >= 0}
    from_end = {0} | {-bound for bound in bounds if bound < 0}
    sums = {first + last for first in from_start for last in from_end}
    return sorted({total + shift for total in sums for shift in range(-2, 4) if total + shift >= 1})
