"""Nodes of guidance: guiders, and those that change a model's guidance."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from diffusion_runtime.workflows.evaluation import Call, NodeClass
from diffusion_runtime.workflows.values import (
    ConditioningValue,
    GuiderValue,
    ModelValue,
    SkipValue,
    ZeroStarValue,
)

_MAX_BLOCKS = 1000


def guided(call: Call) -> tuple[Any, ...]:
    model = call.of("model", ModelValue)
    positive, negative = call.of("positive", ConditioningValue), call.of("negative", ConditioningValue)
    return (GuiderValue(call.node, model, positive, negative, float(call.number("cfg", 8.0))),)


def _unguided(call: Call) -> tuple[Any, ...]:
    model, positive = call.of("model", ModelValue), call.of("conditioning", ConditioningValue)
    return (GuiderValue(call.node, model, positive, None, 1.0),)


def _guided_with_sound(call: Call) -> tuple[Any, ...]:
    """LTXVDualCFGGuider: a scale of the pictures and one of the sound."""
    model = call.of("model", ModelValue)
    positive, negative = call.of("positive", ConditioningValue), call.of("negative", ConditioningValue)
    scales = [float(call.number(name, 1.0)) for name in ("video_cfg", "audio_cfg")]
    return (GuiderValue(call.node, model, positive, negative, scales[0], scales[1]),)


def _scheduled(call: Call) -> tuple[Any, ...]:
    """ScheduledCFGGuidance (KJNodes): guidance of a share of the steps, both ends included."""
    (guider,) = guided(call)
    share = tuple(float(call.number(name, plain)) for name, plain in (("start_percent", 0.0), ("end_percent", 1.0)))
    if not 0 <= share[0] <= share[1] <= 1:
        call.refuse("start_percent, end_percent: expected shares from 0 to 1, the first one the smaller")
    return (dataclasses.replace(guider, share=share),)


def _norm(call: Call) -> tuple[Any, ...]:
    """CFGNorm: the guided prediction gets the norm of the conditional one, as Qwen-Image's own guidance has it."""
    model = call.of("model", ModelValue)
    if call.number("strength", 1.0) != 1.0 or call.flag("pre_cfg"):
        call.refuse("strength, pre_cfg: expected 1 and false: the norm of the guided prediction is that of the first")
    if model.zero_star is not None:
        call.refuse("behind CFG-zero*, another change of the guided prediction; expected one of them")
    return (dataclasses.replace(model, norm_of=call.node),)


def _zero_star(call: Call) -> tuple[Any, ...]:
    """CFGZeroStar of ComfyUI's own nodes, which scales clean predictions."""
    return (_with_zero_star(call, ZeroStarValue(call.node, "comfyui")),)


def _zero_star_and_init(call: Call) -> tuple[Any, ...]:
    """CFGZeroStarAndInit (KJNodes): the paper's formula, and as many first steps and one more without velocity."""
    count = call.whole("zero_init_steps", 0) + 1 if call.flag("use_zero_init", True) else 0
    if not 0 <= count <= _MAX_BLOCKS:
        call.refuse(f"zero_init_steps: expected 0 to {_MAX_BLOCKS}, got {count - 1}")
    return (_with_zero_star(call, ZeroStarValue(call.node, "on", count)),)


def _with_zero_star(call: Call, value: ZeroStarValue) -> ModelValue:
    model = call.of("model", ModelValue)
    if model.zero_star is not None or model.norm_of is not None:
        call.refuse("CFG-zero* behind another change of the guided prediction; expected one of them")
    return dataclasses.replace(model, zero_star=value)


def _skipped(call: Call) -> tuple[Any, ...]:
    """SkipLayerGuidanceDiT, and its simple form, which has no scale."""
    model, is_simple = call.of("model", ModelValue), call.node.kind.endswith("Simple")
    double, single = (_blocks(call, name) for name in ("double_layers", "single_layers"))
    if not double and not single:
        call.without_effect("it names no layer")
        return (model,)
    if model.skip is not None:
        call.refuse("two nodes that skip layers; expected one")
    if call.number("rescaling_scale", 0.0) != 0:
        call.refuse(f"rescaling_scale: expected 0, got {call.number('rescaling_scale'):g}")
    scale = None if is_simple else float(call.number("scale", 3.0))
    starts, ends = (0.0, 1.0) if is_simple else (0.01, 0.15)
    start, end = float(call.number("start_percent", starts)), float(call.number("end_percent", ends))
    if not (0 <= start <= 1 and 0 <= end <= 1):
        call.refuse("start_percent, end_percent: expected shares from 0 to 1")
    if scale is not None and not 0 <= scale <= 100:
        call.refuse(f"scale: expected a number from 0 to 100, got {scale:g}")
    return (dataclasses.replace(model, skip=SkipValue(call.node, double, single, scale, start, end)),)


def _blocks(call: Call, name: str) -> tuple[int, ...]:
    numbers = re.findall(r"\d+", call.text(name, "7, 8, 9"))
    if len(numbers) > _MAX_BLOCKS or any(len(each) > 4 for each in numbers):
        call.refuse(f"{name}: expected numbers of layers with commas between them")
    return tuple(sorted({int(each) for each in numbers}))


TABLE: Mapping[str, NodeClass] = {
    "CFGGuider": NodeClass(guided),
    "BasicGuider": NodeClass(_unguided),
    "LTXVDualCFGGuider": NodeClass(_guided_with_sound),
    "ScheduledCFGGuidance": NodeClass(_scheduled),
    "CFGNorm": NodeClass(_norm),
    "CFGZeroStar": NodeClass(_zero_star),
    "CFGZeroStarAndInit": NodeClass(_zero_star_and_init),
    "SkipLayerGuidanceDiT": NodeClass(_skipped),
    "SkipLayerGuidanceDiTSimple": NodeClass(_skipped),
}
