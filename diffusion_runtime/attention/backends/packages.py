"""Backends whose kernels come from another package: found by its distribution, imported when a choice settles."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from diffusion_runtime.attention.backends.interface import AttentionRequirements, Availability, Backend
from diffusion_runtime.hardware import Hardware
from diffusion_runtime.kernels.importing import import_failure
from diffusion_runtime.kernels.importing import raised_line as raised_line


class ImportingBackend(Backend):
    """A backend that can be installed and broken all the same: its package may not fit this torch, CUDA or chip.

    distributions: those it may import, as the package index and Hardware.packages name them.
    """

    distributions: ClassVar[tuple[str, ...]]

    @abstractmethod
    def imported(self, requirements: AttentionRequirements) -> Availability:
        """The version that would serve `requirements` in this process, or why what is installed cannot, and the fix.

        Imports packages and may run one small call, so it is asked of the backend that is about to be chosen and of no
        other, where `probe` and the capability have nothing against it. requirements.hardware: of this process.
        """


class PackageBackend(ImportingBackend):
    """A backend that needs one distribution.

    distribution: as the package index and Hardware.packages name it. module: what `run` imports of it, and functions:
    the names it takes from there. install: the command that brings it. compiled_ahead: whether its kernels came
    compiled, for certain chips and one torch: then one small call, of a millisecond, tells whether they are there. What
    compiles at its first call takes seconds, FlashInfer 84 on an H200.
    """

    distribution: ClassVar[str]
    module: ClassVar[str]
    functions: ClassVar[tuple[str, ...]] = ()
    install: ClassVar[str]
    compiled_ahead: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "distribution" in cls.__dict__:
            cls.distributions = (cls.distribution,)

    def probe(self, hardware: Hardware) -> Availability:
        version = hardware.packages.get(self.distribution)
        if version is None:
            return Availability(None, f"package {self.distribution!r} is not installed", self.install)
        return Availability(version)

    def versions(self, hardware: Hardware) -> str:
        return f"{self.distribution} {hardware.packages[self.distribution]}"

    def is_compiled_ahead(self, hardware: Hardware) -> bool:  # noqa: ARG002
        """`compiled_ahead` of the version that is installed."""
        return self.compiled_ahead

    def imported(self, requirements: AttentionRequirements) -> Availability:
        failure, problem = import_failure(self.module, *self.functions), "cannot be imported"
        if failure is None and self.is_compiled_ahead(requirements.hardware):
            # Imported here: it needs torch, which a listing for another machine does not.
            from diffusion_runtime.attention.backends.trial import trial_failure

            failure, problem = (
                trial_failure(self, requirements),
                f"cannot compute on {requirements.hardware.describe()}",
            )
        found = self.probe(requirements.hardware)
        if failure is None:
            return found
        return Availability(
            None,
            f"package {self.distribution!r} {found.version or ''} is installed and {problem}: {failure}",
            f"install it again for this torch and CUDA ({self.install}), or remove it",
        )


def unaskable(backend: Backend, error: BaseException) -> str:
    """Why a backend is refused whose own probe or capability raises; the class's path says whose package it is."""
    return f"{type(backend).__module__}.{type(backend).__qualname__} cannot be asked: {raised_line(error)}"
