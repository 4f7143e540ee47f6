"""Modulation rows of a request: shift, scale and gate of every block for all its timesteps, computed at once.

What modulates a block follows from the timestep, the guidance scale and the pooled text, and all of them are known
before the first step. So the first forward pass computes the rows of every step, and the steps read theirs: the linear
layers that make them, 6.46 of FLUX.1's 23.80 GB in bfloat16, are read once a request and not at every step, and wait in
the machine's memory where blocks are streamed (memory/waiting_weights.py). Of a step that was not planned the rows are
computed in its own pass.

Shapes: N timesteps, B batch, D width, R rows of all modulations together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from diffusion_runtime.attention.context import AttentionContext, RequestCache
from diffusion_runtime.attention.fixed_state import NOT_COPIED
from diffusion_runtime.core.block_stack import RunBlock, Streams
from diffusion_runtime.core.memory_size import size_text
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.layers.modulation import ApartTokens, ModulatedBlock, Modulation
from diffusion_runtime.memory.waiting_weights import held_weights

_PLAN, _ROWS = "planned_times", "modulation_rows"
# Devices on which each timestep is a product of its own.
ROW_BY_ROW = ("cpu",)
# (timestep, that of the step after it): what of a step conditions a model.
Times: TypeAlias = tuple[float, float]
# (timestep [M], that of the step that follows [M], None if unknown) -> a model's conditioning, after its
# activation, [M, D]. M: a batch for each of one or more timesteps, one after the other.
Condition: TypeAlias = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]


@dataclass(frozen=True)
class PlannedTimes:
    """Distinct times of the steps of a request."""

    # A CUDA graph finds the row of a step in a tensor: it serves every schedule of as many.
    times: tuple[Times, ...] = field(metadata=NOT_COPIED)
    known: frozenset[Times] = field(metadata=NOT_COPIED)
    num_timesteps: int = field(metadata=NOT_COPIED)


@dataclass(frozen=True)
class _Table:
    """timesteps: [N], float32. rows: [N, R, B, D]; B is 1 where all samples have the same."""

    # The plan and what else the rows are computed from.
    sources: tuple[object, object] = field(metadata=NOT_COPIED)
    timesteps: torch.Tensor
    rows: torch.Tensor


def plan_steps(state: RequestCache, steps: Iterable[StepInfo]) -> None:
    """Say which steps a request will have, before the first of them. Steps without a timestep are not planned."""
    times = tuple(dict.fromkeys(each for each in map(_times_of, steps) if each is not None))
    state.request.put(_PLAN, PlannedTimes(times, frozenset(times), len({timestep for timestep, _ in times})))


def plan_key(context: AttentionContext, *, takes_next: bool) -> tuple[bool, float | None]:
    """Return whether the rows of a forward pass's step are among those computed at once, and the number that the pass
    reads of the step where they are not. takes_next: as of rows_of_step."""
    is_planned = _plan_of(context, takes_next=takes_next) is not None
    return is_planned, context.step.next_timestep if takes_next and not is_planned else None


def table_bytes(state: RequestCache) -> int:
    """Return the size of a request's rows in bytes."""
    return sum(found.rows.nbytes for found in state.find_all(_ROWS) if isinstance(found, _Table))


class ModulationRows:
    """The rows of one forward pass, [num_rows, B, D] of each modulation. made: those that are there; conditioning: what
    the others are computed from when they are asked for, [B, D]."""

    def __init__(self, made: dict[Modulation, torch.Tensor], conditioning: Callable[[], torch.Tensor]) -> None:
        self._made = made
        self._compute = conditioning
        self._conditioning: torch.Tensor | None = None

    def of(self, modulation: Modulation) -> torch.Tensor:
        if modulation not in self._made:
            if self._conditioning is None:
                self._conditioning = self._compute()
            with held_weights(modulation):
                self._made[modulation] = modulation.stacked(self._conditioning).contiguous()
        return self._made[modulation]


@dataclass(frozen=True)
class ApartRows:
    """ApartTokens of all blocks, with the rows of their timestep."""

    num_tokens: int
    rows: ModulationRows
    is_first: bool = False

    def of(self, block: ModulatedBlock) -> ApartTokens:
        """Return the rows of one block."""
        return ApartTokens(self.num_tokens, self.rows.of(block.modulation), self.is_first)


def rows_of_step(
    name: str,
    source: object,
    modulations: Sequence[Modulation],
    timestep: torch.Tensor,
    condition: Condition,
    context: AttentionContext,
    *,
    takes_next: bool = False,
) -> ModulationRows:
    """Return the rows of a forward pass. name: of the model, where a request has several. source: the object that they
    are computed from in addition to the time, such as a pooled text; None where all samples and branches have the same.
    timestep: [B], all alike. takes_next: whether the model reads the timestep that a step leads to."""
    plan = _plan_of(context, takes_next=takes_next)
    if plan is None:
        following = context.step.next_timestep
        after = None if following is None else torch.full_like(timestep, following)
        return ModulationRows({}, lambda: condition(timestep, after))
    batch = 1 if source is None else len(timestep)

    def compute() -> _Table:
        firsts = dict.fromkeys(first for first, _ in plan.times)
        times = plan.times if takes_next else tuple((each, 0.0) for each in firsts)
        columns = torch.tensor(times, dtype=torch.float32).to(timestep.device)
        # On a CPU one timestep after the other, in products of a step's own shape: to the bit what a step computes,
        # where reading the weights is no matter. On a GPU all in one product.
        size = batch if timestep.device.type in ROW_BY_ROW else batch * len(times)
        groups = torch.split(columns.repeat_interleave(batch, 0), size)
        conditions = [condition(group[:, 0], group[:, 1] if takes_next else None) for group in groups]
        return _Table((plan, source), columns[:, 0].contiguous(), _computed(modulations, conditions, batch))

    table = _kept(name, (plan, source), compute, context)
    rows = table.rows.index_select(0, _index_of(timestep, table.timesteps))[0]
    return ModulationRows(_by_modulation(modulations, rows, len(timestep)), _not_asked)


def rows_of_request(
    name: str,
    source: object,
    modulations: Sequence[Modulation],
    batch: int,
    conditioning: Callable[[], torch.Tensor],
    context: AttentionContext,
) -> ModulationRows:
    """Return the rows of a timestep that is the same at every step, such as that of a given image. Arguments as in
    rows_of_step; conditioning: [B, D], [1, D] where there is no source."""
    plan = _plan_of(context)
    if plan is None:
        return ModulationRows({}, lambda: conditioning().expand(batch, -1))

    def compute() -> _Table:
        made = conditioning()
        return _Table((plan, source), made.new_zeros(1), _computed(modulations, [made], len(made)))

    rows = _kept(name, (plan, source), compute, context).rows[0]
    return ModulationRows(_by_modulation(modulations, rows, batch), _not_asked)


def repeated(pooled: torch.Tensor, num_samples: int) -> torch.Tensor:
    """Repeat a pooled text [B, width] once for each timestep of a Condition's num_samples, [num_samples, width]."""
    return pooled.expand(num_samples // len(pooled), *pooled.shape).flatten(0, 1)


def modulated(
    blocks: Iterable[object], rows: ModulationRows, *inputs: object, apart: ApartRows | None = None
) -> list[RunBlock]:
    """Blocks that are called with the streams, their rows, `inputs` and their apart tokens, and overwrite the
    streams."""

    def run_of(block: object) -> RunBlock:
        assert isinstance(block, ModulatedBlock)

        def run(streams: Streams) -> Streams:
            own = [rows.of(each) for each in block.modulations]
            block(*streams, *own, *inputs, None if apart is None else apart.of(block))
            return streams

        return run

    return [run_of(block) for block in blocks]


def modulations_of(blocks: Iterable[object], *others: Modulation) -> tuple[Modulation, ...]:
    """Return the modulations of the blocks in their order, followed by others."""
    found = [each for block in blocks if isinstance(block, ModulatedBlock) for each in block.modulations]
    return (*found, *others)


def _times_of(step: StepInfo) -> Times | None:
    return None if step.timestep is None else (step.timestep, step.next_timestep or 0.0)


def _plan_of(context: AttentionContext, *, takes_next: bool = False) -> PlannedTimes | None:
    """Return the plan that the pass's step is part of. takes_next: where the timestep alone must tell the step."""
    plan = context.state.request.find(_PLAN)
    if not isinstance(plan, PlannedTimes) or _times_of(context.step) not in plan.known:
        return None
    return None if takes_next and plan.num_timesteps < len(plan.times) else plan


def _index_of(timestep: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
    """[1], on the device: a CUDA graph finds the rows of every step so. A timestep that is not among them has an index
    behind the last, where reading fails: the first one's rows would be wrong and look right."""
    if timestep.is_meta:
        # torch would import its compiler for the search.
        return timesteps.new_zeros(1, dtype=torch.int64)
    found = timesteps == timestep[:1]
    return torch.where(found.any(), found.int().argmax(0, keepdim=True), len(timesteps))


def _kept(
    name: str, sources: tuple[object, object], compute: Callable[[], _Table], context: AttentionContext
) -> _Table:
    """Return the table `name` of the request or, if it has a source, of the branch; computed and reported once."""
    state = context.state
    scope, key = state.request if sources[1] is None else state.of_branch(context.step), (_ROWS, name)
    found = scope.find(key)
    if isinstance(found, _Table) and all(a is b for a, b in zip(found.sources, sources, strict=True)):
        return found
    table = compute()
    scope.put(key, table)
    num_times, branch = len(table.timesteps), "" if sources[1] is None else f", {context.step.branch}"
    context.recorder.note(
        f"modulation, {name}{branch}: rows of {num_times} timestep{'s' * (num_times != 1)} computed at once, "
        f"{size_text(table.rows.nbytes)}"
    )
    return table


def _computed(modulations: Sequence[Modulation], conditions: Sequence[torch.Tensor], batch: int) -> torch.Tensor:
    """[N, R, B, D]. conditions: [M, D] of one or more timesteps each, in their order."""
    num_times = sum(map(len, conditions)) // batch
    num_rows = sum(each.num_rows for each in modulations)
    table = conditions[0].new_empty(num_times, num_rows, batch, modulations[0].dim)
    places = torch.split(table, [each.num_rows for each in modulations], dim=1)
    for modulation, place in zip(modulations, places, strict=True):
        with held_weights(modulation):
            parts = torch.split(place, [len(each) // batch for each in conditions])
            for part, conditioning in zip(parts, conditions, strict=True):
                part.copy_(torch.unflatten(modulation.stacked(conditioning), 1, (-1, batch)).transpose(0, 1))
    return table


def _by_modulation(modulations: Sequence[Modulation], rows: torch.Tensor, batch: int) -> dict[Modulation, torch.Tensor]:
    """rows: [R, B or 1, D]."""
    if rows.shape[1] != batch:
        rows = rows.expand(-1, batch, -1).contiguous()
    return dict(zip(modulations, torch.split(rows, [each.num_rows for each in modulations]), strict=True))


def _not_asked() -> torch.Tensor:
    raise AssertionError("a modulation that is not among those of the model")
