"""Share of a machine: which GPUs, or how many threads of the CPU, one of several engines of a server has."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from diffusion_runtime.errors import ConfigError, shown

if TYPE_CHECKING:
    from diffusion_runtime.config import RuntimeConfig

_DEVICES, _THREADS = "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"


def take_share(config: RuntimeConfig, index: int, count: int) -> None:
    """Have this process, and those it starts, use one of `count` equal shares of the machine's GPUs, or of the CPU's
    threads where it has none. To be called before torch has used a device.

    Raises ConfigError where the machine has too few GPUs, and for a device of which there is no share.
    """
    if count == 1:
        return
    num_processes = config.parallel.num_processes
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # Read when torch is imported.
    os.environ.setdefault(_THREADS, str(max(1, num_cores // (count * num_processes))))
    if config.device == "cpu":
        return
    import torch

    # Asked of the driver's library, which leaves CUDA unused, so that the variable still counts.
    num_devices = torch.cuda.device_count()
    if num_devices == 0 and config.device == "auto" and not torch.accelerator.is_available():
        return
    if config.device not in ("auto", "cuda"):
        raise ConfigError(
            f"device: {count} replicas share out the GPUs of CUDA or ROCm, or the CPU, got {shown(config.device)}; "
            "write --device cuda or --device cpu"
        )
    if num_devices < count * num_processes:
        raise ConfigError(
            f"--replicas {count} --num-gpus {num_processes}: expected {count * num_processes} GPUs, this machine has "
            f"{num_devices}; ask for fewer, or write --device cpu"
        )
    given = [each.strip() for each in os.environ.get(_DEVICES, "").split(",") if each.strip()]
    names = given or [str(number) for number in range(num_devices)]
    os.environ[_DEVICES] = ",".join(names[index * num_processes : (index + 1) * num_processes])
