"""The memory plan of a prepared model: its requests and its device, brought to memory/plan.py."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from diffusion_runtime.config import Degrees, RuntimeConfig
from diffusion_runtime.core.memory_size import limit_text, size_text
from diffusion_runtime.core.model_folder import ModelFolder
from diffusion_runtime.core.planned_device import PlannedDevice
from diffusion_runtime.denoising.chunks import cached_tokens
from diffusion_runtime.errors import ConfigError, DiffusionRuntimeError, first_line
from diffusion_runtime.loading.description import PipelineDescription
from diffusion_runtime.memory.machine_memory import free_in_machine, free_on_device, share_of_device
from diffusion_runtime.memory.plan import (
    ACCELERATOR,
    MACHINE,
    NO_REMEDIES,
    OFFLOADS,
    DeviceKind,
    MemoryDemand,
    MemoryPlan,
    Offload,
    Remedies,
    as_offload,
    make_plan,
    plans_of,
    ways_to_fit,
)
from diffusion_runtime.models.family import Model
from diffusion_runtime.models.interface import DiffusionTransformer
from diffusion_runtime.models.memory_demand import PlannedRequest, memory_demand
from diffusion_runtime.request.generation_request import IMAGE_FIELDS, GenerationRequest, image_paths
from diffusion_runtime.rules.batch_settings import BatchSettings
from diffusion_runtime.rules.request_rules import RequestRules
from diffusion_runtime.weights.checkpoint import WeightChange
from diffusion_runtime.weights.quantization import Quantization
from diffusion_runtime.weights.weight_files import SUFFIXES

# In pixels, of the images that models without a size of their own are published for.
DEFAULT_SIDE = 1024
# Weights in 8 bits are four times as large in float32, a CPU's dtype; and then there are activations. Some models in 16
# bits are planned for nothing, which takes 1.4 s for two experts of 14 B.
_LARGE_FACTOR = 6

_logger = logging.getLogger("diffusion_runtime")


def check_offload(config: RuntimeConfig, device: torch.device) -> None:
    """Raises ConfigError for a device that has nothing to offload from, and what offloading cannot be combined with."""
    if config.offload not in ("model", "layers"):
        return
    if device.type in ("cpu", "mps"):
        raise ConfigError(
            f"offload: {config.offload}: the memory of {device.type} is the machine's, where offloaded weights would "
            "wait; leave out --offload"
            + ("; --memory-limit reads blocks from their files where they do not fit" if device.type == "cpu" else "")
        )


def is_planned(config: RuntimeConfig, device: torch.device) -> bool:
    """Return whether loading needs a plan: where weights could be offloaded, or a limit holds."""
    if config.asks_to_offload:
        return True
    return device.type not in ("cpu", "mps") and free_on_device(device) is not None


def may_exceed_the_machine(model: Model[Any, Any]) -> bool:
    """Return whether the weight files of a model, those from elsewhere in place of its own, are so large that a plan is
    worth its time though no limit was given: on a device whose memory is the machine's, the system ends a process that
    takes more."""
    free = free_in_machine()
    parts = model.folder.parts if isinstance(model.folder, ModelFolder) else {}
    elsewhere = {*parts, *(file.component for file in model.weights.files)}
    folder = Path(model.folder / "")
    files = [path for path in folder.rglob("*.safetensors") if path.relative_to(folder).parts[0] not in elsewhere]
    files += [path for place in parts.values() for path in place.glob("*") if path.suffix in SUFFIXES]
    files += [path for file in model.weights.files for path in file.files()]
    num_bytes = sum(path.stat().st_size for path in files)
    return free is not None and num_bytes * _LARGE_FACTOR > free


@dataclass(frozen=True)
class PlannedDemand:
    """Memory demand of the largest of some requests. request: that one; remedies: what would need less."""

    demand: MemoryDemand
    request: PlannedRequest | None = None
    remedies: Remedies = NO_REMEDIES


def largest_demand(
    config: RuntimeConfig,
    model: Model[Any, Any],
    transformer: DiffusionTransformer,
    rules: RequestRules,
    requests: Sequence[GenerationRequest],
    dtype: torch.dtype,
    degrees: Degrees,
    device: torch.device,
    *,
    quantization: Quantization | None = None,
    changes: Sequence[WeightChange] = (),
) -> PlannedDemand | None:
    """Return the demand of the request that takes the most of `requests`, resolved; of the model's default one where
    there are none, of DEFAULT_SIDE squared where the model has no size of its own. transformer: on the meta device;
    device: that computes; quantization, changes: as of memory_demand. None where it cannot be computed."""
    notes: list[str] = []
    if requests:
        every = [planned_batch(rules, [request]) for request in requests]
        planned = max(
            every,
            key=lambda each: (*_extent(rules, each), _num_images(each), each.request.num_inference_steps or 0),
        )
    else:
        try:
            planned, notes = _default_request(rules)
        except DiffusionRuntimeError:
            # A model that only a request tells what is to be made.
            return None
    return demand_of(
        config,
        model,
        transformer,
        planned,
        dtype,
        degrees,
        device,
        notes,
        quantization=quantization,
        changes=changes,
    )


def demand_of(
    config: RuntimeConfig,
    model: Model[Any, Any],
    transformer: DiffusionTransformer,
    planned: PlannedRequest,
    dtype: torch.dtype,
    degrees: Degrees,
    device: torch.device,
    notes: Sequence[str] = (),
    *,
    quantization: Quantization | None = None,
    changes: Sequence[WeightChange] = (),
) -> PlannedDemand | None:
    """Return the demand of one request, or a batch; None where it cannot be computed. transformer: on the meta device;
    device: that computes; notes: to go with it; quantization, changes: as of memory_demand."""
    sharers = degrees.ulysses * degrees.ring
    try:
        demand = memory_demand(
            model,
            transformer,
            dtype,
            planned,
            changes=changes,
            quantization=quantization,
            num_sharers=sharers,
            vae_tiling=config.vae_tiling,
            copies_layout=device.type == "cuda",
        )
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
    demand = dataclasses.replace(demand, notes=(*demand.notes, *notes))
    return PlannedDemand(demand, planned)


def plan_memory(
    planned: PlannedDemand | None,
    config: RuntimeConfig,
    device: torch.device,
    planned_on: PlannedDevice | None = None,
) -> MemoryPlan | None:
    """The plan for a demand, None where that is not known. planned_on: the device where it is not here. Raises
    DeviceMemoryError where nothing fits, and ConfigError where a choice needs a plan and there is none."""
    if planned is None:
        if config.asks_to_offload:
            raise ConfigError(
                "offload, memory_limit: what this model takes cannot be computed; leave out --offload and "
                "--memory-limit"
            )
        return None
    limit, kind = config.memory_limit_bytes, _kind_of(device)
    possible = _possible(device)
    choices = possible if config.offload == "auto" else [as_offload(config.offload)]
    if device.type in ("cpu", "mps"):
        # Without a limit nothing is refused: there is more than what is free now, such as mapped files.
        free, of_all = free_in_machine(), planned.remedies
        plan = make_plan(planned.demand, choices, limit, free, of_all, possible=possible, kind=kind, free=free)
        if limit is None and free is not None and plan.peak > free:
            plan = dataclasses.replace(plan, shortage=_beyond_the_machine(planned, plan, free, possible, kind))
            _logger.warning("%s", plan.shortage)
        return plan
    free = free_on_device(device) if planned_on is None else planned_on.free
    limit = min((each for each in (limit, free) if each is not None), default=None)
    host_limit, remedies = free_in_machine() if planned_on is None else None, planned.remedies
    return make_plan(planned.demand, choices, limit, host_limit, remedies, possible=possible, kind=kind, free=free)


def _beyond_the_machine(
    planned: PlannedDemand, plan: MemoryPlan, free: int, possible: Sequence[Offload], kind: DeviceKind
) -> str:
    """Return remarks on a plan without a limit that takes more than there is: the system may end the process."""
    taken = f"memory: this takes {size_text(plan.peak)} at once, and {size_text(free)} of the machine are free"
    least = plans_of(planned.demand, free, possible, kind)[-1]
    if least.peak > free:
        ways = ways_to_fit(least, free, planned.remedies, possible, kind)
        if "layers" not in possible:
            return f"{taken}. {ways}"
        ways = ways.replace("What would fit", "What would fit beside it", 1)
        return f"{taken}, too few even with --memory-limit, which reads blocks from their files. {ways}"
    # Some of it is for Python and torch, which no limit counts.
    limit = limit_text(max(least.peak, free // 10 * 9))
    return f"{taken}; --memory-limit {limit} fits, and reads blocks from their files while they run"


def replan(planned: PlannedDemand, before: MemoryPlan, device: torch.device) -> MemoryPlan:
    """The plan of another demand for a model that was loaded with the plan `before`. Raises DeviceMemoryError."""
    return make_plan(
        planned.demand,
        [before.offload],
        before.limit,
        remedies=planned.remedies,
        possible=_possible(device),
        kind=_kind_of(device),
    )


def _kind_of(device: torch.device) -> DeviceKind:
    return MACHINE if device.type == "cpu" else ACCELERATOR


def _possible(device: torch.device) -> Sequence[Offload]:
    """Return what a device leaves of OFFLOADS, with --offload left open."""
    if device.type == "mps":
        return ("none",)
    if device.type == "cpu":
        # A transformer waits in its files by blocks, or not at all.
        return ("none", "layers")
    return OFFLOADS


def fitting_offloads(planned: PlannedDemand | None, description: PipelineDescription, device: torch.device) -> str:
    """Return what could be offloaded so that a demand fits, for a message; empty where nothing is known of it."""
    plan, share = description.memory, share_of_device(device)
    if planned is None or share is None:
        return ""
    # Beside what other programs have now.
    limit = min(share, description.config.memory_limit_bytes or share)
    now = "none" if plan is None else plan.offload
    possible = _possible(device)
    ways = [each for each in plans_of(planned.demand, limit, possible) if each.peak <= limit and each.offload != now]
    if not ways:
        return "No offloading fits this request. "
    return f"--offload {ways[0].offload} fits: it takes {size_text(ways[0].peak)} of {size_text(limit)}. "


def _default_request(rules: RequestRules) -> tuple[PlannedRequest, list[str]]:
    """Return what is planned for where no request is known, with what to say of it."""
    side, notes = DEFAULT_SIDE, []
    height, width = (side, side) if rules.inputs.references is None else rules.inputs.references.scaled((side, side))
    if not rules.defaults.keys() >= {"height", "width"}:
        notes = [f"the model has no size of its own: memory is planned for one image of {height} x {width}"]
    if rules.inputs.media is not None:
        notes = [*notes, "memory is planned for a request without references, which take more"]
    # In the order of the layers that fill a request: the model's own values are the last but these.
    values = {"height": height, "width": width, "num_frames": 1, "fps": 1, "flow_shift": 1.0, **rules.defaults}
    return planned_batch(rules, [GenerationRequest(prompt="a prompt", seed=0).with_defaults(values)]), notes


def planned_batch(rules: RequestRules, batch: Sequence[GenerationRequest]) -> PlannedRequest:
    """Return what decides about the memory of resolved requests that are made together."""
    settings = BatchSettings.of(batch, rules.sampling).of_segment()
    is_batched = settings.guidance.mode == "batched"
    num_samples = 1 if settings.decides_per_sample or settings.segments.is_apart else len(batch)
    return PlannedRequest(
        settings.size,
        num_samples,
        settings.guidance.is_guided,
        is_batched,
        settings.shared,
        settings.guidance.embedded,
        settings.guidance.further_branches,
        settings.guidance.normalized(num_samples),
    )


def takes_more(rules: RequestRules, planned: PlannedRequest, than: PlannedRequest, *, keeps_rows: bool) -> bool:
    """Return whether one request may take more memory than another, in any phase. keeps_rows: whether every step adds
    to what the model keeps (MemoryDemand.modulation_rows)."""
    if keeps_rows and (planned.request.num_inference_steps or 0) > (than.request.num_inference_steps or 0):
        return True
    larger = any(ours > theirs for ours, theirs in zip(_extent(rules, planned), _extent(rules, than), strict=True))
    return larger or _num_images(planned) > _num_images(than)


def _extent(rules: RequestRules, planned: PlannedRequest) -> tuple[int, int, int, int]:
    """(tokens of a forward pass, branches of which something is kept for later steps, pixels to decode, tokens of a
    key-value cache)."""
    size, branches = planned.size, 1 + planned.is_guided
    passes = planned.num_samples * (branches if planned.is_batched else 1)
    if planned.attention_guidance is not None:
        # At most: of cross-attention the text alone is there twice.
        branches, passes = branches + 1, 2 * planned.num_samples
    of_pass = BatchSettings.of([planned.request], rules.sampling).of_window(size)
    num_tokens = rules.sampling.geometry.num_tokens(of_pass.height, of_pass.width, of_pass.num_frames)
    if rules.inputs.media is not None:
        num_tokens += rules.inputs.media.num_tokens(planned.request, size)
    cached = 0
    if rules.sampling.is_causal:
        settings = BatchSettings.of([planned.request], rules.sampling)
        chunks, is_guided = settings.chunking.plan, planned.is_guided
        cached = cached_tokens(settings.chunking.cache_passes(), planned.request, chunks, is_guided=is_guided)
    return (
        passes * num_tokens,
        branches + len(planned.further_branches),
        size.height * size.width * size.num_frames,
        planned.num_samples * cached,
    )


def _num_images(planned: PlannedRequest) -> int:
    return sum(len(image_paths(planned.request, name)) for name in IMAGE_FIELDS)
