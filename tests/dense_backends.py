"""The backends, dense and sparse, as the registry has them: what the tests of backends walk through.

A new backend is here as soon as it is registered, and is held to all that it declares.
"""

from __future__ import annotations

from machines import EVERYTHING, cuda, other

from diffusion_runtime.attention import list_backends
from diffusion_runtime.attention.backends.interface import Backend, NoOptions
from diffusion_runtime.attention.backends.registry import available_names, find_backend
from diffusion_runtime.attention.sparse.interface import SparseBackend
from diffusion_runtime.core.hardware import Hardware, detect_hardware

# Compiled, a minute each on a CPU: tests of its own.
COMPILED = {"flex_attn"}
# Of every kind, with all packages; a backend is judged on the first that it can be used on.
MACHINES = (
    other("cpu", programs=("g++",)),
    cuda((9, 0), *EVERYTHING),
    cuda((10, 0), *EVERYTHING),
    cuda((12, 0), *EVERYTHING),
    other("rocm", *EVERYTHING),
    other("mps", *EVERYTHING),
)


def the(name: str) -> Backend:
    backend = find_backend(name)
    assert backend is not None, name
    return backend


ALL = available_names()
DENSE = tuple(name for name in ALL if the(name).options_type is NoOptions)
SPARSE = tuple(name for name in ALL if isinstance(the(name), SparseBackend))
# Those whose numbers can be had here, on a CPU; those that round have tests of their own.
HERE = tuple(
    info.name
    for info in list_backends(detect_hardware("cpu"))
    if info.usable and info.name in DENSE and info.name not in COMPILED and the(info.name).lossless
)


def declares(name: str, *features: str) -> bool:
    """Whether a backend of HERE has all of them; what it has not is refused: test_backends_declared.py."""
    return set(features) <= the(name).capability.features


def homes() -> dict[str, Hardware]:
    """A machine for every dense backend that can be used on one of MACHINES."""
    usable = [(machine, {info.name for info in list_backends(machine) if info.usable}) for machine in MACHINES]
    found = {name: [machine for machine, names in usable if name in names] for name in DENSE}
    return {name: machines[0] for name, machines in found.items() if machines}
