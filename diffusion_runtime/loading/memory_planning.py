"""The memory plan of a prepared model: its requests and its device, brought to memory/plan.py."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from diffusion_runtime.batch_settings import BatchSettings
from diffusion_runtime.config import Degrees, RuntimeConfig
from diffusion_runtime.description import PipelineDescription
from diffusion_runtime.errors import ConfigError, DiffusionRuntimeError, first_line
from diffusion_runtime.memory.machine_memory import free_in_machine, free_on_device, total_on_device
from diffusion_runtime.memory.plan import OFFLOADS, MemoryDemand, MemoryPlan, Offload, as_offload, make_plan, plans_of
from diffusion_runtime.memory_size import size_text
from diffusion_runtime.models.family import Model
from diffusion_runtime.models.interface import DiffusionTransformer
from diffusion_runtime.models.memory_demand import PlannedRequest, memory_demand
from diffusion_runtime.request import GenerationRequest
from diffusion_runtime.request_rules import RequestRules

_logger = logging.getLogger("diffusion_runtime")


def check_offload(config: RuntimeConfig, device: torch.device) -> None:
    """Raises ConfigError for a device that has nothing to offload from, and what offloading cannot be combined with."""
    if config.offload not in ("model", "layers"):
        return
    if device.type in ("cpu", "mps"):
        raise ConfigError(
            f"offload: {config.offload}: the memory of {device.type} is the machine's, where offloaded weights would "
            "wait; leave out --offload"
        )
    if config.offload == "layers" and config.compile != "off":
        raise ConfigError(
            "offload: layers: compiled blocks keep their weights where they are in this version; leave out --compile, "
            "or use --offload model"
        )


def is_planned(config: RuntimeConfig, device: torch.device) -> bool:
    """Whether loading needs a plan: where weights could be offloaded, or a limit holds."""
    if config.memory_limit is not None or config.offload in ("model", "layers"):
        return True
    return device.type not in ("cpu", "mps") and free_on_device(device) is not None


@dataclass(frozen=True)
class PlannedDemand:
    """What the largest of some requests takes. advice: what would need less."""

    demand: MemoryDemand
    advice: tuple[str, ...]


def largest_demand(
    config: RuntimeConfig,
    model: Model[Any, Any],
    transformer: DiffusionTransformer,
    rules: RequestRules,
    requests: Sequence[GenerationRequest],
    dtype: torch.dtype,
    degrees: Degrees,
) -> PlannedDemand | None:
    """Of the request that takes the most of `requests`, resolved; of the model's default one where there are none.
    None where sizes are not known. transformer: on the meta device."""
    planned = _largest(rules, requests)
    if planned is None:
        return None
    in_tiles = config.vae_tiling == "on" or (config.vae_tiling == "auto" and model.family.decodes_in_tiles)
    sharers = degrees.ulysses * degrees.ring
    try:
        demand = memory_demand(model, transformer, dtype, planned, num_sharers=sharers, in_tiles=in_tiles)
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        NotImplementedError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        # A module of diffusers that cannot be run on the meta device, or sizes that only fail when they meet.
        _logger.warning("memory is not planned: %s", first_line(error))
        return None
    return PlannedDemand(demand, tuple(_advice(config, planned, model)))


def plan_memory(planned: PlannedDemand | None, config: RuntimeConfig, device: torch.device) -> MemoryPlan | None:
    """The plan for a demand, None where that is not known. Raises DeviceMemoryError where nothing fits, and ConfigError
    where a choice needs a plan and there is none."""
    if planned is None:
        if config.memory_limit is not None or config.offload in ("model", "layers"):
            raise ConfigError(
                "offload, memory_limit: what this model takes cannot be computed, or not without a request's sizes; "
                "leave out --offload and --memory-limit"
            )
        return None
    limit = config.memory_limit_bytes
    if device.type in ("cpu", "mps"):
        # Without a limit nothing is refused: there is more than what is free now, such as mapped files.
        return make_plan(planned.demand, ("none",), limit, advice=planned.advice)
    free = free_on_device(device)
    limit = min(each for each in (limit, free) if each is not None) if limit or free else None
    choices: Sequence[Offload] = OFFLOADS if config.offload == "auto" else [as_offload(config.offload)]
    if config.compile != "off":
        choices = [each for each in choices if each != "layers"]
    return make_plan(planned.demand, choices, limit, free_in_machine(), planned.advice)


def fitting_offloads(planned: PlannedDemand | None, description: PipelineDescription, device: torch.device) -> str:
    """What could be offloaded so that a demand fits, for a message; empty where nothing is known of it."""
    plan, total = description.memory, total_on_device(device)
    if planned is None or total is None:
        return ""
    limit = description.config.memory_limit_bytes or total
    now = "none" if plan is None else plan.offload
    ways = [each for each in plans_of(planned.demand, limit) if each.peak <= limit and each.offload != now]
    if not ways:
        return "No offloading fits this request. "
    return f"--offload {ways[0].offload} fits: it takes {size_text(ways[0].peak)} of {size_text(limit)}. "


def _largest(rules: RequestRules, requests: Sequence[GenerationRequest]) -> PlannedRequest | None:
    given: Sequence[GenerationRequest] = requests
    if not given:
        given = [GenerationRequest(prompt="a prompt", seed=0).with_defaults({"flow_shift": 1.0, **rules.defaults})]
    try:
        planned = [_planned(rules, request) for request in given]
    except DiffusionRuntimeError:
        # A model without default sizes.
        return None
    return max(planned, key=lambda each: (_num_tokens(rules, each), each.is_guided, each.is_batched))


def _planned(rules: RequestRules, request: GenerationRequest) -> PlannedRequest:
    settings = BatchSettings.of([request], rules)
    is_batched = settings.guidance_mode == "batched"
    return PlannedRequest(settings.size, 1, settings.is_guided, is_batched, request, settings.embedded_guidance)


def _num_tokens(rules: RequestRules, planned: PlannedRequest) -> int:
    size = planned.size
    return rules.geometry.num_tokens(size.height, size.width, size.num_frames)


def _advice(config: RuntimeConfig, planned: PlannedRequest, model: Model[Any, Any]) -> list[str]:
    ways = []
    if config.quantization == "none":
        ways.append("--quantization fp8")
    if model.family.has_tiles and config.vae_tiling != "on":
        ways.append("--vae-tiling on")
    return [*ways, *_request_advice(planned)]


def _request_advice(planned: PlannedRequest) -> list[str]:
    size = planned.size
    frames = f", fewer frames than {size.num_frames}" if size.num_frames > 1 else ""
    batched = ["--guidance-mode two_pass"] if planned.is_batched and planned.is_guided else []
    return [*batched, f"a smaller height and width than {size.height} x {size.width}{frames}"]
