"""Capabilities that the machine narrows: other chips take other head sizes, other versions return other things."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from diffusion_runtime.attention.backends.interface import Capability, Question
from diffusion_runtime.hardware import Hardware


@dataclass(frozen=True)
class NarrowedCapability(Capability):
    """What a backend can do at best, in the fields, and what one machine leaves of it.

    on: the capability on a machine, read off its chip and the versions installed there.
    """

    on: Callable[[Hardware], Capability] = field(kw_only=True)

    def refusals(self, question: Question) -> list[str]:
        return self.on(question.hardware).refusals(question)
