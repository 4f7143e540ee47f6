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
from diffusion_runtime.decoders.diffusers_import import IMPORTED_BY_DIFFUSERS
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
from diffusion_runtime.diagnosis.problems import LeftOut, Problem, TimeBudget
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.models.model_sources import EMBEDDED_FOLDER
from diffusion_runtime.startup.importing import raised_line

# Called with a stage, and with the item of it that is under way.
OnProgress = Callable[[str, str], None]


@dataclass(frozen=True)
class Diagnosis:
    """device: what was tested on, None when it cannot be used. problems: the worst first. left_out: checks for which
    there was no time."""

    machine: Machine
    device: str | None
    hardware: Hardware | None
    packages: tuple[PackageCheck, ...]
    disk: DiskCheck
    model: ModelCheck
    self_tests: tuple[SelfTestResult, ...]
    problems: tuple[Problem, ...]
    left_out: tuple[LeftOut, ...] = ()

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
            "left_out": [each.to_dict() for each in self.left_out],
            "exit_code": self.exit_code,
        }


def examine(
    device: str,
    requested: Sequence[str],
    output_folder: Path,
    on_progress: OnProgress,
    budget: TimeBudget | None = None,
) -> Diagnosis:
    """Run every check that fits in `budget`, all of them without one.

    requested: canonical names of backends that must work, which are tested however long it takes; empty tests every
    usable one. Raises ConfigError for a device string that is none.
    """
    budget = budget if budget is not None and not requested else TimeBudget(None)
    on_progress("reading the machine", "")
    machine = inspect_machine()
    problems = machine_problems(machine)
    hardware, device_name, missing = _find_device(device)
    problems += missing
    packages = check_packages(lambda name: on_progress("importing packages", name), budget.import_seconds)
    left_out = [
        LeftOut(f"the import of {check.name}", "the time for imports was over")
        for check in packages
        if check.is_unfinished
    ]
    problems += package_problems(packages)
    disk = check_disk(output_folder)
    problems += disk_problems(disk)
    on_progress("loading the embedded model", "")
    # The libraries that load it import whatever packages they find installed.
    blocked = any(
        check.crashed or ((check.error or check.is_unfinished) and check.name in IMPORTED_BY_DIFFUSERS)
        for check in packages
    )
    model = ModelCheck(str(EMBEDDED_FOLDER), 0, 0, was_run=False) if blocked else check_model()
    problems += model_problems(model)
    results: list[SelfTestResult] = []
    if hardware is not None and device_name is not None:
        backends = _list_backends(hardware, packages, importing=not budget.is_limited)
        problems += _choice_problems(backends, requested)
        names = [info.name for info in backends if info.usable and (not requested or info.name in requested)]
        results, failed, untested = _test_all(names, hardware, device_name, on_progress, budget)
        problems += failed
        left_out += untested
    worst_first = sorted(problems, key=lambda problem: not problem.is_failure)
    return Diagnosis(
        machine,
        device_name,
        hardware,
        tuple(packages),
        disk,
        model,
        tuple(results),
        tuple(worst_first),
        tuple(left_out),
    )


def _find_device(device: str) -> tuple[Hardware | None, str | None, list[Problem]]:
    """Find the device: one that is not there is a finding; a string that names no device is a usage error."""
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


def _list_backends(hardware: Hardware, packages: Sequence[PackageCheck], *, importing: bool) -> list[BackendInfo]:
    """list_backends for this machine. importing: also import their packages in this process, unless the import of one
    kills a process; without it, what their imports in other processes led to is known and enough."""
    importing = importing and not any(check.crashed for check in packages)
    infos = list_backends(hardware, importing=importing)
    failed = {
        check.name: check
        for check in packages
        if check.crashed or check.is_unfinished or (check.error and not importing)
    }
    return [_refuse_failed(info, failed) for info in infos] if failed else infos


def _refuse_failed(info: BackendInfo, failed: Mapping[str, PackageCheck]) -> BackendInfo:
    backend = find_backend(info.name)
    if not info.usable or not isinstance(backend, ImportingBackend):
        return info
    # A backend that chooses among several packages might choose the one that crashes.
    needed = [failed[name] for name in backend.distributions if name in failed]
    reason = "; ".join(f"package {check.name} {check.version}: {check.error or check.state}" for check in needed)
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
    names: Sequence[str], hardware: Hardware, device: str, on_progress: OnProgress, budget: TimeBudget
) -> tuple[list[SelfTestResult], list[Problem], list[LeftOut]]:
    """Run every self-test of `names` that fits in the budget, until one of them makes the device unusable."""
    results: list[SelfTestResult] = []
    problems: list[Problem] = []
    left_out: list[LeftOut] = []
    for name in names:
        tests = planned_tests(name, hardware)
        if budget.is_limited and tests and _compiles(name, hardware):
            left_out.append(LeftOut(f"backend {name}", "it compiles its kernels at the first call"))
            continue
        for number, test in enumerate(tests, 1):
            if budget.is_spent:
                what = f"{len(tests) - number + 1} of {len(tests)} tests of backend {name}"
                left_out.append(LeftOut(what, f"{budget.seconds:.0f} s were over"))
                break
            on_progress(f"testing {name}", f"{number}/{len(tests)} {test.title}")
            results.append(run_self_test(test, device))
            if not results[-1].passed and not device_answers(device):
                what = f"backend {name} made the device unusable ({test.title}); the tests after it were not run"
                others = ",".join(other for other in names if other != name)
                fix = f"diffusion-runtime doctor --attention-backend {others}" if others else "restart the device"
                failed = [*problems, *_test_problems(results, name), Problem(what, fix, is_failure=True)]
                return results, failed, left_out
        problems += _test_problems(results, name)
    return results, problems, left_out


def _compiles(name: str, hardware: Hardware) -> bool:
    backend = find_backend(name)
    return backend is not None and backend.compiles_at_first_call(hardware)


def _test_problems(results: Sequence[SelfTestResult], name: str) -> list[Problem]:
    """Return one problem per backend, however many of its tests fail: most faults show in all of them."""
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
