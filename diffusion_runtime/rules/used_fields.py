"""Used fields: what a model does not take of a request, and what a generation does not use of one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from diffusion_runtime.errors import RequestError, shown
from diffusion_runtime.request.fields import (
    ANY_GUIDANCE,
    ATTENTION_GUIDANCE,
    GUIDANCE,
    GUIDED_CHUNKS,
    IMAGES,
    NEGATIVE_TEXT,
    PLACED_IMAGES,
    SHIFT,
    VIDEO,
)
from diffusion_runtime.request.generation_request import REQUEST_FIELDS, UNSET
from diffusion_runtime.rules.batch_settings import BatchSettings
from diffusion_runtime.rules.draft import Draft
from diffusion_runtime.rules.sizes import shift_of_size


def refuse_unused(draft: Draft, model_fields: Collection[str], product: str) -> None:
    """Raises RequestError for a value of a field that this model does not use. model_fields: those that not every model
    uses and it does. product: images or videos."""
    for name, declared in REQUEST_FIELDS.items():
        value = getattr(draft, name)
        if declared.refusal is not None and name not in model_fields and value not in (UNSET[name], declared.off):
            raise RequestError(f"{name}: {declared.refusal.format(product=product, value=shown(value))}")


def unused_values(
    settings: BatchSettings, defaults: Mapping[str, Any], model_fields: Collection[str] = ()
) -> list[str]:
    """Return what a resolved request sets beside the model's defaults and its generation does not use, as sentences.
    model_fields: see refuse_unused."""
    request, reasons = settings.shared, _reasons(settings, model_fields)
    computed = shift_of_size(request, settings.sampling)
    remarks = []
    for name, declared in REQUEST_FIELDS.items():
        value = getattr(request, name)
        # An empty text asks for nothing, and a value that turns a term off.
        usual = (UNSET[name], defaults.get(name), computed.get(name), declared.off, "")
        if declared.used_with in reasons and value not in usual:
            remarks.append(f"{name}: {shown(value)} is not used: {reasons[declared.used_with]}")
    return remarks


def _reasons(settings: BatchSettings, model_fields: Collection[str]) -> dict[str | None, str]:
    """Return why fields of a kind (RequestField.used_with) are not used, by the kind."""
    request, reasons = settings.shared, dict[str | None, str]()
    if not settings.guidance.is_guided:
        reasons[GUIDANCE] = "no second branch of guidance runs (a scale of 1 or less)"
        if settings.guidance.terms is None:
            reasons[ANY_GUIDANCE] = reasons[GUIDANCE]
        reasons[GUIDED_CHUNKS] = reasons[GUIDANCE]
        if not settings.guidance.reads_negative:
            way = "; --nag-scale 5 would use it, within attention" if "nag_scale" in model_fields else ""
            reasons[NEGATIVE_TEXT] = reasons[GUIDANCE] + way
    elif request.guided_chunks is None:
        reasons[GUIDED_CHUNKS] = "every chunk is guided; give guided_chunks (--guided-chunks 1)"
    if settings.guidance.normalized(settings.num_requests) is None:
        reasons[ATTENTION_GUIDANCE] = "there is no normalized attention guidance (--nag-scale 5)"
    if settings.sampling.geometry.temporal_factor == 1:
        reasons[VIDEO] = "this model makes images"
    if request.image_path is None and request.last_image_path is None and not request.frame_conditions:
        reasons[IMAGES] = "the request has no image"
    if not request.frame_conditions:
        reasons[PLACED_IMAGES] = "no image has a strength of its own (--condition-at)"
    if request.sigmas is not None:
        reasons[SHIFT] = "sigmas are the noise levels as they run"
    return reasons
