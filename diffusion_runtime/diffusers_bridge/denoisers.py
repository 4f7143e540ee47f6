"""The denoising models of a diffusers pipeline, with their device and dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from diffusion_runtime.attention.backends.requirements import dtype_name
from diffusion_runtime.diffusers_bridge.compiled import uncompiled
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.hardware import DTYPES, resolve_device

# The modules of diffusers that define denoising models.
_DENOISER_PACKAGES = ("transformers", "unets", "controlnets")


def denoisers_of(model_or_pipeline: Any) -> dict[str, nn.Module]:
    """The denoising models, by component name, compiled ones as they are. Raises ConfigError."""
    if isinstance(model_or_pipeline, nn.Module):
        return {type(uncompiled(model_or_pipeline)).__name__: model_or_pipeline}
    components = getattr(model_or_pipeline, "components", None)
    if not isinstance(components, dict):
        raise ConfigError(
            f"attach: expected a diffusers pipeline or a torch module, got {type(model_or_pipeline).__name__}"
        )
    parts = {name: part for name, part in components.items() if isinstance(part, nn.Module)}
    chosen = {name: part for name, part in parts.items() if denoises(name, type(uncompiled(part)))}
    if not chosen:
        raise ConfigError(
            f"attach: {type(model_or_pipeline).__name__} has no transformer and no UNet; it has "
            f"{', '.join(components)}. Attach to the model itself"
        )
    return chosen


def denoises(name: str, kind: type) -> bool:
    """Whether a component of a pipeline denoises: by the class of its model, and by its name for a class that is not
    diffusers'."""
    package = kind.__module__.split(".")
    if package[:2] == ["diffusers", "models"]:
        return package[2] in _DENOISER_PACKAGES
    return name.startswith(("transformer", "unet"))


def device_of(model_or_pipeline: Any, model: nn.Module, device: str | torch.device | None) -> torch.device:
    """The device a model will run on. device: by the caller, if known."""
    if device is not None:
        return resolve_device(str(device))
    # Offloaded models wait on the CPU and run elsewhere; the pipeline has the execution device.
    place = getattr(model_or_pipeline, "_execution_device", None)
    if isinstance(place, torch.device) and place.type != "meta":
        return place
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def dtype_of(model: nn.Module) -> torch.dtype:
    """The compute dtype. Quantised weights do not show it; bfloat16 is their usual one."""
    dtypes = [parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()]
    known = (*DTYPES, "float64")
    return next((dtype for dtype in dtypes if dtype_name(dtype) in known), torch.bfloat16)
