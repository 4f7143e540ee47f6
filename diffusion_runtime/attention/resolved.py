"""A decision made ready to run."""

from __future__ import annotations

from dataclasses import dataclass

from diffusion_runtime.attention.backends.interface import Backend
from diffusion_runtime.attention.backends.registry import find_backend
from diffusion_runtime.attention.options import build_options
from diffusion_runtime.attention.select import Decision


@dataclass(frozen=True)
class Resolved:
    """A decision with what running it takes."""

    decision: Decision
    backend: Backend
    options: object


def resolve_decision(decision: Decision) -> Resolved:
    """The backend of a decision, with its options as the type it declares.

    Raises ConfigError for options that contradict each other: here the set is complete.
    """
    backend = find_backend(decision.backend)
    assert backend is not None, decision
    options = build_options(backend.options_type, decision.options, f"options of {backend.name}")
    return Resolved(decision, backend, options)
