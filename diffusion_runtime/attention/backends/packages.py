"""Backends whose kernels come from another package: found by its distribution, imported when a choice is final."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from diffusion_runtime.attention.backends.capability import AttentionRequirements
from diffusion_runtime.attention.backends.interface import AttentionCall, Availability, Backend
from diffusion_runtime.attention.context import RequestCache
from diffusion_runtime.core.device_guard import device_guard
from diffusion_runtime.core.hardware import Hardware
from diffusion_runtime.core.step_info import LayerInfo, StepInfo
from diffusion_runtime.parallel.interface import AttentionInputs
from diffusion_runtime.startup.importing import first_call_functions, import_failure, raised_line
from diffusion_runtime.startup.remembered_imports import ImportCheck, forget, is_remembered, remember


class ImportingBackend(Backend):
    """A backend that can be installed and broken all the same: its package may not fit this torch, CUDA or chip.

    distributions: those it may import, as the package index and Hardware.packages name them.
    """

    distributions: ClassVar[tuple[str, ...]]

    def compiles_at_first_call(self, hardware: Hardware) -> bool:
        # Triton's kernels and those of CuTe; a CPU runs their references.
        return hardware.platform != "cpu"

    @abstractmethod
    def imported(self, requirements: AttentionRequirements) -> Availability:
        """The version that would serve `requirements` in this process, or why what is installed cannot, and the fix.

        Imports packages and may run one small call, so it is asked of the backend that is about to be chosen and of no
        other, where `probe` and the capability have nothing against it. requirements.hardware: of this process.
        """

    def importable(self, requirements: AttentionRequirements) -> Availability:
        """`imported`; without the import, which the first call makes, where one that passed here is remembered."""
        return self.imported(requirements)

    def import_ahead(self, requirements: AttentionRequirements) -> None:
        """Import what the first call imports, in a thread beside other work. Raises what that call would raise."""


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

    def compiles_at_first_call(self, hardware: Hardware) -> bool:
        return super().compiles_at_first_call(hardware) and not self.is_compiled_ahead(hardware)

    def imported(self, requirements: AttentionRequirements) -> Availability:
        failure, problem = import_failure(self.module, *self.functions), "cannot be imported"
        check = self._import_check(requirements.hardware)
        if failure is None:
            remember(check)
        else:
            forget(self.module)
        if failure is None and self.is_compiled_ahead(requirements.hardware):
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

    def importable(self, requirements: AttentionRequirements) -> Availability:
        hardware = requirements.hardware
        # Kernels that came compiled are tried in every process, for which they are imported.
        if not self.is_compiled_ahead(hardware) and is_remembered(self._import_check(hardware)):
            return self.probe(hardware)
        return self.imported(requirements)

    def import_ahead(self, requirements: AttentionRequirements) -> None:  # noqa: ARG002
        if self.functions:
            self.first_call_functions()

    def first_call_functions(self) -> tuple[Callable[..., Any], ...]:
        """`functions` of the package, imported unless they are. Raises BackendUnavailableError."""
        return first_call_functions(self.name, self.module, *self.functions)

    def _import_check(self, hardware: Hardware) -> ImportCheck:
        return ImportCheck(self.distribution, self.module, self.functions, hardware.describe())


# Queries and keys of the trial call: more than one tile of any kernel, so that none takes its path for short ones.
_SEQ = 256


def trial_failure(backend: Backend, requirements: AttentionRequirements) -> str | None:
    """Return what one small call of the requirements' dtype and head size raises, in one line; None when it computes.

    None as well where this process has no device with that chip, and nothing can be tried.
    """
    device = device_with_chip(requirements.hardware)
    return None if device is None else _failure(backend, device, requirements.dtype, requirements.head_dim)


def device_with_chip(hardware: Hardware) -> torch.device | None:
    """A device of this process with the chip of `hardware`; None where torch has none."""
    if not torch.cuda.is_available():
        return None
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    chips = [None if torch.version.hip else torch.cuda.get_device_capability(device) for device in devices]
    return next((device for device, chip in zip(devices, chips, strict=True) if chip == hardware.capability), None)


@functools.cache
def _failure(backend: Backend, device: torch.device, dtype: str, head_dim: int) -> str | None:
    try:
        # Choices are made where transformers are built, on the meta device, which packages must not see.
        with torch.device("cpu"), torch.no_grad(), device_guard(device):
            q = torch.zeros(1, _SEQ, 1, head_dim, dtype=getattr(torch, dtype), device=device)
            call = AttentionCall(
                AttentionInputs(q, q.clone(), q.clone()),
                backend.options_type(),
                LayerInfo(),
                StepInfo(),
                RequestCache(),
            )
            # What a kernel that was built for another chip raises may come where its result is waited for.
            backend.run(call).out.cpu()
    except Exception as error:  # whatever a third-party kernel raises
        return raised_line(error)
    return None
