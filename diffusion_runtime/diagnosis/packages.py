"""Package check: what is installed, and whether it can be imported. Each is imported in a subprocess, where a crash is
a finding."""

from __future__ import annotations

import importlib.metadata
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from diffusion_runtime.attention.backends.packages import PackageBackend
from diffusion_runtime.attention.backends.registry import available_names, find_backend
from diffusion_runtime.core.hardware import ATTENTION_PACKAGES
from diffusion_runtime.decoders.diffusers_import import IMPORTED_BY_DIFFUSERS, blocking_package
from diffusion_runtime.diagnosis.problems import Problem

# CuTe packages take long at the first import; a longer one counts as a hang.
IMPORT_SECONDS = 180.0
_NUM_PROCESSES = 2

# Packages that load models and write files, in addition to torch; accelerate is for diffusers' own pipelines.
NEEDED = ("diffusers", "transformers", "accelerate", "safetensors", "imageio-ffmpeg")
PACKAGES = (*NEEDED, *ATTENTION_PACKAGES)

# Some packages catch what their kernels raise at import: the functions we call must exist too.
_IMPORT = "import importlib, sys; m = importlib.import_module(sys.argv[1]); [getattr(m, name) for name in sys.argv[2:]]"
# The package is needed for the ffmpeg binary that it contains, so that is checked.
_RUN_FFMPEG = "import imageio_ffmpeg; print('ffmpeg', imageio_ffmpeg.get_ffmpeg_version())"


@dataclass(frozen=True)
class PackageCheck:
    """name: on the package index; version: None when it is not installed; error: why it cannot be imported, else empty;
    crashed: importing it ends the process; is_unfinished: importing it did not end in the time there was; detail:
    further output; is_needed: whether it is a required dependency of this package; install: the command that installs
    it."""

    name: str
    version: str | None
    error: str = ""
    crashed: bool = False
    is_unfinished: bool = False
    detail: str = ""
    is_needed: bool = False
    install: str = ""

    @property
    def state(self) -> str:
        """`ok`, `broken`, `not looked at` or `not installed`."""
        if self.version is None:
            return "not installed"
        if self.is_unfinished:
            return "not looked at"
        return "broken" if self.error else "ok"

    def to_dict(self) -> dict[str, str | bool | None]:
        return {
            "name": self.name,
            "version": self.version,
            "state": self.state,
            "error": self.error,
            "crashed": self.crashed,
            "detail": self.detail,
            "is_needed": self.is_needed,
        }


def check_packages(on_package: Callable[[str], None], seconds: float | None = None) -> list[PackageCheck]:
    """Check every package of PACKAGES; on_package is called with each name before its import. seconds: for all imports
    together, those that take longer are unfinished; None waits for each, up to IMPORT_SECONDS."""
    deadline = None if seconds is None else time.monotonic() + seconds
    backends = _package_backends()
    checks = []
    with ThreadPoolExecutor(_NUM_PROCESSES) as pool:
        installed = {name: version for name in PACKAGES if (version := _installed_version(name)) is not None}
        modules = {name: backends[name].module if name in backends else name.replace("-", "_") for name in installed}
        functions = {name: backends[name].functions if name in backends else () for name in installed}
        imports = {
            name: pool.submit(_import_apart, name, modules[name], functions[name], deadline) for name in installed
        }
        for name in PACKAGES:
            imported = _Import()
            if name in installed:
                on_package(name)
                imported = imports[name].result()
            install = backends[name].install if name in backends else f"pip install --force-reinstall {name}"
            checks.append(
                PackageCheck(
                    name=name,
                    version=installed.get(name),
                    error=imported.error,
                    crashed=imported.crashed,
                    is_unfinished=imported.is_unfinished,
                    detail=imported.output,
                    is_needed=name in NEEDED,
                    install=install,
                )
            )
    return checks


def package_problems(checks: list[PackageCheck]) -> list[Problem]:
    """Packages that are broken, and required ones that are missing. A missing optional one is no problem."""
    versions = {check.name: check.version for check in checks if check.version is not None}
    problems = []
    for check in checks:
        if check.state == "broken" and check.name in IMPORTED_BY_DIFFUSERS:
            problems.append(Problem(*blocking_package(check.name, versions, check.error), is_failure=True))
        elif check.state == "broken":
            what = f"package {check.name} {check.version} is installed and cannot be imported: {check.error}"
            fix = check.install if check.is_needed else f"pip uninstall {check.name}, or again: {check.install}"
            problems.append(Problem(what, fix))
        elif check.is_needed and check.version is None:
            problems.append(Problem(f"package {check.name} is not installed", check.install))
    return problems


def _package_backends() -> dict[str, PackageBackend]:
    """Return the backends that need one package, by its distribution: each declares which functions it calls."""
    found = [find_backend(name) for name in available_names()]
    return {backend.distribution: backend for backend in found if isinstance(backend, PackageBackend)}


def _installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True)
class _Import:
    """error: empty when it worked; crashed: the process was killed; is_unfinished: it was ended at the deadline;
    output: what it printed."""

    error: str = ""
    crashed: bool = False
    is_unfinished: bool = False
    output: str = ""


def _import_apart(name: str, module: str, functions: tuple[str, ...], deadline: float | None) -> _Import:
    """Import a package, and the functions that backends call, in a subprocess. deadline: of time.monotonic."""
    seconds = IMPORT_SECONDS if deadline is None else min(IMPORT_SECONDS, deadline - time.monotonic())
    if seconds <= 0:
        return _Import(is_unfinished=True)
    asks_version = name == "imageio-ffmpeg"
    try:
        # -P: the working folder is not on the search path, as for the installed command.
        done = subprocess.run(
            [sys.executable, "-P", "-W", "ignore", "-c", _RUN_FFMPEG if asks_version else _IMPORT, module, *functions],
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        if seconds < IMPORT_SECONDS:
            return _Import(is_unfinished=True)
        return _Import(f"importing {module} takes longer than {IMPORT_SECONDS:.0f} s", crashed=True)
    if done.returncode == 0:
        return _Import(output=done.stdout.strip().partition("\n")[0] if asks_version else "")
    if done.returncode < 0:
        return _Import(f"importing {module} ends the process with {_signal_name(-done.returncode)}", crashed=True)
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    if not lines:
        return _Import(f"importing {module} ends the process with exit code {done.returncode}", crashed=True)
    return _Import(lines[-1])


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
