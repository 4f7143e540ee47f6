"""Machine check: Python, torch and its CUDA build, NVIDIA driver, GPUs, disk; and whether they fit each other."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from diffusion_runtime.diagnosis.problems import Problem

Version = tuple[int, int]

# The oldest Linux driver for each CUDA generation: NVIDIA, CUDA Compatibility, "minor version compatibility".
_OLDEST_DRIVER = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
_TORCH_INDEX = "https://download.pytorch.org/whl"
# A minute of video is tens of megabytes; below this a batch may end on a full disk.
ENOUGH_BYTES = 2**30


@dataclass(frozen=True)
class Driver:
    """The NVIDIA driver. version: such as `580.65.06`, empty when unknown; cuda: the newest CUDA it supports; gpus: the
    names of its GPUs."""

    version: str
    cuda: Version
    gpus: tuple[str, ...]


@dataclass(frozen=True)
class Gpu:
    """A GPU that torch can use. Memory in bytes."""

    name: str
    capability: Version
    total_memory: int
    free_memory: int


@dataclass(frozen=True)
class Machine:
    """python: its version, executable: its path. num_cpus: that this process may use; memory: bytes of RAM, None when
    it is unknown. torch_build: `CPU`, `CUDA 13.0` or `ROCm 7.0`; cuda_build: None for other builds.
    architectures: what torch's own kernels are built for, such as `sm_90`. driver: None without one.
    gpus: that torch can use; cuda_error: why it can use none although the driver is there.
    visible_devices: CUDA_VISIBLE_DEVICES, None when it is not set.
    """

    python: str
    executable: str
    system: str
    num_cpus: int
    memory: int | None
    torch_version: str
    torch_build: str
    cuda_build: Version | None = None
    architectures: tuple[str, ...] = ()
    driver: Driver | None = None
    gpus: tuple[Gpu, ...] = ()
    cuda_error: str = ""
    visible_devices: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def inspect_machine() -> Machine:
    """Return the facts of this machine. Raises nothing: what cannot be read is left out."""
    gpus, cuda_error = _gpus()
    return Machine(
        python=platform.python_version(),
        executable=sys.executable,
        system=f"{platform.system()} {platform.machine()}",
        num_cpus=len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1,
        memory=_memory(),
        torch_version=torch.__version__,
        torch_build=_torch_build(),
        cuda_build=None if torch.version.cuda is None else parse_version(torch.version.cuda),
        architectures=tuple(torch.cuda.get_arch_list()),
        driver=_driver(),
        gpus=gpus,
        cuda_error=cuda_error,
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )


def machine_problems(machine: Machine) -> list[Problem]:
    """Return why torch cannot use GPUs that are present. A machine without a GPU has no problem."""
    driver, build = machine.driver, machine.cuda_build
    if driver is None or not driver.gpus:
        return []
    if build is None and not machine.torch_build.startswith("ROCm"):
        what = f"torch {machine.torch_version} is a build for the CPU; the driver sees {', '.join(driver.gpus)}"
        return [Problem(what, f"pip install --force-reinstall torch --index-url {_index(driver)}")]
    if build is None:
        return []
    if driver.cuda[0] < build[0]:
        what = (
            f"the NVIDIA driver {driver.version} supports CUDA up to {_dotted(driver.cuda)}, torch "
            f"{machine.torch_version} is built for CUDA {_dotted(build)}"
        )
        oldest = _OLDEST_DRIVER.get(build[0], "the newest")
        fix = f"update the driver to {oldest} or newer, or: pip install --force-reinstall torch --index-url "
        return [Problem(what, fix + _index(driver))]
    if not machine.gpus:
        seen = ", ".join(driver.gpus)
        if machine.visible_devices is not None:
            what = f"CUDA_VISIBLE_DEVICES is {machine.visible_devices!r}, which hides {seen} from torch"
            return [Problem(what, "unset CUDA_VISIBLE_DEVICES")]
        what = f"the driver sees {seen}, torch does not: {machine.cuda_error or 'no reason was given'}"
        return [Problem(what, "nvidia-smi; in a container, start it with --gpus all")]
    return [
        Problem(
            f"torch {machine.torch_version} has no kernels for {gpu.name} (sm_{gpu.capability[0]}{gpu.capability[1]}); "
            f"it has {', '.join(machine.architectures)}",
            f"pip install --upgrade torch --index-url {_index(driver)}",
        )
        for gpu in machine.gpus
        if not runs_on(machine.architectures, gpu.capability)
    ]


def runs_on(architectures: tuple[str, ...], capability: Version) -> bool:
    """Return True if kernels built for `architectures` run on a chip: its own generation up to its minor number
    (`sm_80` on 8.6; not `sm_90a`, which is for 9.0 alone), or an older `compute_` that the driver compiles."""
    for architecture in architectures:
        kind, _, number = architecture.partition("_")
        digits = number.rstrip("af")
        if not digits.isdigit():
            continue
        built = (int(digits[:-1]), int(digits[-1]))
        exact_only = number.endswith("a")
        if kind == "sm" and (built == capability if exact_only else built[0] == capability[0] and built <= capability):
            return True
        if kind == "compute" and not exact_only and built <= capability:
            return True
    # Builds that list no architecture, such as those of distributions, are assumed to work.
    return not architectures


def parse_version(text: str) -> Version:
    """`13.0` or `12.8.1` as (major, minor)."""
    major, _, rest = text.partition(".")
    return int(major), int(rest.partition(".")[0] or 0)


def _dotted(version: Version) -> str:
    return f"{version[0]}.{version[1]}"


def _index(driver: Driver) -> str:
    """Return the package index of torch builds that this driver supports."""
    return f"{_TORCH_INDEX}/{'cu130' if driver.cuda[0] >= 13 else 'cu126'}"


def _torch_build() -> str:
    if torch.version.cuda is not None:
        return f"CUDA {torch.version.cuda}"
    return "CPU" if torch.version.hip is None else f"ROCm {torch.version.hip}"


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _driver() -> Driver | None:
    """Read from the driver's own library (NVML), which works without a context and with any build of torch."""
    for name in ("libcuda.so.1", "nvcuda.dll"):
        try:
            library = ctypes.CDLL(name)
            break
        except OSError:
            continue
    else:
        return None
    number = ctypes.c_int(0)
    if library.cuDriverGetVersion(ctypes.byref(number)) != 0 or number.value == 0:
        return None
    rows = [line.split(", ", 1) for line in _ask_nvidia_smi()]
    gpus = tuple(row[1] for row in rows if len(row) == 2)
    return Driver(rows[0][0] if gpus else "", (number.value // 1000, number.value % 1000 // 10), gpus)


def _ask_nvidia_smi() -> list[str]:
    """`580.65.06, NVIDIA H200`, one line per GPU; empty when nvidia-smi cannot be run."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, "--query-gpu=driver_version,name", "--format=csv,noheader"]
    try:
        # A quarter of what a diagnosis takes; it is known to hang where a driver does.
        answer = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()]


def _gpus() -> tuple[tuple[Gpu, ...], str]:
    """Return the CUDA and ROCm devices torch can use; none, and why, when it cannot."""
    try:
        if not torch.cuda.is_available():
            if torch.version.cuda is not None:
                # The reason shows when CUDA is initialised.
                torch.cuda.init()  # type: ignore[no-untyped-call]
            return (), ""
        found = []
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
            found.append(Gpu(name, capability, total, free))
        return tuple(found), ""
    except Exception as error:  # torch raises RuntimeError, AssertionError and its own
        return (), str(error).strip().partition("\n")[0]


@dataclass(frozen=True)
class DiskCheck:
    """folder: where results go; free: bytes available to this user; error: why nothing can be written there, else
    empty."""

    folder: str
    free: int
    error: str = ""

    def to_dict(self) -> dict[str, str | int]:
        return {"folder": self.folder, "free": self.free, "error": self.error}


def check_disk(folder: Path) -> DiskCheck:
    """Check `folder`, or the nearest existing folder above it; nothing is written."""
    folder = folder.absolute()
    existing = next(parent for parent in [folder, *folder.parents] if parent.exists())
    error = ""
    if not existing.is_dir():
        error = f"{existing} is a file"
    elif not os.access(existing, os.W_OK | os.X_OK):
        error = f"no right to write in {existing}"
    return DiskCheck(str(folder), shutil.disk_usage(existing).free, error)


def disk_problems(check: DiskCheck) -> list[Problem]:
    if check.error:
        what = f"results cannot be written to {check.folder}: {check.error}"
        return [Problem(what, "diffusion-runtime generate --output-path FOLDER")]
    if check.free < ENOUGH_BYTES:
        what = f"{check.free / 2**20:.0f} MiB are free where results go ({check.folder})"
        return [Problem(what, "free some space there, or: diffusion-runtime generate --output-path FOLDER")]
    return []
