"""Memory plan: what a generation takes on its device and in the machine, by formula, before a weight is read; and which
offloading is the cheapest that fits.

    text      encoders + their activations
    denoise   transformer + activations of the largest step
    decode    decoder + its activations

Each phase also has what stays on the device meanwhile: everything with `none`, the decoder alone with `model`
and `layers`. With `layers` a transformer is its blocks that fit, two slots for the others, and what is no block.

On a CPU the device's memory is the machine's, and what is offloaded waits in the files it is read from (MACHINE).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from diffusion_runtime.core.memory_size import limit_text, size_text
from diffusion_runtime.errors import DeviceMemoryError

Offload: TypeAlias = Literal["none", "model", "layers"]
# By what they cost in time, the cheapest first.
OFFLOADS: tuple[Offload, ...] = ("none", "model", "layers")
NUM_SLOTS = 2
# What libraries take in addition to tensors (workspaces of cuBLAS and attention kernels), and what torch's allocator
# rounds up: tensors of 1 MiB and more to multiples of 2 MiB, in segments that cannot all be reused.
WORKSPACE_BYTES = 192 * 2**20
ROUNDING = 0.02
# Value of Remedy.lowers in addition to the phases.
WEIGHTS = "weights"


@dataclass(frozen=True)
class DeviceKind:
    """Properties of a kind of device that its plans depend on. workspace: bytes in addition to the tensors of a phase.
    num_slots: buffers of streamed blocks. waits_in_files: offloaded weights are read from their files when needed,
    because there is no other memory to hold them."""

    workspace: int = WORKSPACE_BYTES
    num_slots: int = NUM_SLOTS
    waits_in_files: bool = False


ACCELERATOR = DeviceKind()
# One slot: a block is read when the one before it is done. No library has a workspace of a fixed size here.
MACHINE = DeviceKind(workspace=0, num_slots=1, waits_in_files=True)


@dataclass(frozen=True)
class PartSize:
    """The weights of one part in bytes. blocks: those of its blocks, one by one, which may be streamed; read_once: what
    is read of the blocks once a request, and not by their forward; the rest stays together."""

    name: str
    total: int
    blocks: tuple[int, ...] = ()
    read_once: int = 0

    @property
    def rest(self) -> int:
        return self.total - sum(self.blocks) - self.read_once


@dataclass(frozen=True)
class MemoryDemand:
    """Demand of a model and a request, in bytes. text: the encoders together; transformers: one of them predicts at a
    time; decoder: with the image encoder. The activations of each phase, without weights; modulation_rows: the part of
    the step's activations that are rows of all timesteps, computed before the first step. num_local: processes of this
    machine; each holds its own transformers where they are offloaded, the first alone the encoders. whole_text: why the
    encoders cannot be read from their files by blocks, empty if they can; the blocks of `text` are those of the largest
    encoder."""

    text: PartSize
    transformers: tuple[PartSize, ...]
    decoder: PartSize
    text_activations: int
    step_activations: int
    decode_activations: int
    notes: tuple[str, ...] = ()
    modulation_rows: int = 0
    num_local: int = 1
    whole_text: str = ""


@dataclass(frozen=True)
class MemoryPlan:
    """Contents of the device in each phase. limit: bytes it may take, None if unknown. parts: by phase, the bytes of
    each part; resident: by streamed part, how many blocks stay on the device. keeps_transformer: whether it may stay
    while frames are decoded. host: bytes of weights in the machine's memory, pinned where possible, of all its
    processes; host_limit: what is free there, None if unknown; waits_in_files: offloaded weights are read from their
    files instead. reason: why this offloading. shortage: what to change where no limit was given and it takes more than
    the machine has free, else empty."""

    demand: MemoryDemand
    offload: Offload
    limit: int | None
    parts: Mapping[str, Mapping[str, int]]
    resident: Mapping[str, int]
    keeps_transformer: bool
    host: int
    reason: str
    waits_in_files: bool = False
    host_limit: int | None = None
    shortage: str = ""

    @property
    def phases(self) -> dict[str, int]:
        """Bytes by phase."""
        return {phase: sum(parts.values()) for phase, parts in self.parts.items()}

    @property
    def peak(self) -> int:
        return max(self.phases.values())

    @property
    def peak_phase(self) -> str:
        phases = self.phases
        return max(phases, key=lambda phase: phases[phase])

    def copied_per_pass(self, part: PartSize) -> int:
        """Return the bytes of a part's blocks that are copied in every pass through it; 0 where none is streamed."""
        number = self.resident.get(part.name, len(part.blocks))
        stay = spread(number, len(part.blocks))
        return sum(size for index, size in enumerate(part.blocks) if index not in stay)

    @property
    def whole_text(self) -> str:
        """Reason why text encoders are whole while encoding although their blocks would be streamed, else empty."""
        is_asked = self.waits_in_files and self.offload == "layers" and self.demand.whole_text
        return f"whole while it encodes: {self.demand.whole_text}" if is_asked else ""

    def rows(self) -> list[tuple[str, str]]:
        """Return the rows to show of the plan: name and value."""
        demand = self.demand
        parts = [demand.text, *demand.transformers, demand.decoder]
        rows_made = ""
        if demand.modulation_rows:
            rows_made = f", {size_text(demand.modulation_rows)} of it modulation rows computed before the first step"
        rows = [(f"weights, {part.name.replace('_', ' ')}", size_text(part.total)) for part in parts]
        rows += [
            ("activations, text", size_text(demand.text_activations)),
            ("activations, step", size_text(demand.step_activations) + rows_made),
            ("activations, decoding", size_text(demand.decode_activations)),
            ("offload", f"{self.offload} ({self.reason})"),
        ]
        for part in parts:
            if part.name in self.resident:
                number, where = self.resident[part.name], "in memory" if self.waits_in_files else "on the device"
                count = f"{number} of {len(part.blocks)} blocks stay {where}"
                if self.waits_in_files and number < len(part.blocks):
                    count += ", the others are read from files"
                elif number < len(part.blocks):
                    count += f", {size_text(self.copied_per_pass(part))} are copied in every pass"
                if part.read_once and number < len(part.blocks):
                    count += f"; {size_text(part.read_once)} of the weights are read once a request"
                rows.append((f"{part.name.replace('_', ' ')}, streamed", count))
        if self.whole_text:
            rows.append(("text encoder", self.whole_text))
        rows += [(f"device, {phase}", size_text(num_bytes)) for phase, num_bytes in self.phases.items()]
        free = None if self.host_limit is None else f" of {size_text(self.host_limit)} that are free"
        limit = ", no limit known" if self.limit is None else f" of {size_text(self.limit)}"
        if self.waits_in_files:
            # The machine's memory is the device's.
            limit = (free or limit) if self.limit is None else limit
            waiting = "read from their files" if self.offload != "none" else ""
        else:
            waiting = size_text(self.host)
            if self.host and demand.num_local > 1:
                waiting += f" in {demand.num_local} processes"
            waiting += free or ""
        rows.append(("device, at most", f"{size_text(self.peak)}{limit}"))
        return [*rows, ("machine, weights", waiting)] if waiting else rows

    def to_dict(self) -> dict[str, Any]:
        """Plain values, bytes."""
        demand = self.demand
        parts = [demand.text, *demand.transformers, demand.decoder]
        return {
            "offload": self.offload,
            "reason": self.reason,
            "limit": self.limit,
            "weights": {part.name: part.total for part in parts},
            "activations": {
                "text": demand.text_activations,
                "denoise": demand.step_activations,
                "decode": demand.decode_activations,
            },
            "modulation_rows": demand.modulation_rows,
            "phases": self.phases,
            "parts": {phase: dict(parts) for phase, parts in self.parts.items()},
            "peak": self.peak,
            "resident_blocks": dict(self.resident),
            "whole_text": self.whole_text,
            "host": self.host,
            "host_free": self.host_limit,
            "notes": list(demand.notes),
        }


@dataclass(frozen=True)
class Remedy:
    """Something that takes less. flags: what to type; demand: what is taken then, computed when it is asked for, None
    where that cannot be known. lowers: the phases that may take less by it, and WEIGHTS where weights do."""

    flags: str
    demand: Callable[[], MemoryDemand | None]
    lowers: frozenset[str]


@dataclass(frozen=True)
class Remedies:
    """groups: of each the first that fits is named. together: several changes at once, tried where no group helps."""

    groups: tuple[tuple[Remedy, ...], ...] = ()
    together: tuple[Remedy, ...] = ()

    def lowering(self, what: Set[str]) -> Remedies:
        """Return the remedies that lower all of `what`; each takes a forward pass on the meta device to try."""
        groups = [tuple(each for each in group if each.lowers >= what) for group in (*self.groups, self.together)]
        return Remedies(tuple(group for group in groups[:-1] if group), groups[-1])


NO_REMEDIES = Remedies()


@dataclass(frozen=True)
class _Place:
    """Limits that a plan must fit into. limit: bytes of the device, None if unknown; host_limit: of the machine."""

    limit: int | None
    host_limit: int | None
    kind: DeviceKind

    def holds(self, plan: MemoryPlan) -> bool:
        return (self.limit is None or plan.peak <= self.limit) and (
            self.host_limit is None or plan.host <= self.host_limit
        )


def as_offload(text: str) -> Offload:
    """Return the text as a choice of RuntimeConfig.offload other than `auto`."""
    return next(each for each in OFFLOADS if each == text)


def plans_of(
    demand: MemoryDemand,
    limit: int | None,
    choices: Sequence[Offload] = OFFLOADS,
    kind: DeviceKind = ACCELERATOR,
) -> list[MemoryPlan]:
    """Return a plan for each choice, whether it fits or not."""
    return [_plan_of(demand, each, limit, kind) for each in choices]


def make_plan(
    demand: MemoryDemand,
    choices: Sequence[Offload],
    limit: int | None,
    host_limit: int | None = None,
    remedies: Remedies = NO_REMEDIES,
    *,
    possible: Sequence[Offload] = OFFLOADS,
    kind: DeviceKind = ACCELERATOR,
    free: int | None = None,
) -> MemoryPlan:
    """Return the plan for the first of `choices` that fits. limit: bytes of the device, None if unknown; host_limit:
    of the machine. remedies: what else would need less, tried for the message; possible: what could be chosen instead;
    free: of the device, where `limit` may be raised as far as that.

    Raises DeviceMemoryError where nothing fits, with all that is there at once, by how much it is too large, and what
    would fit.
    """
    plans = plans_of(demand, limit, choices, kind)
    plan = next((plan for plan in plans if limit is None or plan.peak <= limit), None)
    if plan is None:
        assert limit is not None
        others = [each.offload for each in plans_of(demand, limit, possible, kind) if each.peak <= limit]
        if others:
            # On a CPU it is the limit that reads blocks from their files, unless --offload forbids it.
            way = f"What would fit: --offload {'auto' if kind.waits_in_files else others[0]}"
        else:
            more = _more_memory(plans[-1].peak, free)
            way = ways_to_fit(plans[-1], limit, remedies, choices, kind, more, host_limit=host_limit)
        raise _shortage(plans[-1], limit, way)
    if len(choices) == 1 and choices[0] != "none":
        plan = dataclasses.replace(plan, reason="as asked")
    elif plan is not plans[0]:
        before = plans[plans.index(plan) - 1]
        plan = dataclasses.replace(
            plan, reason=f"{before.offload} would take {size_text(before.peak)} in {before.peak_phase}"
        )
    if host_limit is not None and plan.host > host_limit:
        each = f" in {demand.num_local} processes" if demand.num_local > 1 else ""
        raise DeviceMemoryError(
            f"offload: {plan.offload}: the weights take {size_text(plan.host)} of the machine's memory{each}, and "
            f"{size_text(host_limit)} are free. "
            + _ways(
                remedies.lowering({WEIGHTS}),
                choices,
                _Place(limit, host_limit, kind),
                plan.peak,
                f"{size_text(plan.host)} free in the machine",
            )
        )
    return dataclasses.replace(plan, host_limit=host_limit)


def _plan_of(demand: MemoryDemand, offload: Offload, limit: int | None, kind: DeviceKind) -> MemoryPlan:
    beside = {
        phase: {f"activations of {phase}": activations, "libraries and rounding": _rounding(activations, kind)}
        for phase, activations in (
            ("text", demand.text_activations),
            ("denoise", demand.step_activations),
            ("decode", demand.decode_activations),
        )
    }
    if offload == "none":
        whole = {part.name: part.total for part in (demand.text, *demand.transformers, demand.decoder)}
        parts = {phase: {**whole, **own} for phase, own in beside.items()}
        reason = "everything fits" if limit else "no limit known"
        return MemoryPlan(demand, offload, limit, parts, {}, True, 0, reason, kind.waits_in_files)
    stays = demand.decoder.total
    text, step, decode = (stays + sum(own.values()) for own in beside.values())
    resident: dict[str, int] = {}
    text_weights = demand.text.total
    predicts = max(demand.transformers, key=lambda part: part.total)
    named, largest = predicts.name, predicts.total
    if offload == "layers":
        streamed = [_streamed(part, limit, step, kind) for part in demand.transformers]
        resident = {part.name: count for part, (count, _) in zip(demand.transformers, streamed, strict=True)}
        largest = max(num_bytes for _, num_bytes in streamed)
        named += ", streamed" if largest < predicts.total else ""
        can_stream = bool(demand.text.blocks) and not (kind.waits_in_files and demand.whole_text)
        if limit is not None and text + text_weights > limit and can_stream:
            resident[demand.text.name], text_weights = _streamed(demand.text, limit, text, kind)
    keeps = limit is None or decode + largest <= limit
    weights = {
        "text": {demand.text.name: text_weights},
        "denoise": {named: largest},
        "decode": {named: largest} if keeps else {},
    }
    parts = {phase: {**weights[phase], demand.decoder.name: stays, **own} for phase, own in beside.items()}
    of_each = sum(part.total for part in demand.transformers)
    host = 0 if kind.waits_in_files else demand.text.total + demand.num_local * of_each
    return MemoryPlan(demand, offload, limit, parts, resident, keeps, host, "as asked", kind.waits_in_files)


def _streamed(part: PartSize, limit: int | None, beside: int, kind: DeviceKind) -> tuple[int, int]:
    """Return how many blocks of a part stay on the device next to `beside` other bytes, and the part's bytes then."""
    blocks = part.blocks
    if not blocks or (limit is not None and part.total + beside <= limit):
        # Nothing is streamed.
        return len(blocks), part.total
    count = 0
    if limit is not None:
        room = limit - beside - part.rest
        # Not all of them: with every block on the device there would be no slots.
        counts = range(1, len(blocks))
        count = max((each for each in counts if _bytes_of(blocks, each, kind.num_slots) <= room), default=0)
    return count, part.rest + _bytes_of(blocks, count, kind.num_slots)


def _bytes_of(blocks: Sequence[int], num_resident: int, num_slots: int) -> int:
    """Return the bytes of the resident blocks and of slots for the largest of the others: blocks that are not quantised
    are larger, and may all be resident."""
    resident = spread(num_resident, len(blocks))
    largest = max(size for index, size in enumerate(blocks) if index not in resident)
    return sum(blocks[index] for index in resident) + num_slots * largest


def spread(num_resident: int, num_blocks: int) -> frozenset[int]:
    """Which blocks stay on the device: evenly spread, so that each copy of another has as long to hide in."""
    if num_resident <= 0:
        return frozenset()
    return frozenset((2 * index + 1) * num_blocks // (2 * num_resident) for index in range(num_resident))


def _rounding(activations: int, kind: DeviceKind) -> int:
    return kind.workspace + int(activations * ROUNDING)


def _shortage(plan: MemoryPlan, limit: int, way: str) -> DeviceMemoryError:
    """way: out of it."""
    phase, missing = plan.peak_phase, plan.peak - limit
    parts = sorted(plan.parts[phase].items(), key=lambda each: -each[1])
    whole = f"The text encoder is {plan.whole_text}. " if phase == "text" and plan.whole_text else ""
    held = " + ".join(f"{name.replace('_', ' ')} {size_text(num_bytes)}" for name, num_bytes in parts if num_bytes)
    return DeviceMemoryError(
        f"offload: {plan.offload}: the plan takes {size_text(plan.peak)} on the device in {phase}, "
        f"{size_text(missing)} more than the {size_text(limit)} there are: {held}. {whole}{way}"
    )


def _more_memory(peak: int, free: int | None) -> str:
    return f"--memory-limit {limit_text(peak)}" if free is not None and peak < free else f"{size_text(peak)} of memory"


def ways_to_fit(
    plan: MemoryPlan,
    limit: int,
    remedies: Remedies,
    choices: Sequence[Offload],
    kind: DeviceKind,
    more: str = "",
    *,
    host_limit: int | None = None,
) -> str:
    """Return which remedies fit where a plan, the last of those for `choices`, does not. more: needed without any."""
    short = {phase for phase, num_bytes in plan.phases.items() if num_bytes > limit}
    place, more = _Place(limit, host_limit, kind), more or f"{size_text(plan.peak)} of memory"
    return _ways(remedies.lowering(short), choices, place, plan.peak, more)


def _ways(remedies: Remedies, choices: Sequence[Offload], place: _Place, taken: int, more: str) -> str:
    """Return the remedies that fit, else what the smallest of them takes. taken: bytes of the device without any; more:
    the memory that is needed then."""
    least: list[tuple[int, str]] = []

    def first_that_fits(group: Sequence[Remedy]) -> list[str]:
        for remedy in group:
            demand = remedy.demand()
            plans = [] if demand is None else plans_of(demand, place.limit, choices, place.kind)
            fits = next((plan for plan in plans if place.holds(plan)), None)
            if fits is not None:
                return [f"{remedy.flags} ({size_text(fits.peak)})"]
            least.extend((plan.peak, remedy.flags) for plan in plans[-1:] if plan.peak < taken)
        return []

    fitting = [text for group in remedies.groups for text in first_that_fits(group)]
    fitting = fitting or first_that_fits(remedies.together)
    answer = f"What would fit: {', '.join([more, *fitting])}"
    if fitting or not least:
        return answer
    peak, flags = min(least)
    return f"{answer}. Even {flags} takes {size_text(peak)}"
