"""Machines made by hand: every platform that selection knows, with the packages and programs a test puts there."""

from __future__ import annotations

from diffusion_runtime.attention.backends.packages import ImportingBackend
from diffusion_runtime.attention.backends.registry import available_names, find_backend
from diffusion_runtime.core.hardware import Hardware

# Versions that tests rely on.
_VERSIONS = {
    "triton": "3.6.0",
    "flash-attn": "2.8.3",
    "flash-attn-3": "3.0.0b1",
    "flash-attn-4": "4.0.0b36",
    "flashinfer-python": "0.6.1",
    "sageattention": "2.2.0",
    "sageattn3": "1.0.0",
    "xformers": "0.0.35",
    "amd-aiter": "0.1.18",
}
# What a well-kept machine of any kind has installed: all that backends say they import.
EVERYTHING = {
    distribution: "1.0"
    for backend in map(find_backend, available_names())
    if isinstance(backend, ImportingBackend)
    for distribution in backend.distributions
} | _VERSIONS


def cuda(
    capability: tuple[int, int],
    *packages: str,
    cudnn: tuple[int, int] | None = (9, 15),
    programs: tuple[str, ...] = ("nvcc", "g++"),
    **versions: str,
) -> Hardware:
    """An NVIDIA GPU. packages: of EVERYTHING; versions: of those that differ, with `_` for `-`."""
    found = {name: EVERYTHING[name] for name in packages}
    found |= {name.replace("_", "-"): version for name, version in versions.items()}
    return Hardware("cuda", "an NVIDIA GPU", capability, cudnn, "2.13.0", found, frozenset(programs))


def other(platform: str, *packages: str, programs: tuple[str, ...] = ()) -> Hardware:
    """A device that is not NVIDIA's."""
    found = {name: EVERYTHING[name] for name in packages}
    return Hardware(platform, platform, None, None, "2.13.0", found, frozenset(programs))
