"""Hardware: the machine as plain values: device, chip, versions, installed packages.

Selection reads a `Hardware` and nothing else, so every platform can be tested on any machine.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from diffusion_runtime.core.spellings import own_name
from diffusion_runtime.errors import ConfigError, shown

if TYPE_CHECKING:
    import torch

PLATFORMS = ("cpu", "cuda", "rocm", "mps", "xpu", "npu")
DTYPES = ("float32", "bfloat16", "float16")

# The distributions that attention backends look for: name on the package index.
ATTENTION_PACKAGES = (
    "triton",
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
    "flashinfer-python",
    "flashinfer-jit-cache",
    "sageattention",
    "sageattn3",
    "xformers",
    "nvidia-cudnn-frontend",
    "amd-aiter",
)
# The compilers that backends without precompiled kernels call.
PROGRAMS = ("g++", "clang++", "nvcc")
# The first compute capability of each, the newest first.
_ARCHITECTURES = (
    ((10, 0), "Blackwell"),
    ((9, 0), "Hopper"),
    ((8, 9), "Ada"),
    ((8, 0), "Ampere"),
    ((7, 5), "Turing"),
    ((7, 0), "Volta"),
)


@dataclass(frozen=True)
class Hardware:
    """One device and the software installed for it.

    platform: one of PLATFORMS; ROCm is its own platform although torch calls its device `cuda`.
    capability: (major, minor) compute capability on CUDA, else None.
    cudnn: (major, minor) of the cuDNN that torch uses, None without one.
    packages: installed distributions that attention backends look for, name to version.
    programs: which of PROGRAMS can be started.
    is_here: this process runs on it, so its packages can be imported; a Hardware made by hand is some other machine.
    """

    platform: str = "cpu"
    device_name: str = "CPU"
    capability: tuple[int, int] | None = None
    cudnn: tuple[int, int] | None = None
    torch_version: str = ""
    packages: Mapping[str, str] = field(default_factory=dict)
    programs: frozenset[str] = frozenset()
    is_here: bool = field(default=False, compare=False)

    @property
    def architecture(self) -> str:
        """NVIDIA's name of the chip's generation; empty for others and for what came before or after these."""
        if self.capability is None or self.capability >= (13, 0):
            return ""
        return next((name for lowest, name in _ARCHITECTURES if self.capability >= lowest), "")

    def describe(self) -> str:
        """Return one phrase for log lines: `cuda sm_90, torch 2.13.0`."""
        chip = f" sm_{self.capability[0]}{self.capability[1]}" if self.capability else ""
        return f"{self.platform}{chip}, torch {self.torch_version}"


def installed_packages() -> dict[str, str]:
    """Return the distributions of ATTENTION_PACKAGES that are installed, without importing any of them."""
    found = {}
    for name in ATTENTION_PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def found_programs() -> frozenset[str]:
    """Return which of PROGRAMS are on PATH, with nvcc also where the CUDA toolkit puts it."""
    found = {name for name in PROGRAMS if shutil.which(name)}
    toolkits = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    if any(root and shutil.which("nvcc", path=os.path.join(root, "bin")) for root in toolkits):
        found.add("nvcc")
    return frozenset(found)


@functools.lru_cache(maxsize=16)
def detect_hardware(device: str = "auto") -> Hardware:
    """Detect the hardware behind a device string (`auto`, `cpu`, `cuda`, `cuda:1`, `mps`, ...); cached per process.

    Raises ConfigError when torch cannot reach the device.
    """
    import torch

    torch_device = resolve_device(device)
    version = torch.__version__.partition("+")[0]
    capability = cudnn = None
    if torch_device.type == "cuda":
        device_platform = "cuda" if torch.version.hip is None else "rocm"
        name = torch.cuda.get_device_name(torch_device)
        if device_platform == "cuda":
            capability = torch.cuda.get_device_capability(torch_device)
            cudnn_number: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
            cudnn = None if cudnn_number is None else (cudnn_number // 10000, cudnn_number // 100 % 100)
    else:
        device_platform = torch_device.type
        name = (platform.processor() or platform.machine()) if device_platform == "cpu" else device_platform
    return Hardware(
        device_platform, name, capability, cudnn, version, installed_packages(), found_programs(), is_here=True
    )


def resolve_device(device: str = "auto") -> torch.device:
    """`auto` is the first accelerator torch can use, else the CPU. Raises ConfigError for one that is not there."""
    import torch

    if device == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return accelerator if accelerator is not None else torch.device("cpu")
    try:
        requested = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device: expected auto, cpu, cuda, cuda:N, mps, xpu or npu, got {shown(device)}") from error
    if requested.type in ("cpu", "meta"):
        return requested
    present = torch.accelerator.current_accelerator(check_available=True)
    if present is None or present.type != requested.type:
        if requested.type == "cuda" and torch.version.cuda is None and torch.version.hip is None:
            raise ConfigError(
                f"device: {shown(device)} was asked for, and the installed torch {torch.__version__} is a build for "
                "the CPU, which no GPU can be used with; install a build for it (https://pytorch.org/get-started), or "
                "write --device auto"
            )
        found = "only the CPU" if present is None else f"{present.type} and the CPU"
        raise ConfigError(f"device: {shown(device)} was asked for, this machine has {found}; use --device auto")
    if requested.index is not None and requested.index >= torch.accelerator.device_count():
        count = torch.accelerator.device_count()
        raise ConfigError(f"device: {shown(device)} was asked for, this machine has {count} of them, counted from 0")
    return requested


def device_of_process(device: str, local_rank: int, num_local: int) -> str:
    """Return the device of one of `num_local` processes on this machine: the CPU for all of them, or one GPU per
    process.

    Raises ConfigError for more processes than GPUs, and for a device that several processes cannot use.
    """
    import torch

    resolved = resolve_device(device)
    if resolved.type == "cpu" and device != "auto":
        return "cpu"
    if resolved.type != "cuda":
        found = "none" if resolved.type == "cpu" else f"{resolved.type}, which only one process can use"
        raise ConfigError(
            f"device: {num_local} processes need {num_local} GPUs, this machine has {found}; --device cpu runs them on "
            "the CPU"
        )
    if ":" in device:
        raise ConfigError(
            f"device: {shown(device)} is one GPU, and {num_local} processes need one each; use --device cuda"
        )
    count = torch.cuda.device_count()
    if num_local > count:
        raise ConfigError(
            f"device: {num_local} processes were asked for, this machine has {count} GPU{'s' * (count > 1)}; use "
            f"--num-gpus {count} or --device cpu"
        )
    return f"cuda:{local_rank}"


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on an accelerator and float32 on the CPU. Raises ConfigError for an unknown name."""
    import torch

    dtype = own_name("dtype", dtype, ("auto", *DTYPES))
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if dtype not in DTYPES:
        raise ConfigError(f"dtype: expected auto, {', '.join(DTYPES)}, got {shown(dtype)}")
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
