"""Capabilities that the machine narrows: other chips take other head sizes, other versions return other things."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields

from diffusion_runtime.attention.backends.interface import AttentionRequirements, Backend, Capability
from diffusion_runtime.hardware import Hardware


@dataclass(frozen=True)
class NarrowedCapability(Capability):
    """What a backend can do at best, in the fields, and what one machine leaves of it.

    key_counts alone are the worst of all machines: where they limit nothing, no call is asked about its keys.

    on: the capability on a machine, read off its chip and the versions installed there.
    """

    on: Callable[[Hardware], Capability] = field(kw_only=True)

    def refusals(self, requirements: AttentionRequirements) -> list[str]:
        return self.on(requirements.hardware).refusals(requirements)


def narrowed(best: Capability, on: Callable[[Hardware], Capability]) -> NarrowedCapability:
    """`best`, and what one machine leaves of it."""
    return NarrowedCapability(**{field.name: getattr(best, field.name) for field in fields(best)}, on=on)


def capability_on(backend: Backend, hardware: Hardware) -> Capability:
    """What a machine leaves of a backend's capability."""
    can = backend.capability
    return can.on(hardware) if isinstance(can, NarrowedCapability) else can
