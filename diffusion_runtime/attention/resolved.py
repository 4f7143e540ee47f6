"""A decision made ready to run."""

from __future__ import annotations

from dataclasses import dataclass

from diffusion_runtime.attention.backends.interface import Backend, DenseAttention
from diffusion_runtime.attention.backends.registry import find_backend
from diffusion_runtime.attention.options import build_options
from diffusion_runtime.attention.select import Decision


@dataclass(frozen=True)
class Resolved:
    """A decision with what running it takes. dense: what serves its dense calls, where the decision says so."""

    decision: Decision
    backend: Backend
    options: object
    dense: DenseAttention | None = None


def resolve_decision(decision: Decision) -> Resolved:
    """The backend of a decision, with its options as the type it declares.

    Raises ConfigError for options that contradict each other: here the set is complete.
    """
    backend = find_backend(decision.backend)
    assert backend is not None, decision
    options = build_options(backend.options_type, decision.options, f"options of {backend.name}")
    dense = None if decision.dense is None else resolve_dense(decision.dense)
    return Resolved(decision, backend, options, dense)


def resolve_dense(decision: Decision) -> DenseAttention:
    """What `select_dense` decided, as a call carries it. Raises ConfigError like resolve_decision."""
    found = resolve_decision(decision)
    is_plain_default = decision.source == "platform" and not decision.rejected
    return DenseAttention(found.backend, found.options, "" if is_plain_default else decision.reason)
