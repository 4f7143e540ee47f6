"""The machine and the versions that figures were measured with, as they stand in a result's JSON under `machine`."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PACKAGES = ("diffusion-runtime", "torch", "triton", "diffusers", "transformers")


def describe_host() -> dict[str, Any]:
    """Processor, system, load and versions. Imports no package: a benchmark may time what the first import costs."""
    found = {}
    for name in PACKAGES:
        try:
            found[name.replace("-", "_")] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "processor": processor_name(),
        "num_cores": os.cpu_count(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "system": platform.platform(),
        "python": platform.python_version(),
        **found,
    }


def describe_machine(device: torch.device | str) -> dict[str, Any]:
    """What `describe_host` finds, with the GPU and its libraries, or what torch makes of the CPU."""
    import torch

    # A build says more than the version of its distribution: 2.11.0+cu130.
    machine = {**describe_host(), "torch": torch.__version__}
    if torch.device(device).type != "cuda":
        capability, num_threads = torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
        return {"device": machine["processor"], **machine, "cpu_capability": capability, "num_threads": num_threads}
    return {
        "device": torch.cuda.get_device_name(device),
        **machine,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }


def processor_name() -> str:
    """The model of the CPU, as Linux names it."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
