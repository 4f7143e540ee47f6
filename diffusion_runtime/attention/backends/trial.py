"""Whether kernels that came compiled compute at all on a chip: one small call, tried once a process and form."""

from __future__ import annotations

import functools

import torch

from diffusion_runtime.attention.backends.calling import run_backend
from diffusion_runtime.attention.backends.interface import AttentionCall, AttentionRequirements, Backend, NoOptions
from diffusion_runtime.attention.context import RequestCache
from diffusion_runtime.hardware import Hardware
from diffusion_runtime.kernels.importing import raised_line
from diffusion_runtime.parallel.interface import AttentionInputs
from diffusion_runtime.step_info import LayerInfo, StepInfo

# Queries and keys: more than one tile of any kernel, so that none takes its path for short ones.
_SEQ = 256


def trial_failure(backend: Backend, requirements: AttentionRequirements) -> str | None:
    """What one small call of the requirements' dtype and head size raises, in one line; None when it computes.

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
        # Choices settle where transformers are built, on the meta device, which packages must not see.
        with torch.device("cpu"), torch.no_grad():
            q = torch.zeros(1, _SEQ, 1, head_dim, dtype=getattr(torch, dtype), device=device)
            call = AttentionCall(
                AttentionInputs(q, q.clone(), q.clone()), NoOptions(), LayerInfo(), StepInfo(), RequestCache()
            )
            # What a kernel that was built for another chip raises may come where its result is waited for.
            run_backend(backend, call).out.cpu()
    except Exception as error:  # whatever a stranger's kernel raises
        return raised_line(error)
    return None
