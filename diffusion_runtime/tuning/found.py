"""The outcome of a search for the fastest setting."""

from __future__ import annotations

from dataclasses import dataclass

from diffusion_runtime.tuning.axes import Choice
from diffusion_runtime.tuning.combination import Combination, Trial


@dataclass(frozen=True)
class LeftOut:
    """An axis or a choice that was not searched, and why."""

    name: str
    reason: str


@dataclass
class Found:
    """The outcome of a search. reference, plain: figures on the prompts for verification; plain: as many plain steps as
    take the time of `chosen`, None where that is all of them. alone: choices measured alone, on the measured prompts;
    tried: combinations there. is_met: whether anything faster than what was given is within the bound; chosen is
    empty otherwise. ended_by: what ended the search early, empty for nothing. remarks: on bounds that say nothing of
    the quality."""

    measured_reference: Trial
    reference: Trial
    chosen: Combination
    verified: Trial
    is_met: bool
    alone: list[tuple[str, Choice, Trial]]
    tried: list[tuple[Combination, Trial, bool]]
    missed: list[tuple[Combination, Trial]]
    left_out: list[LeftOut]
    plain: Trial | None = None
    is_plain_met: bool = False
    ended_by: str = ""
    remarks: tuple[str, ...] = ()
