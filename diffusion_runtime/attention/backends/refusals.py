"""Refusals: every reason why a backend cannot serve a layer, a failed self-check of this process included."""

from __future__ import annotations

from diffusion_runtime.attention.backends.capability import AttentionRequirements
from diffusion_runtime.attention.backends.interface import Availability, Backend
from diffusion_runtime.attention.backends.packages import ImportingBackend
from diffusion_runtime.attention.backends.registry import available_names, broken_backends, find_backend
from diffusion_runtime.startup.importing import raised_line

# Of self-checks that failed. Known to the whole process, as a package that cannot be imported is.
_reasons: dict[tuple[str, int, str], str] = {}


def found_wrong(name: str, head_dim: int, dtype: str) -> str | None:
    """Return why the backend is refused, None when nothing is known against it. name: canonical; dtype: as in
    `bfloat16`."""
    return _reasons.get((name, head_dim, dtype))


def remember_wrong(name: str, head_dim: int, dtype: str, reason: str) -> None:
    _reasons[name, head_dim, dtype] = reason


def forget_wrong() -> None:
    """Forget all reasons: for a process in which a package was exchanged."""
    _reasons.clear()


def refusals(name: str, requirements: AttentionRequirements) -> list[str]:
    """Every reason why the backend `name` cannot serve `requirements`; empty when it can.

    Where there is no other reason and the requirements are those of this process's machine, its package is
    imported, and kernels that came compiled are tried, once per process: one that is installed and broken is refused
    like any other, and so is one that raises when asked, and one that a self-check of this process found wrong. A
    package that compiles its kernels itself, and imported here before, is not imported again (`importable`).
    """
    backend = find_backend(name)
    if backend is None:
        broken = broken_backends().get(name)
        return [broken or f"this version does not have it; it has {', '.join(available_names())}"]
    try:
        return _refusals(backend, requirements)
    except Exception as error:  # whatever a third-party probe or capability raises
        return [unaskable(backend, error)]


def _refusals(backend: Backend, requirements: AttentionRequirements) -> list[str]:
    availability = backend.probe(requirements.hardware)
    reasons = []
    if availability.version is None:
        reasons.append(_with_fix(availability))
    reasons += backend.capability.refusals(requirements)
    if not reasons and requirements.hardware.is_here and isinstance(backend, ImportingBackend):
        availability = backend.importable(requirements)
        if availability.version is None:
            reasons.append(_with_fix(availability))
    if not reasons and requirements.hardware.is_here and not requirements.unchecked:
        wrong = found_wrong(backend.name, requirements.head_dim, requirements.dtype)
        reasons += [] if wrong is None else [wrong]
    return reasons


def _with_fix(availability: Availability) -> str:
    return availability.reason + (f"; fix: {availability.fix}" if availability.fix else "")


def unaskable(backend: Backend, error: BaseException) -> str:
    """Return why a backend is refused whose own probe or capability raises; the class's path names its package."""
    return f"{type(backend).__module__}.{type(backend).__qualname__} cannot be asked: {raised_line(error)}"
