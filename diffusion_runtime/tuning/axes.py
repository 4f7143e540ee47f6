"""Axes of a search for the fastest setting: what may be changed, each with its choices.

An axis is a declaration in AXES; nothing else names it. Choices that cannot run are found by preparing them, and those
that save no time by making a clip, so a declaration lists what is worth trying anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from diffusion_runtime.attention.backends.registry import available_names, find_backend
from diffusion_runtime.attention.config import AttentionSpec
from diffusion_runtime.core.hardware import Hardware
from diffusion_runtime.errors import ConfigError, nearest
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.request.step_cache_options import FEW_STEPS
from diffusion_runtime.tuning.cells import Cell

# Shares of the steps that are given; a third of 24 steps of UniPC is as few as kept the embedded model's accuracy
# (docs/faster.md).
_SHARES_OF_STEPS = (0.85, 0.7, 0.6, 0.5, 0.4, 0.33)
_FEWEST_STEPS = 2
# Another number of steps has noise levels of its own.
_NO_LEVELS: Mapping[str, Any] = {"sigmas": None, "sigmas_before_shift": None}

# Choices of one kind from mild to strong: each is quicker and loses more than the one before.
Line = list["Choice"]
CellSpecs = tuple[tuple[Cell, AttentionSpec | None], ...]


@dataclass(frozen=True)
class Choice:
    """One value of an axis. name: for tables. runtime, request: fields that it sets. backend: of self-attention.
    cells: a sparse schedule, made for num_steps; whatever steps it runs with, it is stretched to."""

    name: str
    runtime: Mapping[str, Any] = field(default_factory=dict)
    request: Mapping[str, Any] = field(default_factory=dict)
    backend: str | None = None
    cells: CellSpecs = ()
    num_steps: int = 0


@dataclass(frozen=True)
class Situation:
    """The request and machine that choices depend on. request: resolved. backends: of self-attention, as given.
    sparse: the sparsest setting of each sparse method, all layers and steps alike. device: that computes."""

    request: GenerationRequest
    hardware: Hardware
    backends: frozenset[str] = frozenset()
    sparse: Mapping[str, Choice] = field(default_factory=dict)
    device: str = "cpu"


@dataclass(frozen=True)
class Axis:
    """One thing that may be changed. lines: of its choices; several where they are of several kinds. fields: of
    RuntimeConfig and GenerationRequest; where one was given, the axis is left as it was given. by_cell: whether a line
    that saves time is replaced by schedules by layer and step. makes_another_clip: whether it cannot be judged by its
    distance from the clip as given.
    """

    name: str
    lines: Callable[[Situation], list[Line]]
    fields: tuple[str, ...] = ()
    by_cell: bool = False
    makes_another_clip: bool = False


def _attention(situation: Situation) -> list[Line]:
    """Exact and rounded backends that are worth timing here; sparse ones are an axis of their own."""
    backends = [backend for name in available_names() if (backend := find_backend(name)) is not None]
    return [
        [Choice(each.name, backend=each.name)]
        for each in backends
        if (each.lossless or each.error_bound is not None)
        and each.name not in ("measured", *situation.backends)
        and each.timed_by_default(situation.hardware)
        and situation.hardware.platform in each.capability.platforms
        and each.probe(situation.hardware).version is not None
    ]


def _sparse(situation: Situation) -> list[Line]:
    return [[choice] for choice in situation.sparse.values()]


def _steps(situation: Situation) -> list[Line]:
    given = situation.request.num_inference_steps or 0
    counts = dict.fromkeys(round(share * given) for share in _SHARES_OF_STEPS)
    return [[plain_steps(count) for count in counts if _FEWEST_STEPS <= count < given]]


def plain_steps(count: int) -> Choice:
    """Return the choice of so many steps."""
    return Choice(f"{count} steps", request={"num_inference_steps": count, **_NO_LEVELS})


def _step_caches(situation: Situation) -> list[Line]:
    if (situation.request.num_inference_steps or 0) <= FEW_STEPS:
        return []
    kinds = (
        [f"easycache:threshold={threshold}" for threshold in (0.02, 0.05, 0.1, 0.2)],
        [f"dbcache:F=1,W=4,R={threshold},MC=3,taylor=1" for threshold in (0.08, 0.2)],
        ["teacache"],
    )
    return [[Choice(text, request={"step_cache": text}) for text in texts] for texts in kinds]


def _gate(situation: Situation) -> list[Line]:
    del situation
    return [[Choice(f"guidance of the first {share:.0%}", request={"cfg_gate": share}) for share in (0.75, 0.5)]]


def _quantization(situation: Situation) -> list[Line]:
    del situation
    return [
        [Choice(mode, runtime={"quantization": mode}) for mode in modes] for modes in (("int8",), ("fp8", "fp8-all"))
    ]


def _decoder(situation: Situation) -> list[Line]:
    del situation
    return [[Choice(f"{mode} decoding", runtime={"vae_decode": mode})] for mode in ("fast", "fp8")]


def _progressive(situation: Situation) -> list[Line]:
    del situation
    texts = [f"dct:delta={delta}" for delta in (0.01, 0.05, 0.1)]
    return [[Choice(f"half size first, {text}", request={"progressive_resolution": text}) for text in texts]]


AXES: tuple[Axis, ...] = (
    Axis("attention", _attention),
    Axis("sparse", _sparse, by_cell=True),
    Axis("steps", _steps),
    Axis("step-cache", _step_caches, ("step_cache",)),
    Axis("guidance", _gate, ("cfg_gate",)),
    Axis("quantization", _quantization, ("quantization",)),
    Axis("decoder", _decoder, ("vae_decode", "vae_decoder")),
    Axis("resolution", _progressive, ("progressive_resolution",), makes_another_clip=True),
)


def chosen_axes(names: Sequence[str]) -> tuple[Axis, ...]:
    """Return the axes of these names, in the order of AXES; all of them for none. Raises ConfigError for an unknown
    name."""
    known = [axis.name for axis in AXES]
    for name in names:
        if name not in known:
            raise ConfigError(f"--over: unknown axis {name!r}.{nearest(name, known)}")
    return tuple(axis for axis in AXES if not names or axis.name in names)
