"""A third-party backend with options, made for self-attention alone, that the attention tests select."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import pytest

from diffusion_runtime.attention import (
    AttentionCall,
    AttentionResult,
    Availability,
    Backend,
    Capability,
    HeadSizes,
    register_backend,
    unregister_backend,
)
from diffusion_runtime.attention.backends.reference import reference_attention
from diffusion_runtime.core.hardware import Hardware


@dataclass(frozen=True)
class BlockyOptions:
    """Options of every kind a backend may declare."""

    sparsity: float = 0.5
    topk: int = 3
    tile: tuple[int, int, int] = (4, 4, 4)
    steps: tuple[int, ...] = ()
    mode: Literal["fast", "exact"] = "fast"
    path: str | None = None
    warm: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.sparsity < 1:
            raise ValueError(f"sparsity must lie in [0, 1), got {self.sparsity}")


class BlockyBackend(Backend):
    """Counts its steps in the request's state and says its options in the implementation's name."""

    name = "blocky"
    aliases = ("blocky_attn",)
    summary = "a backend of the tests"
    options_type = BlockyOptions
    capability = Capability(
        platforms=frozenset({"cpu"}),
        dtypes=frozenset({"float32", "bfloat16"}),
        head_sizes=HeadSizes(minimum=8, maximum=128, multiple=8),
        categories=frozenset({"self"}),
    )

    def probe(self, hardware: Hardware) -> Availability:
        return Availability(version="1.0")

    def run(self, call: AttentionCall) -> AttentionResult:
        seen: list[int] = call.state.of_layer(call.layer, call.step).get_or_create("seen", list)
        seen.append(call.step.index)
        out, _ = reference_attention(call.q, call.k, call.v)
        return AttentionResult(out, None, f"sparsity {call.options.sparsity}, call {len(seen)}")


class AbsentBackend(Backend):
    """One whose package is never installed."""

    name = "absent"
    summary = "a backend of the tests"
    capability = Capability()

    def probe(self, hardware: Hardware) -> Availability:
        return Availability(None, "package 'absent' is not installed", "pip install absent")

    def run(self, call: AttentionCall) -> AttentionResult:
        raise AssertionError("an absent backend ran")


@pytest.fixture
def blocky() -> Iterator[str]:
    register_backend(BlockyBackend)
    yield "blocky"
    unregister_backend("blocky")


@pytest.fixture
def absent() -> Iterator[str]:
    register_backend(AbsentBackend)
    yield "absent"
    unregister_backend("absent")
