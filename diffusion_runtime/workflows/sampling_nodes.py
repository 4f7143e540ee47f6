"""Nodes of samplers, noise levels, noise and guidance."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from diffusion_runtime.denoising.flow_schedule import shifted
from diffusion_runtime.denoising.named_schedules import SCHEDULES, NoiseTable, scheduled
from diffusion_runtime.errors import nearest
from diffusion_runtime.workflows.evaluation import Call, NodeClass
from diffusion_runtime.workflows.guidance_nodes import guided
from diffusion_runtime.workflows.known_models import OWN, UNKNOWN, known_model
from diffusion_runtime.workflows.values import (
    GuiderValue,
    LatentValue,
    ModelValue,
    NoiseValue,
    SamplerValue,
    SigmasValue,
    StageValue,
    Unknown,
)

_MAX_STEPS = 1000
# For which ComfyUI computes one step more and leaves the one before the last out.
_WITHOUT_PENULTIMATE = ("dpm_2", "dpm_2_ancestral", "uni_pc", "uni_pc_bh2")
# Of LTXVScheduler and where it has no latent.
_LTX_TOKENS = 4096


def _levels(call: Call, model: ModelValue, name: str, steps: int, denoise: float) -> SigmasValue:
    """Return the noise levels of a scheduler, with the last 0."""
    if not 1 <= steps <= _MAX_STEPS:
        call.refuse(f"steps: expected 1 to {_MAX_STEPS}, got {steps}")
    if name not in SCHEDULES:
        call.refuse(f"scheduler: {name} is not supported; expected {', '.join(SCHEDULES)}.{nearest(name, SCHEDULES)}")
    table, known = model.table, known_model(model.weights.file)
    if table is None and known is None:
        call.refuse(
            f"the model {model.weights.file} is not known, and so its noise schedule is not; name it in the node"
        )
    if table is None and known is not None and isinstance(known.sampling, str):
        return _own(call, known.sampling, name, steps, denoise)
    if table is None:
        assert known is not None
        assert isinstance(known.sampling, NoiseTable)
        table = known.sampling
    if not denoise > 0:
        call.refuse(f"denoise: expected a number above 0, got {denoise:g}")
    total = steps if denoise > 0.9999 else int(steps / denoise)
    if total > _MAX_STEPS:
        call.refuse(f"steps, denoise: lead to {total} steps; expected at most {_MAX_STEPS}")
    levels = (*scheduled(name, total, table), 0.0)
    text = f"{name}, {steps} steps, shift {table.flow_shift:.4g}"
    return SigmasValue(call.node, levels[-(steps + 1) :], text=text)


def _own(call: Call, sampling: str, name: str, steps: int, denoise: float) -> SigmasValue:
    if denoise < 1:
        call.refuse("denoise: expected 1: this model's schedule depends on the size")
    if sampling == OWN and name not in ("simple", "normal"):
        call.refuse(f"scheduler: expected simple for this model, whose schedule depends on the size, got {name}")
    if sampling == UNKNOWN:
        call.replaced("the model's own schedule: ComfyUI's shift of this model is not known here")
    elif name != "simple":
        call.replaced("the model's own schedule, which is `simple`")
    return SigmasValue(call.node, own=steps, text=f"the model's own, {steps} steps")


def _basic(call: Call) -> tuple[Any, ...]:
    model = call.of("model", ModelValue)
    name, steps = call.text("scheduler", "simple"), call.whole("steps", 20)
    return (_levels(call, model, name, steps, float(call.number("denoise", 1.0))),)


def _manual(call: Call) -> tuple[Any, ...]:
    parts = call.text("sigmas").replace(",", " ").split()
    try:
        levels = tuple(float(each) for each in parts)
    except ValueError:
        call.refuse("sigmas: expected numbers with commas between them")
    if len(levels) < 2 or len(levels) > _MAX_STEPS or not all(0 <= each <= 1 for each in levels):
        call.refuse(f"sigmas: expected 2 to {_MAX_STEPS} noise levels from 1 to 0, got {call.text('sigmas')[:60]}")
    return (SigmasValue(call.node, levels, text=f"{len(levels) - 1} given levels"),)


def _flux2(call: Call) -> tuple[Any, ...]:
    """Flux2Scheduler: the shift of FLUX.2's own pipeline, by size and steps."""
    call.size("width", 1024)
    call.size("height", 1024)
    steps = call.whole("steps", 20)
    if not 1 <= steps <= _MAX_STEPS:
        call.refuse(f"steps: expected 1 to {_MAX_STEPS}, got {steps}")
    return (SigmasValue(call.node, own=steps, text=f"FLUX.2's own, {steps} steps"),)


def _ltx(call: Call) -> tuple[Any, ...]:
    """LTXVScheduler: shift by the number of tokens, stretched to a terminal level."""
    latent, steps = call.maybe("latent", LatentValue), call.whole("steps", 20)
    if not 1 <= steps <= _MAX_STEPS:
        call.refuse(f"steps: expected 1 to {_MAX_STEPS}, got {steps}")
    tokens = _LTX_TOKENS
    if latent is not None:
        sides = latent.frames, latent.height, latent.width
        if any(isinstance(each, Unknown) for each in sides):
            call.refuse("latent: the noise schedule depends on the size of a picture that is not here")
        frames, height, width = (each for each in sides if not isinstance(each, Unknown))
        tokens = ((frames - 1) // 8 + 1) * (height // 32) * (width // 32)
    high, low = call.number("max_shift", 2.05), call.number("base_shift", 0.95)
    slope = (high - low) / (4096 - 1024)
    mu = tokens * slope + low - slope * 1024
    if not -20 < mu < 20:
        call.refuse(f"max_shift, base_shift: lead to a shift of e^{mu:.3g}")
    levels = [shifted(1 - index / steps, math.exp(mu)) for index in range(steps)]
    terminal = call.number("terminal", 0.1)
    if call.flag("stretch", True) and steps > 1 and terminal < 1:
        scale = (1 - levels[-1]) / (1 - terminal)
        levels = [1 - (1 - level) / scale for level in levels]
    return (SigmasValue(call.node, (*levels, 0.0), text=f"LTX, {steps} steps, shift {math.exp(mu):.4g}"),)


def _split(call: Call) -> tuple[Any, ...]:
    sigmas, step = call.of("sigmas", SigmasValue), call.whole("step", 0)
    if sigmas.own is not None:
        call.refuse("sigmas: a schedule that depends on the size is not split")
    high, low = sigmas.levels[: max(step, 0) + 1], sigmas.levels[max(step, 0) :]
    return (dataclasses.replace(sigmas, levels=high), dataclasses.replace(sigmas, levels=low))


def _first_level(call: Call) -> tuple[Any, ...]:
    sigmas, level = call.of("sigmas", SigmasValue), float(call.number("sigma", 1.0))
    if sigmas.own is not None or not sigmas.levels:
        call.refuse("sigmas: a schedule that depends on the size has no level that could be set")
    return (dataclasses.replace(sigmas, levels=(level, *sigmas.levels[1:])),)


def _chosen(call: Call) -> tuple[Any, ...]:
    return (SamplerValue(call.node, call.text("sampler_name", "euler")),)


def _named(name: str, *options: tuple[str, float]) -> Callable[[Call], tuple[Any, ...]]:
    def run(call: Call) -> tuple[Any, ...]:
        values = {key: float(call.number(key, default)) for key, default in options}
        return (SamplerValue(call.node, name, values),)

    return run


def _euler_ancestral(call: Call) -> tuple[Any, ...]:
    options = {name: float(call.number(name, 1.0)) for name in ("eta", "s_noise")}
    if options["eta"] == 0:
        # No step goes below the next level, and no noise is added.
        return (SamplerValue(call.node, "euler", {}),)
    return (SamplerValue(call.node, "euler_ancestral", options),)


def _er_sde(call: Call) -> tuple[Any, ...]:
    if call.text("solver_type", "ER-SDE") != "ER-SDE":
        call.refuse(f"solver_type: expected ER-SDE, got {call.text('solver_type')}")
    options = {"max_stage": float(call.whole("max_stage", 3)), "s_noise": float(call.number("s_noise", 1.0))}
    return (SamplerValue(call.node, "er_sde", options),)


def _noise(call: Call) -> tuple[Any, ...]:
    return (NoiseValue(call.node, call.whole("noise_seed", 0)),)


def _no_noise(call: Call) -> tuple[Any, ...]:
    return (NoiseValue(call.node, None),)


def _sampled(call: Call, stage: StageValue) -> LatentValue:
    if stage.sampler.name in _WITHOUT_PENULTIMATE and stage.sigmas.own is not None:
        call.refuse(f"sampler_name: {stage.sampler.name} on a schedule that depends on the size")
    levels = stage.sigmas.levels
    if stage.sigmas.own is None and (len(levels) < 2 or levels[0] > 1):
        what = f"a first noise level of {levels[0]:.4g}" if len(levels) > 1 else f"{len(levels)} noise levels"
        call.refuse(f"sigmas: {what}; expected two or more, from 1 to 0")
    return dataclasses.replace(stage.latent, node=call.node, stage=stage)


def _advanced(call: Call) -> tuple[Any, ...]:
    stage = StageValue(
        call.node,
        call.of("guider", GuiderValue),
        call.of("sampler", SamplerValue),
        call.of("sigmas", SigmasValue),
        call.of("noise", NoiseValue),
        call.of("latent_image", LatentValue),
    )
    latent = _sampled(call, stage)
    return latent, latent


def _custom(call: Call) -> tuple[Any, ...]:
    noise = NoiseValue(call.node, call.whole("noise_seed", 0) if call.flag("add_noise", True) else None)
    (guider,) = guided(call)
    sampler, sigmas = call.of("sampler", SamplerValue), call.of("sigmas", SigmasValue)
    latent = _sampled(call, StageValue(call.node, guider, sampler, sigmas, noise, call.of("latent_image", LatentValue)))
    return latent, latent


def _with_penultimate_left_out(call: Call, model: ModelValue, sampler: str, steps: int, denoise: float) -> SigmasValue:
    name = call.text("scheduler", "normal")
    if sampler not in _WITHOUT_PENULTIMATE:
        return _levels(call, model, name, steps, denoise)
    if denoise < 1:
        steps = int(steps / denoise) if denoise > 0 else steps
    sigmas = _levels(call, model, name, steps + 1, 1.0)
    if sigmas.own is not None:
        call.refuse(f"sampler_name: {sampler} on a schedule that depends on the size")
    levels = (*sigmas.levels[:-2], sigmas.levels[-1])
    kept = call.whole("steps", 20)
    return dataclasses.replace(sigmas, levels=levels[-(kept + 1) :])


def _plain(call: Call) -> tuple[Any, ...]:
    (guider,) = guided(call)
    sampler = call.text("sampler_name", "euler")
    denoise = float(call.number("denoise", 1.0))
    sigmas = _with_penultimate_left_out(call, guider.model, sampler, call.whole("steps", 20), denoise)
    noise = NoiseValue(call.node, call.whole("seed", 0))
    stage = StageValue(
        call.node, guider, SamplerValue(call.node, sampler), sigmas, noise, call.of("latent_image", LatentValue)
    )
    return (_sampled(call, stage),)


def _in_part(call: Call) -> tuple[Any, ...]:
    """KSamplerAdvanced: some steps of a schedule, perhaps from latents that still have noise."""
    (guider,) = guided(call)
    sampler, steps = call.text("sampler_name", "euler"), call.whole("steps", 20)
    sigmas = _with_penultimate_left_out(call, guider.model, sampler, steps, 1.0)
    start, end = call.whole("start_at_step", 0), call.whole("end_at_step", 10_000)
    latent = call.of("latent_image", LatentValue)
    levels = sigmas.levels
    if sigmas.own is not None and (start > 0 or end < steps):
        call.refuse("start_at_step, end_at_step: some steps of a schedule that depends on the size")
    if sigmas.own is None:
        if end < len(levels) - 1:
            levels = levels[: max(end, 0) + 1]
            if call.text("return_with_leftover_noise", "disable") == "disable":
                levels = (*levels[:-1], 0.0)
        if start >= len(levels) - 1:
            call.without_effect("none of its steps is left")
            return (latent,)
        levels = levels[max(start, 0) :]
    seed = call.whole("noise_seed", 0) if call.text("add_noise", "enable") == "enable" else None
    stage = StageValue(
        call.node,
        guider,
        SamplerValue(call.node, sampler),
        dataclasses.replace(sigmas, levels=levels),
        NoiseValue(call.node, seed),
        latent,
    )
    return (_sampled(call, stage),)


TABLE: Mapping[str, NodeClass] = {
    "BasicScheduler": NodeClass(_basic),
    "ManualSigmas": NodeClass(_manual),
    "Flux2Scheduler": NodeClass(_flux2),
    "LTXVScheduler": NodeClass(_ltx),
    "SplitSigmas": NodeClass(_split),
    "SetFirstSigma": NodeClass(_first_level),
    "KSamplerSelect": NodeClass(_chosen),
    "SamplerEulerAncestral": NodeClass(_euler_ancestral),
    "SamplerLCM": NodeClass(_named("lcm", ("s_noise", 1.0), ("s_noise_end", 1.0), ("noise_clip_std", 0.0))),
    "SamplerER_SDE": NodeClass(_er_sde),
    "RandomNoise": NodeClass(_noise),
    "DisableNoise": NodeClass(_no_noise),
    "SamplerCustomAdvanced": NodeClass(_advanced),
    "SamplerCustom": NodeClass(_custom),
    "KSampler": NodeClass(_plain),
    "KSamplerAdvanced": NodeClass(_in_part),
}
