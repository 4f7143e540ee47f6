"""Runs all checks of one machine, in order, and collects the problems."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from diffusion_runtime.attention.backends.packages import ImportingBackend
from diffusion_runtime.attention.backends.registry import find_backend
from diffusion_runtime.attention.catalogue import BackendInfo, list_backends, missing_names
from diffusion_runtime.attention.config import AttentionSpec
from diffusion_runtime.attention.select import ENVIRONMENT_VARIABLE
from diffusion_runtime.attention.self_test import SelfTestResult, device_answers, planned_tests, run_self_test
from diffusion_runtime.core.hardware import Hardware, detect_hardware, resolve_device
from diffusion_runtime.denoising.diffusers_import import IMPORTED_BY_DIFFUSERS
from diffusion_runtime.diagnosis.embedded_model import ModelCheck, check_model, model_problems
from diffusion_runtime.diagnosis.machine import (
    DiskCheck,
    Machine,
    check_disk,
    disk_problems,
    inspect_machine,
    machine_problems,
)
from diffusion_runtime.diagnosis.packages import PackageCheck, check_packages, package_problems
from diffusion_runtime.diagnosis.problems import Problem
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.models.model_sources import EMBEDDED_FOLDER
from diffusion_runtime.startup.importing import raised_line

# Called with a stage, and with the item of it that is under way.
OnProgress = Callable[[str, str], None]


@dataclass(frozen=True)
class Diagnosis:
    """device: what was tested on, None when it cannot be used. problems: the worst first."""

    machine: Machine
    device: str | None
    hardware: Hardware | None
    packages: tuple[PackageCheck, ...]
    disk: DiskCheck
    model: ModelCheck
    self_tests: tuple[SelfTestResult, ...]
    problems: tuple[Problem, ...]

    @property
    def exit_code(self) -> int:
        return int(any(problem.is_failure for problem in self.problems))

    def to_dict(self) -> dict[str, Any]:
        return {
            "machine": self.machine.to_dict(),
            "device": self.device,
            "platform": None if self.hardware is None else self.hardware.platform,
            "packages": [check.to_dict() for check in self.packages],
            "disk": self.disk.to_dict(),
            "model": self.model.to_dict(),
            "self_tests": [result.to_dict() for result in self.self_tests],
            "problems": [problem.to_dict() for problem in self.problems],
            "exit_code": self.exit_code,
        }


def examine(device: str, requested: Sequence[str], output_folder: Path, on_progress: OnProgress) -> Diagnosis:
    """Run every check. requested: canonical names of backends that must work; empty tests every usable one.

    Raises ConfigError for a device string that is none.
    """
    on_progress("reading the machine", "")
    machine = inspect_machine()
    problems = machine_problems(machine)
    hardware, device_name, missing = _find_device(device)
    problems += missing
    packages = check_packages(lambda name: on_progress("importing packages", name))
    problems += package_problems(packages)
    disk = check_disk(output_folder)
    problems += disk_problems(disk)
    on_progress("loading the embedded model", "")
    # The libraries that load it import whatever packages they find installed.
    blocked = any(check.crashed or (check.error and check.name in IMPORTED_BY_DIFFUSERS) for check in packages)
    model = ModelCheck(str(EMBEDDED_FOLDER), 0, 0, was_run=False) if blocked else check_model()
    problems += model_problems(model)
    results: list[SelfTestResult] = []
    if hardware is not None and device_name is not None:
        backends = _list_backends(hardware, packages)
        problems += _choice_problems(backends, requested)
        names = [info.name for info in backends if info.usable and (not requested or info.name in requested)]
        results, failed = _test_all(names, hardware, device_name, on_progress)
        problems += failed
    worst_first = sorted(problems, key=lambda problem: not problem.is_failure)
    return Diagnosis(machine, device_name, hardware, tuple(packages), disk, model, tuple(results), tuple(worst_first))


def _find_device(device: str) -> tuple[Hardware | None, str | None, list[Problem]]:
    """A device that is not there is a finding; a string that names no device is a usage error."""
    if device != "auto":
        try:
            torch.device(device)
        except RuntimeError:
            resolve_device(device)
    try:
        found = str(resolve_device(device))
        return detect_hardware(found), found, []
    except ConfigError as error:
        return None, None, [Problem(str(error), "diffusion-runtime doctor --device auto", is_failure=True)]
    except Exception as error:  # any exception: a driver may start and then fail
        what = f"device {device!r} cannot be used: {raised_line(error)}"
        return None, None, [Problem(what, "nvidia-smi, and look at the problems above", is_failure=True)]


def _list_backends(hardware: Hardware, packages: Sequence[PackageCheck]) -> list[BackendInfo]:
    """list_backends for this machine; a package whose import kills a process is not imported in this one."""
    crashed = {check.name: check for check in packages if check.crashed}
    infos = list_backends(hardware, importing=not crashed)
    return [_refuse_crashed(info, crashed) for info in infos] if crashed else infos


def _refuse_crashed(info: BackendInfo, crashed: Mapping[str, PackageCheck]) -> BackendInfo:
    backend = find_backend(info.name)
    if not info.usable or not isinstance(backend, ImportingBackend):
        return info
    # A backend that chooses among several packages might choose the one that crashes.
    needed = [crashed[name] for name in backend.distributions if name in crashed]
    reason = "; ".join(f"package {check.name} {check.version}: {check.error}" for check in needed)
    return replace(info, version=None, reason=reason, fix=needed[0].install) if needed else info


def _choice_problems(backends: Sequence[BackendInfo], requested: Sequence[str]) -> list[Problem]:
    """Backends that were chosen, on this command line or in the environment, and that cannot run."""
    reasons = {info.name: (info.reason, info.fix) for info in backends if not info.usable}
    reasons |= dict.fromkeys(missing_names(), ("this version does not have it", ""))
    problems = [
        Problem(f"backend {name} cannot run here: {reasons[name][0]}", _fix(reasons[name][1]), is_failure=True)
        for name in requested
        if name in reasons
    ]
    chosen = os.environ.get(ENVIRONMENT_VARIABLE)
    if chosen:
        unset = f"unset {ENVIRONMENT_VARIABLE}"
        try:
            candidates = AttentionSpec(chosen).candidates
        except ConfigError as error:
            return [*problems, Problem(f"{ENVIRONMENT_VARIABLE}: {error}", unset)]
        if candidates and all(name in reasons for name in candidates):
            why = "; ".join(f"{name}: {reasons[name][0]}" for name in candidates)
            problems.append(Problem(f"{ENVIRONMENT_VARIABLE} is {chosen!r}, which cannot run here: {why}", unset))
    return problems


def _fix(fix: str) -> str:
    return fix or "diffusion-runtime backends, and choose one that is usable"


def _test_all(
    names: Sequence[str], hardware: Hardware, device: str, on_progress: OnProgress
) -> tuple[list[SelfTestResult], list[Problem]]:
    """Every self-test of `names`, until one of them makes the device unusable."""
    results: list[SelfTestResult] = []
    problems: list[Problem] = []
    for name in names:
        tests = planned_tests(name, hardware)
        for number, test in enumerate(tests, 1):
            on_progress(f"testing {name}", f"{number}/{len(tests)} {test.title}")
            results.append(run_self_test(test, device))
            if not results[-1].passed and not device_answers(device):
                what = f"backend {name} made the device unusable ({test.title}); the tests after it were not run"
                others = ",".join(other for other in names if other != name)
                fix = f"diffusion-runtime doctor --attention-backend {others}" if others else "restart the device"
                return results, [*problems, *_test_problems(results, name), Problem(what, fix, is_failure=True)]
        problems += _test_problems(results, name)
    return results, problems


def _test_problems(results: Sequence[SelfTestResult], name: str) -> list[Problem]:
    """One problem per backend, however many of its tests fail: most faults show in all of them."""
    tested = [result for result in results if result.test.backend == name]
    failed = [result for result in tested if not result.passed]
    if not failed:
        return []
    first = failed[0]
    what = (
        f"backend {name} fails {len(failed)} of {len(tested)} self-tests; the first ({first.test.title}): "
        f"{first.problem}"
    )
    fix = f"reinstall what {name} runs on, or choose another with --attention-backend; see diffusion-runtime backends"
    return [Problem(what, fix, is_failure=True)]
