"""Registry of samplers (ODE solvers): the one place that names them. Imports no torch, so that flags and checks of a
request read it too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class RegisteredSampler:
    """implementation: `module:class`, a SamplerClass of denoising/interface.py, imported when one is built. A model
    folder asks for it by scheduler_class, the diffusers class in scheduler_config.json, which calls the flow shift
    shift_key; None for a sampler that only a request chooses; also_classes: what models' own code calls the same one.
    required: the settings with which that class integrates a velocity on a fixed schedule and draws no noise of its
    own. takes_levels: whether a request may say the noise level of every step; the others space their own.
    stretches: whether it stretches the schedule to a request's shift_terminal. adds_noise: whether it draws fresh noise
    at every step. num_predictions_per_step: how often it calls the model at a step at most, as the last one may take
    fewer: 2 for Heun's method.
    """

    implementation: str
    scheduler_class: str | None = None
    also_classes: tuple[str, ...] = ()
    shift_key: str | None = None
    required: Mapping[str, Any] = field(default_factory=dict)
    takes_levels: bool = False
    stretches: bool = False
    adds_noise: bool = False
    num_predictions_per_step: int = 1


_REGISTERED = {
    "flow_match_euler": RegisteredSampler(
        "diffusion_runtime.denoising.flow_match_euler:FlowMatchEulerSampler",
        scheduler_class="FlowMatchEulerDiscreteScheduler",
        # Of MiniMax-H3, whose velocity has the other sign, and of MOSS-Image, whose noise levels are those of its
        # training; the steps are the same.
        also_classes=("MiniMaxH3Scheduler", "MOSSImageScheduler"),
        shift_key="shift",
        required={"stochastic_sampling": False},
        takes_levels=True,
        stretches=True,
    ),
    "unipc": RegisteredSampler(
        "diffusion_runtime.denoising.unipc:UniPCSampler",
        scheduler_class="UniPCMultistepScheduler",
        shift_key="flow_shift",
        required={"prediction_type": "flow_prediction", "use_flow_sigmas": True, "use_dynamic_shifting": False},
    ),
    "dpmpp_2m": RegisteredSampler(
        "diffusion_runtime.denoising.dpm_solver:DpmSolverSampler",
        scheduler_class="DPMSolverMultistepScheduler",
        shift_key="flow_shift",
        required={"prediction_type": "flow_prediction", "use_flow_sigmas": True, "use_dynamic_shifting": False},
    ),
    "flow_map_euler": RegisteredSampler(
        "diffusion_runtime.denoising.flow_match_euler:FlowMapEulerSampler",
        scheduler_class="FlowMapEulerDiscreteScheduler",
        also_classes=("FlowMapDiscreteScheduler",),
        shift_key="shift",
        takes_levels=True,
    ),
    "dmd": RegisteredSampler("diffusion_runtime.denoising.dmd:DmdSampler", takes_levels=True, adds_noise=True),
    "rcm": RegisteredSampler("diffusion_runtime.denoising.dmd:RcmSampler", takes_levels=True, adds_noise=True),
    # k-diffusion's, as ComfyUI computes them for flow matching.
    "euler_ancestral": RegisteredSampler(
        "diffusion_runtime.denoising.sigma_samplers:EulerAncestralSampler", takes_levels=True, adds_noise=True
    ),
    "dpmpp_2m_sigma": RegisteredSampler(
        "diffusion_runtime.denoising.sigma_samplers:DpmPlusPlus2MSampler", takes_levels=True
    ),
    "res_multistep": RegisteredSampler(
        "diffusion_runtime.denoising.sigma_samplers:ResMultistepSampler", takes_levels=True
    ),
    "unipc_sigma": RegisteredSampler("diffusion_runtime.denoising.sigma_samplers:UniPCSigmaSampler", takes_levels=True),
    "er_sde": RegisteredSampler(
        "diffusion_runtime.denoising.sigma_samplers:ErSdeSampler", takes_levels=True, adds_noise=True
    ),
    "dpmpp_sde": RegisteredSampler(
        "diffusion_runtime.denoising.sigma_samplers:DpmPlusPlusSdeSampler",
        takes_levels=True,
        adds_noise=True,
        num_predictions_per_step=2,
    ),
}
SAMPLERS: Mapping[str, RegisteredSampler] = MappingProxyType(_REGISTERED)
