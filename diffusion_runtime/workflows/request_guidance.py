"""Guidance of a workflow in a request."""

from __future__ import annotations

from diffusion_runtime.request.generation_request import REQUEST_FIELDS
from diffusion_runtime.workflows.evaluation import NotSupportedError, Verdict
from diffusion_runtime.workflows.known_models import EMBEDDED, OFFSET, KnownModel
from diffusion_runtime.workflows.request_parts import RequestParts
from diffusion_runtime.workflows.values import (
    StageValue,
)

# Of FLUX where no node says it.
_EMBEDDED_GUIDANCE = 3.5


def add_guidance(parts: RequestParts, stage: StageValue, known: KnownModel) -> None:
    """Add the scales of guidance and the negative prompt of a stage."""
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
    is_guided = scale != 1 or (guider.audio_scale or 1) != 1
    norm = guider.model.norm_of
    if norm is not None and not is_guided:
        parts.evaluation.note(norm, Verdict.WITHOUT_EFFECT, "the scale of guidance is 1")
    elif norm is not None and not known.norm:
        raise NotSupportedError("this model's guidance has no such norm here", norm)
    if not is_guided:
        return
    if known.norm and norm is None:
        parts.replaced(guider.node, "guidance with the norm of the conditional prediction, as its authors compute it")
    if guider.negative is None:
        return
    if guider.negative.zeroed is not None:
        raise NotSupportedError(
            f"zeros in place of an encoded negative prompt, with a scale of {scale:g}: guidance here encodes a text",
            guider.negative.zeroed,
        )
    parts.request["negative_prompt"] = guider.negative.text


def _turn_off_terms(parts: RequestParts) -> None:
    """Turn off what the model's authors add to guidance, and no node of the workflow does."""
    documented = parts.published.request
    for name, declared in REQUEST_FIELDS.items():
        value = documented.get(name)
        if isinstance(value, int | float) and value != declared.off is not None and name not in parts.request:
            parts.request[name] = declared.off
    if documented.get("skip_layers"):
        parts.request["skip_layer_stop"] = 0.0
