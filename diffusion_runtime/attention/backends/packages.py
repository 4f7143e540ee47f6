"""Backends whose kernels come from another package: found by its distribution, imported when a choice settles."""

from __future__ import annotations

import functools
import importlib
from abc import abstractmethod
from typing import ClassVar

from diffusion_runtime.attention.backends.interface import Availability, Backend
from diffusion_runtime.hardware import Hardware


class ImportingBackend(Backend):
    """A backend that can be installed and broken all the same: its package may not fit this torch or this CUDA."""

    @abstractmethod
    def import_error(self, hardware: Hardware) -> str | None:
        """Why this process cannot import what is installed; None when it can.

        Imports it, so it is asked of the backend that is about to be chosen and of no other. hardware: the machine of
        this process.
        """


class PackageBackend(ImportingBackend):
    """A backend that needs one distribution.

    distribution: as the package index and Hardware.packages name it. module: what `run` imports of it. install: the
    command that brings it.
    """

    distribution: ClassVar[str]
    module: ClassVar[str]
    install: ClassVar[str]

    def probe(self, hardware: Hardware) -> Availability:
        version = hardware.packages.get(self.distribution)
        if version is None:
            return Availability(None, f"package {self.distribution!r} is not installed", self.install)
        return Availability(version)

    def versions(self, hardware: Hardware) -> str:
        return f"{self.distribution} {hardware.packages[self.distribution]}"

    def import_error(self, hardware: Hardware) -> str | None:
        failure = import_failure(self.module)
        if failure is None:
            return None
        version = hardware.packages.get(self.distribution, "")
        return (
            f"package {self.distribution!r} {version} is installed and cannot be imported: {failure}; "
            f"fix: install it again for this torch and CUDA ({self.install}), or remove it"
        )


@functools.cache
def import_failure(module: str) -> str | None:
    """What importing `module` raises, in one line; None when it imports. Tried once a process."""
    try:
        importlib.import_module(module)
    except Exception as error:  # whatever a stranger's package raises when it is imported
        return raised_line(error)
    return None


def raised_line(error: BaseException) -> str:
    """`OSError: libbroken.so: cannot open shared object file`."""
    line = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def unaskable(backend: Backend, error: BaseException) -> str:
    """Why a backend is refused whose own probe or capability raises; the class's path says whose package it is."""
    return f"{type(backend).__module__}.{type(backend).__qualname__} cannot be asked: {raised_line(error)}"
