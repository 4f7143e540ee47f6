"""What one denoising step of a family takes, for our transformer and for diffusers'."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from diffusion_runtime.models.interface import DenoiserInputs


@dataclass(frozen=True)
class StepInputs:
    """ours: latents, timestep and inputs of DiffusionTransformer.forward. theirs: keyword arguments of diffusers'
    forward for the same step. theirs_to_velocity: their output as a velocity of ours, in the shape of our latents."""

    ours: tuple[torch.Tensor, torch.Tensor, DenoiserInputs]
    theirs: Mapping[str, Any]
    theirs_to_velocity: Callable[[Any], torch.Tensor]


@dataclass(frozen=True)
class FamilyStep:
    """A model at its real size. name: of the model and size; transformer_class: diffusers' class; config: what its
    published config.json says; make_inputs: (device, dtype) -> the inputs of one step. vae_config, index: what the
    family reads of vae/config.json and model_index.json before weights are there; other_configs: of further components,
    by name."""

    name: str
    transformer_class: str
    config: Mapping[str, Any]
    make_inputs: Callable[[torch.device, torch.dtype], StepInputs]
    vae_config: Mapping[str, Any] = field(default_factory=dict)
    index: Mapping[str, Any] = field(default_factory=dict)
    other_configs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
