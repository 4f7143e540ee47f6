"""Compilation (`--compile`): what it needs of a machine, and the folder that keeps what was compiled."""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import os
import shutil
from pathlib import Path

import torch

from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.core.cache_folder import cache_root
from diffusion_runtime.core.hardware import Hardware, detect_hardware
from diffusion_runtime.errors import ConfigError

# torch.compile's own variable: where it keeps kernels and graphs.
ARTEFACTS_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_COMPILERS = ("c++", "g++", "clang++")

_logger = logging.getLogger("diffusion_runtime")


def check_compilation(config: RuntimeConfig, device: torch.device) -> None:
    """Raises ConfigError with what to type when the blocks cannot be compiled on such a device."""
    if config.compile == "off":
        return
    reason = _refusal(detect_hardware(str(device)))
    if reason is not None:
        raise ConfigError(f"compile: {config.compile}: {reason}, or leave out --compile")


def _refusal(hardware: Hardware) -> str | None:
    """Return what torch.compile lacks on this machine, and what to do; None when nothing."""
    if hardware.platform == "cpu":
        own = os.environ.get("CXX")
        if not any(shutil.which(name) for name in ((own,) if own else _COMPILERS)):
            asked = f"CXX names {own!r}, which cannot be started" if own else "none was found"
            return f"a CPU needs a C++ compiler, and {asked}; install g++, or name one by CXX"
        return None
    if hardware.platform not in ("cuda", "rocm"):
        return f"needs a CPU or a CUDA or ROCm GPU, got {hardware.platform}; use --device cpu"
    if "triton" not in hardware.packages:
        return "a GPU needs Triton, which is not installed; pip install triton"
    return None


def artefact_folder(hardware: Hardware, model: str) -> Path:
    """Return the folder for compiled blocks, by all that they depend on. model: the digest of its folder."""
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "none"
    facts = (torch.__version__, triton, hardware.platform, hardware.device_name, str(hardware.capability), model)
    name = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
    return cache_root() / "compiled" / name


def keep_artefacts(device: torch.device, model: str) -> None:
    """Have torch.compile keep what it makes in this project's cache folder, from which later processes take it.

    A folder that the user has chosen by torch's own variable stays; one that cannot be written is left out, with a line
    in the log.
    """
    if ARTEFACTS_VARIABLE in os.environ:
        return
    folder = artefact_folder(detect_hardware(str(device)), model)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _logger.warning("%s cannot be written (%s): each process compiles anew", folder, error)
        return
    os.environ[ARTEFACTS_VARIABLE] = str(folder)
