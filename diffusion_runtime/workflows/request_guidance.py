"""Guidance of a workflow in a request."""

from __future__ import annotations

from collections.abc import Sequence

from diffusion_runtime.denoising.flow_schedule import shifted
from diffusion_runtime.denoising.named_schedules import NoiseTable
from diffusion_runtime.request.generation_request import REQUEST_FIELDS
from diffusion_runtime.workflows.evaluation import NotSupportedError, Verdict
from diffusion_runtime.workflows.known_models import EMBEDDED, OFFSET, KnownModel
from diffusion_runtime.workflows.request_parts import RequestParts
from diffusion_runtime.workflows.sampler_stages import SAME_LEVEL, guided_steps, is_guided
from diffusion_runtime.workflows.values import ConditioningValue, SkipValue, StageValue

# Of FLUX where no node says it.
_EMBEDDED_GUIDANCE = 3.5


def add_guidance(parts: RequestParts, stages: Sequence[StageValue], known: KnownModel) -> None:
    """Add the scales of guidance, the steps that have it, and the negative prompt. stages: the first one has the
    guidance of all, where the second is no expert of its own."""
    stage, is_any_guided = stages[0], any(is_guided(each.guider) for each in stages)
    guider, positive = stage.guider, stage.guider.positive
    scale = guider.scale
    if known.guidance == EMBEDDED:
        parts.request["guidance_scale"] = _EMBEDDED_GUIDANCE if positive.guidance is None else positive.guidance
        if scale != 1:
            parts.request["true_cfg_scale"] = scale
    else:
        parts.request["guidance_scale"] = scale - 1 if known.guidance == OFFSET else scale
    if guider.audio_scale is not None or parts.published.request.get("audio_guidance_scale") is not None:
        parts.request["audio_guidance_scale"] = scale if guider.audio_scale is None else guider.audio_scale
    _turn_off_terms(parts)
    _norm(parts, stage, known, is_any_guided)
    _zero_star(parts, stage, is_any_guided)
    _skip(parts, stage, known)
    if not is_guided(guider):
        return
    _add_steps(parts, guided_steps(stage))
    if guider.negative is not None:
        if _pictures_of(guider.negative) != _pictures_of(positive):
            raise NotSupportedError(
                "the negative condition has other pictures than the positive one; expected the same",
                guider.negative.node,
            )
        add_negative(parts, guider.negative, known)


def _add_steps(parts: RequestParts, guided: Sequence[bool]) -> None:
    if all(guided) or not any(guided):
        # Of none, guidance is off, which the scale says.
        return
    parts.request["guidance_start"], parts.request["guidance_stop"] = _shares(guided)


def _shares(chosen: Sequence[bool]) -> tuple[float, float]:
    """Return the shares of the steps from which on and before which they are chosen. Raises NotSupportedError for
    several stretches."""
    first, last = chosen.index(True), len(chosen) - 1 - list(reversed(chosen)).index(True)
    if not all(chosen[first : last + 1]):
        raise NotSupportedError("guidance in several stretches of the steps; expected one")
    return first / len(chosen), (last + 1) / len(chosen)


def _norm(parts: RequestParts, stage: StageValue, known: KnownModel, is_any_guided: bool) -> None:
    guider, norm = stage.guider, stage.guider.model.norm_of
    if norm is not None and not is_any_guided:
        parts.evaluation.note(norm, Verdict.WITHOUT_EFFECT, "the scale of guidance is 1")
    elif norm is not None and not known.norm:
        raise NotSupportedError("this model's guidance has no such norm here", norm)
    elif norm is None and is_guided(guider) and known.norm:
        parts.replaced(guider.node, "guidance with the norm of the conditional prediction, as its authors compute it")


def _zero_star(parts: RequestParts, stage: StageValue, is_any_guided: bool) -> None:
    found = stage.guider.model.zero_star
    if found is None:
        return
    if found.num_zero_steps:
        parts.request["zero_init_steps"] = found.num_zero_steps
    if is_any_guided:
        parts.request["cfg_zero_star"] = found.name
    elif not found.num_zero_steps:
        parts.evaluation.note(found.node, Verdict.WITHOUT_EFFECT, "the scale of guidance is 1")


def _skip(parts: RequestParts, stage: StageValue, known: KnownModel) -> None:
    """Add skip-layer guidance. Without the negative branch, diffusers' formula here begins at the prediction without
    the blocks, and ComfyUI's at the whole one: one more of the difference."""
    skip = stage.guider.model.skip
    if skip is None:
        return
    guided = is_guided(stage.guider)
    active = [each and (guided or skip.scale is not None) for each in _in_window(stage, skip, known)]
    if skip.scale == 0 or not any(active):
        parts.evaluation.note(skip.node, Verdict.WITHOUT_EFFECT, "it is of no step here")
        return
    if len(active) != len(guided_steps(stage)):
        raise NotSupportedError("skipped layers beside a second stage; expected one stage", skip.node)
    alone = [each and not has for each, has in zip(active, guided_steps(stage), strict=True)]
    if skip.scale is not None and guided and any(alone):
        raise NotSupportedError(
            "skipped layers in steps without guidance, where others have it; expected them in guided steps", skip.node
        )
    layers = []
    for name, indices in (("double", skip.double), ("single", skip.single)):
        if indices and name not in known.blocks:
            raise NotSupportedError(f"{name}_layers: the places of this model's blocks are not known here", skip.node)
        layers += [known.blocks[name] + index for index in indices]
    parts.request["skip_layers"] = sorted(layers)
    if skip.scale is not None:
        parts.request["skip_layer_scale"] = skip.scale if guided else skip.scale + 1
    parts.request["skip_layer_start"], parts.request["skip_layer_stop"] = _shares(active)


def _in_window(stage: StageValue, skip: SkipValue, known: KnownModel) -> list[bool]:
    """Return whether each step's noise level is one of a node's window: shares of the schedule before its shift, whose
    ends count."""
    if stage.sigmas.own is not None:
        # Evenly spaced before the shift, whatever that is.
        return [skip.start <= index / stage.sigmas.own <= skip.end for index in range(stage.sigmas.own)]
    table = stage.guider.model.table or known.sampling
    if not isinstance(table, NoiseTable):
        raise NotSupportedError("start_percent, end_percent: the model's noise schedule is not known here", skip.node)
    high, low = (1 if share <= 0 else shifted(1 - share, table.flow_shift) for share in (skip.start, skip.end))
    return [low - SAME_LEVEL <= each <= high + SAME_LEVEL for each in stage.sigmas.levels[:-1]]


def add_negative(parts: RequestParts, negative: ConditioningValue, known: KnownModel) -> None:
    """Add the negative prompt, or that zeros stand for it."""
    parts.request["negative_prompt"] = negative.text
    if negative.zeroed is None:
        return
    if not known.zeros:
        raise NotSupportedError(
            "zeros in place of an encoded negative prompt: ComfyUI has them before other layers of this model's text "
            "than here; link a CLIPTextEncode",
            negative.zeroed,
        )
    parts.request["negative_encoding"] = "zeros"


def _pictures_of(condition: ConditioningValue) -> list[str | None]:
    return [each.file for each in condition.references]


def _turn_off_terms(parts: RequestParts) -> None:
    """Turn off what the model's authors add to guidance, and no node of the workflow does."""
    documented = parts.published.request
    for name, declared in REQUEST_FIELDS.items():
        value = documented.get(name)
        if isinstance(value, int | float) and value != declared.off is not None and name not in parts.request:
            parts.request[name] = declared.off
    if documented.get("skip_layers"):
        parts.request["skip_layer_stop"] = 0.0
