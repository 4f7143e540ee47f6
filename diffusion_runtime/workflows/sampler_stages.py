"""Stages of samplers of a workflow: their order, the samplers and noise levels that run them here."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

from diffusion_runtime.denoising.flow_schedule import shifted
from diffusion_runtime.denoising.named_schedules import NoiseTable
from diffusion_runtime.request.samplers import SAMPLERS
from diffusion_runtime.workflows.evaluation import NotSupportedError
from diffusion_runtime.workflows.known_models import known_model
from diffusion_runtime.workflows.values import (
    ConditioningValue,
    GuiderValue,
    LatentValue,
    StageValue,
    Weights,
)

# ComfyUI's samplers whose steps are those of one here, at the same noise levels.
SAMPLER_NAMES = {
    "euler": "flow_match_euler",
    "ddim": "flow_match_euler",
    "lcm": "dmd",
    "euler_ancestral": "euler_ancestral",
    "dpmpp_2m": "dpmpp_2m_sigma",
    "res_multistep": "res_multistep",
    "uni_pc": "unipc_sigma",
    "er_sde": "er_sde",
    "dpmpp_sde": "dpmpp_sde",
}
# Those whose next step depends on no earlier one: a schedule in two parts is the same as one.
OF_ONE_STEP = ("euler", "ddim", "lcm", "euler_ancestral")
# Those that add noise between steps.
ADD_NOISE = ("lcm", "euler_ancestral", "er_sde", "dpmpp_sde")
# Those that compute in the signal-to-noise ratio, which is 0 at a noise level of 1.
_OF_RATIO = ("er_sde", "dpmpp_sde")
_MAX_STAGES = 4
# How far apart two noise levels may be that are one, in float32.
SAME_LEVEL = 1e-6


def stages_of(latent: LatentValue) -> tuple[list[StageValue], list[Weights | None]]:
    """Return the stages in their order, and the upsampler in front of each."""
    stages: list[StageValue] = []
    upsamplers: list[Weights | None] = []
    current: LatentValue | None = latent
    while current is not None:
        stage = current.stage
        if stage is None:
            break
        if len(stages) >= _MAX_STAGES:
            raise NotSupportedError(f"more than {_MAX_STAGES} stages of samplers", stage.node)
        before = stage.latent.upscaled
        stages.insert(0, stage)
        upsamplers.insert(0, None if before is None else before[1])
        current = stage.latent if before is None else before[0]
    return stages, upsamplers


def joined(stages: list[StageValue], upsamplers: list[Weights | None]) -> tuple[list[StageValue], list[Weights | None]]:
    """Return stages where two of the same model, one going on where the other ends, are one. Raises
    NotSupportedError for two of them that differ in more than their guidance."""
    kept, kept_upsamplers = stages[:1], upsamplers[:1]
    for stage, upsampler in zip(stages[1:], upsamplers[1:], strict=True):
        before = kept[-1]
        if upsampler is None and stage.guider.model == before.guider.model:
            kept[-1] = _continued(before, stage)
        else:
            kept.append(stage)
            kept_upsamplers.append(upsampler)
    return kept, kept_upsamplers


def _continued(before: StageValue, after: StageValue) -> StageValue:
    """Return one stage of two samplers of the same model."""
    if not goes_on(before, after):
        raise NotSupportedError("a second sampler that does not go on where the first one ends", after.node)
    if (after.sampler.name, after.sampler.options) != (before.sampler.name, before.sampler.options):
        raise NotSupportedError(
            f"sampler {after.sampler.name} after {before.sampler.name}, of one model; expected the same", after.node
        )
    if after.sampler.name not in OF_ONE_STEP:
        raise NotSupportedError(
            f"sampler {after.sampler.name} begun anew in the middle: its steps depend on earlier ones; expected one of "
            f"{', '.join(OF_ONE_STEP)}, or one sampler for all steps",
            after.node,
        )
    levels = (*before.sigmas.levels[:-1], *after.sigmas.levels)
    return dataclasses.replace(
        before, guider=guidance_of_both(before, after), sigmas=dataclasses.replace(before.sigmas, levels=levels)
    )


def guided_steps(stage: StageValue) -> tuple[bool, ...]:
    """Return whether each step of a stage has guidance."""
    guider, num_steps = stage.guider, stage.sigmas.own or max(len(stage.sigmas.levels) - 1, 0)
    if guider.steps is not None:
        return guider.steps
    start, end = guider.share
    return tuple(is_guided(guider) and start <= index / num_steps <= end for index in range(num_steps))


def is_guided(guider: GuiderValue) -> bool:
    """Return whether the negative condition counts."""
    return guider.scale != 1 or (guider.audio_scale or 1) != 1


def guidance_of_both(first: StageValue, second: StageValue) -> GuiderValue:
    """Return the guidance of two stages that follow each other, where it is the same, or one of them has none. Raises
    NotSupportedError for another prompt or scale."""
    one, other = first.guider, second.guider
    if facts_of(one.positive) != facts_of(other.positive):
        raise NotSupportedError("another prompt for the second sampler; expected the same", other.positive.node)
    if not is_guided(one) or not is_guided(other):
        guider = one if is_guided(one) else other
    elif (one.scale, one.audio_scale) != (other.scale, other.audio_scale):
        raise NotSupportedError(
            f"a scale of guidance of {other.scale:g} in the second sampler, where the first has {one.scale:g}; "
            "expected the same, or 1 in one of them",
            other.node,
        )
    elif facts_of(one.negative) != facts_of(other.negative):
        node = other.node if other.negative is None else other.negative.node
        raise NotSupportedError("another negative prompt for the second sampler; expected the same", node)
    else:
        guider = one
    return dataclasses.replace(guider, model=one.model, steps=(*guided_steps(first), *guided_steps(second)))


def facts_of(condition: ConditioningValue | None) -> tuple[Any, ...]:
    """Return all that a condition says, whatever nodes it went through."""
    if condition is None:
        return ()
    pictures = tuple((each.file, each.decoded is None) for each in condition.references)
    encoders = tuple(each.file for each in condition.clip.weights)
    return condition.text, encoders, condition.zeroed is not None, condition.guidance, pictures, condition.fps


def goes_on(before: StageValue, after: StageValue) -> bool:
    """Return whether a stage starts at the noise level where the one before it ends, without noise of its own."""
    if not before.sigmas.levels or not after.sigmas.levels or after.noise.seed is not None:
        return False
    return abs(before.sigmas.levels[-1] - after.sigmas.levels[0]) <= SAME_LEVEL


def sampler_of(stage: StageValue) -> str:
    """Return the name of the sampler here. Raises NotSupportedError for one without a counterpart, and for options that
    it does not have."""
    name = SAMPLER_NAMES.get(stage.sampler.name)
    if name is None or name not in SAMPLERS:
        supported = ", ".join(each for each, ours in SAMPLER_NAMES.items() if ours in SAMPLERS)
        raise NotSupportedError(f"sampler {stage.sampler.name}: expected {supported}", stage.sampler.node)
    plain = {"eta": 1.0, "s_noise": 1.0, "s_noise_end": 1.0, "noise_clip_std": 0.0, "max_stage": 3.0}
    for option, value in stage.sampler.options.items():
        if value != plain[option]:
            raise NotSupportedError(f"{option}: expected {plain[option]:g}, got {value:g}", stage.sampler.node)
    return name


def levels_of(stage: StageValue) -> list[float]:
    """Return the noise levels of the steps. Raises NotSupportedError for a schedule that does not end at 0."""
    if len(stage.sigmas.levels) < 2 or stage.sigmas.levels[-1] > SAME_LEVEL:
        last = stage.sigmas.levels[-1] if stage.sigmas.levels else 1.0
        raise NotSupportedError(f"ends at a noise level of {last:.4g}; expected 0", stage.node)
    levels = stage.sigmas.levels[:-1]
    if any(after >= before for before, after in pairwise(levels)) or levels[-1] <= 0:
        raise NotSupportedError("sigmas: expected noise levels that fall from step to step", stage.sigmas.node)
    return [_first_level(stage), *levels[1:]]


def _first_level(stage: StageValue) -> float:
    """Return the noise level of the first step: of samplers in the signal-to-noise ratio ComfyUI takes one just below
    1, which has one."""
    first, model = stage.sigmas.levels[0], stage.guider.model
    known = known_model(model.weights.file)
    table = model.table or (None if known is None else known.sampling)
    if first < 1 or stage.sampler.name not in _OF_RATIO or not isinstance(table, NoiseTable):
        return first
    return shifted(1 - 1e-4, table.flow_shift)
