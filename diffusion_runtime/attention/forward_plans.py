"""Forward plans: what backends prepare once per forward pass, and for CUDA graphs in fixed buffers.

A backend whose `run` needs more than tensors of its call, such as a number of the step on the device, makes it in
`Backend.prepare`; a graph reads it from buffers that `Backend.reserve` made and `prepare` writes before each replay.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from diffusion_runtime.attention.cache.plan import CachePlan
from diffusion_runtime.attention.cache.stored import StoredForm
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.core.token_layout import TokenLayout


@dataclass(frozen=True)
class PlanLimits:
    """The calls that share a plan, and how large they are. options: an instance of the backend's options_type. layout:
    of the whole sequence, None where nothing is padded; batch, num_queries, num_keys, num_heads, num_kv_heads,
    head_dim: of q and k as the backend gets them; scale: of the softmax, None for 1 / sqrt(head_dim). With a key-value
    cache these are the most that a call of the video has, and the layout is that of all that there is room for."""

    options: Any
    layout: TokenLayout | None
    batch: int
    num_queries: int
    num_keys: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    scale: float | None = None


@dataclass(frozen=True)
class ForwardPlan:
    """The input of `prepare`. limits: of its calls; step: of this forward pass; cache: its reads and writes of the
    key-value cache, with the number of keys in sight; None for calls without one. stored: the pages of calls that read
    them in place, alike in all layers unless one shares pages with another video."""

    limits: PlanLimits
    step: StepInfo
    cache: CachePlan | None = None
    stored: StoredForm | None = None


class Planning(Protocol):
    """The part of `Backend` that plans once per forward pass."""

    @property
    def name(self) -> str: ...

    def reserve(self, limits: PlanLimits) -> Any: ...

    def prepare(self, plan: ForwardPlan, into: Any = None) -> Any: ...

    def replay_refusal(self, options: Any) -> str | None: ...


class ForwardPlans:
    """The plans of one forward pass, made when they are first asked for."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}

    def of(self, backend: Planning, plan: ForwardPlan) -> Any:
        """The backend's plan for all calls of the same limits and pages."""
        key = (backend.name, plan.limits, plan.stored)
        if key not in self._made:
            self._made[key] = self._make(backend, plan)
        return self._made[key]

    def serves(self, backend: Planning, options: Any) -> None:
        """A call of this forward pass is served by `backend`."""

    def _make(self, backend: Planning, plan: ForwardPlan) -> Any:
        return backend.prepare(plan)


class VideoPlans(ForwardPlans):
    """Plans of all forward passes of one video that is made chunk by chunk: each pass prepares them again, in buffers
    that are reserved once."""

    def __init__(self) -> None:
        super().__init__()
        self._reserved: dict[Hashable, Any] = {}
        self._in_use: set[Hashable] = set()

    def start_pass(self) -> None:
        """Another forward pass begins: what was prepared for the one before is of no use to it."""
        self._made.clear()
        self._in_use.clear()

    def _make(self, backend: Planning, plan: ForwardPlan) -> Any:
        key = (backend.name, plan.limits)
        if key in self._in_use:
            # Layers with other pages than the first: what was prepared for that one is still to be read.
            return backend.prepare(plan)
        self._in_use.add(key)
        if key not in self._reserved:
            self._reserved[key] = backend.reserve(plan.limits)
        return backend.prepare(plan, into=self._reserved[key])


class WatchedPlans(ForwardPlans):
    """Plans of a forward pass that may be replayed later. refusals: why backends that serve it cannot be."""

    def __init__(self) -> None:
        super().__init__()
        self._refusals: dict[str, None] = {}

    @property
    def refusals(self) -> tuple[str, ...]:
        return tuple(self._refusals)

    def serves(self, backend: Planning, options: Any) -> None:
        refusal = backend.replay_refusal(options)
        if refusal is not None:
            self._refusals[f"{backend.name}: {refusal}"] = None


class FixedPlans(WatchedPlans):
    """Plans in buffers that stay where they are, for a forward pass that is captured in a CUDA graph."""

    def __init__(self) -> None:
        super().__init__()
        self._fixed: list[tuple[Planning, ForwardPlan, Any]] = []

    def write(self, step: StepInfo, cache: CachePlan | None = None) -> None:
        """Prepare every plan for another step, in its buffers. cache: of that pass, for calls that have one."""
        for backend, plan, reserved in self._fixed:
            of_pass = None if plan.cache is None else cache
            backend.prepare(dataclasses.replace(plan, step=step, cache=of_pass), into=reserved)

    def _make(self, backend: Planning, plan: ForwardPlan) -> Any:
        reserved = backend.reserve(plan.limits)
        self._fixed.append((backend, plan, reserved))
        return backend.prepare(plan, into=reserved)
