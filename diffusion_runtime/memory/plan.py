"""Memory plan: what a generation takes on its device and in the machine, by formula, before a weight is read; and which
offloading is the cheapest that fits.

    text      encoders + their activations
    denoise   transformer + activations of the largest step
    decode    decoder + its activations

Each phase has beside it what stays on the device in its time: everything with `none`, the decoder alone with `model`
and `layers`. With `layers` a transformer is its blocks that fit, two slots for the others, and what is no block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from diffusion_runtime.errors import DeviceMemoryError
from diffusion_runtime.memory_size import size_text

Offload: TypeAlias = Literal["none", "model", "layers"]
# By what they cost in time, the cheapest first.
OFFLOADS: tuple[Offload, ...] = ("none", "model", "layers")
NUM_SLOTS = 2
# What libraries take beside tensors (workspaces of cuBLAS and attention kernels), and what torch's allocator rounds up:
# tensors of 1 MiB and more to multiples of 2 MiB, in segments that cannot all be reused.
WORKSPACE_BYTES = 192 * 2**20
ROUNDING = 0.02


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
    """What a model and a request ask for, in bytes. text: the encoders together; transformers: of which one predicts at
    a time; decoder: with what encodes an image. The activations of each phase, without weights."""

    text: PartSize
    transformers: tuple[PartSize, ...]
    decoder: PartSize
    text_activations: int
    step_activations: int
    decode_activations: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class MemoryPlan:
    """What is on the device when. limit: bytes it may take, None where nobody knows. phases: bytes by phase; resident:
    by part, how many blocks stay on the device, of parts that are streamed. keeps_transformer: whether it may stay
    while frames are decoded. host: bytes of weights in the machine's memory, pinned where possible. reason: why this
    offloading."""

    demand: MemoryDemand
    offload: Offload
    limit: int | None
    phases: Mapping[str, int]
    resident: Mapping[str, int]
    keeps_transformer: bool
    host: int
    reason: str

    @property
    def peak(self) -> int:
        return max(self.phases.values())

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda phase: self.phases[phase])

    def rows(self) -> list[tuple[str, str]]:
        """What to show of it."""
        demand = self.demand
        parts = [demand.text, *demand.transformers, demand.decoder]
        rows = [(f"weights, {part.name.replace('_', ' ')}", size_text(part.total)) for part in parts]
        rows += [
            ("activations, text", size_text(demand.text_activations)),
            ("activations, step", size_text(demand.step_activations)),
            ("activations, decoding", size_text(demand.decode_activations)),
            ("offload", f"{self.offload} ({self.reason})"),
        ]
        for part in parts:
            if part.name in self.resident:
                count = f"{self.resident[part.name]} of {len(part.blocks)} blocks stay on the device"
                rows.append((f"{part.name.replace('_', ' ')}, streamed", count))
        rows += [(f"device, {phase}", size_text(num_bytes)) for phase, num_bytes in self.phases.items()]
        known = "unknown" if self.limit is None else size_text(self.limit)
        rows += [("device, at most", f"{size_text(self.peak)} of {known}"), ("machine, weights", size_text(self.host))]
        return rows

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
            "phases": dict(self.phases),
            "peak": self.peak,
            "resident_blocks": dict(self.resident),
            "host": self.host,
            "notes": list(demand.notes),
        }


def as_offload(text: str) -> Offload:
    """A choice of RuntimeConfig.offload other than `auto`."""
    return next(each for each in OFFLOADS if each == text)


def plans_of(demand: MemoryDemand, limit: int | None, choices: Sequence[Offload] = OFFLOADS) -> list[MemoryPlan]:
    """A plan for each choice, whether it fits or not."""
    return [_plan_of(demand, each, limit) for each in choices]


def make_plan(
    demand: MemoryDemand,
    choices: Sequence[Offload],
    limit: int | None,
    host_limit: int | None = None,
    advice: Sequence[str] = (),
) -> MemoryPlan:
    """The plan for the first of `choices` that fits. limit: bytes of the device, None where nobody knows; host_limit:
    of the machine. advice: what else would need less, for the message.

    Raises DeviceMemoryError where nothing fits, with the part that is too large, by how much, and what would fit.
    """
    plans = plans_of(demand, limit, choices)
    plan = next((plan for plan in plans if limit is None or plan.peak <= limit), None)
    if plan is None:
        assert limit is not None
        raise _shortage(plans[-1], demand, limit, advice)
    if len(choices) == 1 and choices[0] != "none":
        plan = dataclasses.replace(plan, reason="as asked")
    elif plan is not plans[0]:
        before = plans[plans.index(plan) - 1]
        plan = dataclasses.replace(
            plan, reason=f"{before.offload} would take {size_text(before.peak)} in {before.peak_phase}"
        )
    if host_limit is not None and plan.host > host_limit:
        raise DeviceMemoryError(
            f"offload: {plan.offload}: the weights take {size_text(plan.host)} of the machine's memory, and "
            f"{size_text(host_limit)} are free. {_listed(advice)}"
        )
    return plan


def _plan_of(demand: MemoryDemand, offload: Offload, limit: int | None) -> MemoryPlan:
    whole = {part.name: part.total for part in (demand.text, *demand.transformers, demand.decoder)}
    activations = (demand.text_activations, demand.step_activations, demand.decode_activations)
    text, step, decode = (_with_rounding(each) for each in activations)
    if offload == "none":
        base = sum(whole.values())
        phases = {"text": base + text, "denoise": base + step, "decode": base + decode}
        return MemoryPlan(demand, offload, limit, phases, {}, True, 0, "everything fits" if limit else "no limit known")
    stays = demand.decoder.total
    host = demand.text.total + sum(part.total for part in demand.transformers)
    resident: dict[str, int] = {}
    text_weights = demand.text.total
    largest = max(part.total for part in demand.transformers)
    if offload == "layers":
        streamed = [_streamed(part, limit, stays + step) for part in demand.transformers]
        resident = {part.name: count for part, (count, _) in zip(demand.transformers, streamed, strict=True)}
        largest = max(num_bytes for _, num_bytes in streamed)
        if limit is not None and stays + text + text_weights > limit and demand.text.blocks:
            resident[demand.text.name], text_weights = _streamed(demand.text, limit, stays + text)
    keeps = limit is None or stays + decode + largest <= limit
    phases = {
        "text": stays + text + text_weights,
        "denoise": stays + step + largest,
        "decode": stays + decode + (largest if keeps else 0),
    }
    return MemoryPlan(demand, offload, limit, phases, resident, keeps, host, "as asked")


def _streamed(part: PartSize, limit: int | None, beside: int) -> tuple[int, int]:
    """How many blocks of a part stay beside `beside` bytes, and what the part takes then."""
    blocks = part.blocks
    if not blocks or (limit is not None and part.total + beside <= limit):
        # Nothing is streamed.
        return len(blocks), part.total
    fixed = part.rest + NUM_SLOTS * max(blocks)
    count = 0
    if limit is not None:
        room = limit - beside - fixed
        # Not all of them: with every block on the device there would be no slots.
        counts = range(1, len(blocks))
        count = max((each for each in counts if _bytes_of(blocks, each) <= room), default=0)
    return count, fixed + _bytes_of(blocks, count)


def _bytes_of(blocks: Sequence[int], num_resident: int) -> int:
    return sum(blocks[index] for index in spread(num_resident, len(blocks)))


def spread(num_resident: int, num_blocks: int) -> frozenset[int]:
    """Which blocks stay on the device: evenly spread, so that each copy of another has as long to hide in."""
    if num_resident <= 0:
        return frozenset()
    return frozenset((2 * index + 1) * num_blocks // (2 * num_resident) for index in range(num_resident))


def _with_rounding(activations: int) -> int:
    return WORKSPACE_BYTES + int(activations * (1 + ROUNDING))


def _shortage(plan: MemoryPlan, demand: MemoryDemand, limit: int, advice: Sequence[str]) -> DeviceMemoryError:
    phase, missing = plan.peak_phase, plan.peak - limit
    others = [other.offload for other in plans_of(demand, limit) if other.peak <= limit]
    ways = [f"--offload {others[0]}, which fits"] if others else [f"{size_text(plan.peak)} of memory"]
    part = {
        "text": f"the text encoders take {size_text(demand.text.total)}",
        "denoise": f"the activations of a step take {size_text(demand.step_activations)} and the transformer "
        f"{size_text(max(part.total for part in demand.transformers))}",
        "decode": f"decoding takes {size_text(demand.decode_activations)}",
    }[phase]
    return DeviceMemoryError(
        f"offload: {plan.offload}: the plan takes {size_text(plan.peak)} on the device in {phase}, "
        f"{size_text(missing)} more than the {size_text(limit)} there are: {part}. "
        f"{_listed([*ways, *(advice if not others else ())])}"
    )


def _listed(ways: Sequence[str]) -> str:
    return f"What would help: {', '.join(ways)}" if ways else ""
