"""Autotune (`measured`): of the lossless backends that can serve a call, the one that was fastest on this machine.

The first call of a shape class runs and times them all, on its own tensors, and what was found is kept on disk: later
calls, and later processes, take it without measuring. Nothing is measured while a CUDA graph is captured; a call
before the capture, which graphs need anyway, measures. Under torch.compile the choice is a graph break.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from diffusion_runtime.attention.autotune import padding_class, shape_class, time_candidates, with_own_options
from diffusion_runtime.attention.backends.calling import run_backend
from diffusion_runtime.attention.backends.capability import AttentionRequirements, Capability, NarrowedCapability
from diffusion_runtime.attention.backends.interface import AttentionCall, AttentionResult, Availability, Backend
from diffusion_runtime.attention.backends.refusals import refusals
from diffusion_runtime.attention.backends.registry import (
    available_names,
    find_backend,
    register_backend,
    when_backends_change,
)
from diffusion_runtime.attention.backends.requirements import call_features, requirements_of
from diffusion_runtime.attention.backends.torch_sdpa import TorchSdpaBackend
from diffusion_runtime.attention.machine_cache import Choice, MeasuredCache, machine_facts
from diffusion_runtime.attention.select import platform_candidates
from diffusion_runtime.core.device_guard import must_not_wait
from diffusion_runtime.core.hardware import Hardware, detect_hardware

_logger = logging.getLogger("diffusion_runtime.attention")


@dataclass(frozen=True)
class MeasuredOptions:
    """measure: whether calls may be timed. False takes what was measured before, else the platform's order."""

    measure: bool = True


@dataclass(frozen=True)
class _Pick:
    """Who serves a call, and why, in a word or two for the report."""

    backend: Backend
    why: str

    def run(self, call: AttentionCall) -> AttentionResult:
        result = run_backend(self.backend, with_own_options(self.backend, call))
        return result._replace(implementation=f"{self.backend.name}: {result.implementation} ({self.why})")


def candidates(hardware: Hardware) -> list[Backend]:
    """The lossless backends that are installed here and made to be fast: the platform's first choice first."""
    found = []
    names = dict.fromkeys((*platform_candidates(hardware), *available_names()))
    for name in names:
        try:
            backend = find_backend(name)
            if backend is None or not backend.lossless or not backend.timed_by_default(hardware):
                continue
            if backend.probe(hardware).version is not None:
                found.append(backend)
        except Exception as error:  # a backend's file stands or falls with the packages it imports
            _logger.debug("measured leaves %s out: %s", name, error)
    return found


class _AnyCandidate(NarrowedCapability):
    """The union of what the candidates can do; one of them serves each call."""

    def refusals(self, requirements: AttentionRequirements) -> list[str]:
        if any(not refusals(backend.name, requirements) for backend in candidates(requirements.hardware)):
            return []
        return self.on_hardware(requirements.hardware).refusals(requirements) or [
            "no lossless backend here can do all of this at once"
        ]


def _on(hardware: Hardware) -> Capability:
    """torch's, which is always a candidate and bounds neither head sizes nor roles, and what others add to it."""
    capabilities = [backend.capability.on_hardware(hardware) for backend in candidates(hardware)]
    return dataclasses.replace(
        TorchSdpaBackend.capability,
        dtypes=frozenset().union(*(can.dtypes for can in capabilities)),
        features=frozenset().union(*(can.features for can in capabilities)),
    )


@register_backend
class MeasuredBackend(Backend):
    """Autotune: picks one of the others per call shape; the report names it, and that it was measured."""

    name = "measured"
    summary = "the fastest lossless backend for each call shape, measured once and remembered on disk"
    options_type = MeasuredOptions
    self_check_platforms: ClassVar[frozenset[str]] = frozenset()
    not_replayed = "which backend serves a call is found at the call"
    # A test of it is a test of those it picks from; looking at a machine must not measure.
    self_test_options: ClassVar[Mapping[str, Any]] = MappingProxyType({"measure": False})
    capability = _AnyCandidate(
        dtypes=TorchSdpaBackend.capability.dtypes, features=TorchSdpaBackend.capability.features, narrow=_on
    )

    def probe(self, hardware: Hardware) -> Availability:
        return Availability(f"among {len(candidates(hardware))}")

    def timed_by_default(self, hardware: Hardware) -> bool:  # noqa: ARG002
        return False

    def compiles_at_first_call(self, hardware: Hardware) -> bool:
        return any(backend.compiles_at_first_call(hardware) for backend in candidates(hardware))

    def delegates(self, requirements: AttentionRequirements) -> tuple[str, ...]:
        able = [
            backend.name for backend in candidates(requirements.hardware) if not refusals(backend.name, requirements)
        ]
        return tuple(able)

    def run(self, call: AttentionCall) -> AttentionResult:
        if torch.compiler.is_compiling():
            # Not a decorator: that would load the compiler where nothing is compiled.
            pick: _Pick = torch.compiler.disable(_pick)(call)  # type: ignore[no-untyped-call]
            return pick.run(call)
        return _pick(call).run(call)


# By exact shape: the choices of this process. A shape class may have many shapes, and a lookup must be quick.
_picks: dict[tuple[object, ...], _Pick] = {}
_measuring = threading.Lock()


def forget() -> None:
    """Choose again for every shape, from the disk or by measuring: for a process that moved its cache."""
    _picks.clear()


when_backends_change(forget)


def _pick(call: AttentionCall) -> _Pick:
    key = (
        call.q.device,
        call.q.dtype,
        call.q.shape,
        call.k.shape,
        call.layer.role,
        padding_class(call),
        call_features(call),
        None if call.mask is None else call.mask.shape,
        call.options.measure,
    )
    pick = _picks.get(key)
    if pick is None:
        with _measuring:
            pick, is_final = _pick_anew(call)
        if is_final:
            _picks[key] = pick
    return pick


def _pick_anew(call: AttentionCall) -> tuple[_Pick, bool]:
    """Who serves a call, and whether that holds for later ones: remembered, measured, or next best."""
    hardware = detect_hardware(str(call.q.device))
    requirements = requirements_of(call)
    able = [backend for backend in candidates(hardware) if not refusals(backend.name, requirements)]
    assert able, f"selection found something lossless that can serve {requirements}, and it is gone"
    if len(able) == 1:
        return _Pick(able[0], "only candidate"), True
    names = {backend.name: backend for backend in able}
    cache = MeasuredCache(machine_facts(hardware, able))
    kind = shape_class(call)
    choice = cache.read(kind)
    if choice is not None and choice.backend in names:
        return _Pick(names[choice.backend], "measured"), True
    if not call.options.measure:
        return _Pick(able[0], "not measured"), True
    if must_not_wait(call.q):
        return _Pick(able[0], "not measured"), False
    times = time_candidates(call, able)
    if not times:
        return _Pick(able[0], "not measured"), False
    fastest = min(times, key=lambda name: times[name])
    choice = cache.write(kind, Choice(fastest, times))
    # Those of the file, which another process may have written meanwhile, with other backends left out than here.
    kept = sorted(choice.milliseconds.items(), key=lambda item: item[1])
    times_text = ", ".join(f"{name} {time:.3g} ms" for name, time in kept)
    _logger.info("measured attention for %s: %s", kind, times_text)
    # Of two processes that measured at once, the first decided.
    return _Pick(names.get(choice.backend, names[fastest]), "measured"), True
