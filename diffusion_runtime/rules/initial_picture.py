"""Rules for pictures and videos that a request starts from: init_path, its strength and its mask (image to image,
inpainting)."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from diffusion_runtime.core.latent_geometry import LatentGeometry
from diffusion_runtime.errors import RequestError
from diffusion_runtime.media.audio import has_sound
from diffusion_runtime.media.clips import inspect_clip
from diffusion_runtime.models.video_control import check_clip, check_clip_mask, clip_remarks
from diffusion_runtime.request.fields import NO_INITIAL
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.request.layers import EXPLICIT_LEVELS
from diffusion_runtime.request.strength import DEFAULT_STRENGTH, starts_from_noise, steps_left_out
from diffusion_runtime.rules.batch_settings import BatchSettings
from diffusion_runtime.rules.draft import Draft

_FIELD = "init_path"
# Frames per second by which a video may be off for its sound: 0.02 s in a clip of 5 s at 24.
_OFF_RATE = 0.1


def check_given(draft: Draft, own_masks: bool, *, takes_pictures: bool) -> None:
    """Raises RequestError for a strength, or a mask, of a picture that is not given. own_masks: whether the model takes
    masks as a condition, of other fields; takes_pictures: whether it starts from any."""
    if draft.init_path is not None:
        return
    if draft.strength is not None and not takes_pictures:
        raise RequestError(f"strength: {NO_INITIAL}")
    if draft.strength is not None:
        raise RequestError(
            "strength: it says how much of a picture or a video to start from is made anew; give that: --init-path FILE"
        )
    if draft.mask_path is not None and not own_masks:
        raise RequestError(
            "mask_path: a mask says what of a picture or a video is made anew; give that: --init-path FILE"
        )


def size_of_picture(draft: Draft, defaults: Mapping[str, Any], geometry: LatentGeometry) -> dict[str, int]:
    """Return the height and width of what is made of init_path where a request says neither: its ratio, and the area
    of the model's default. Raises what inspect_clip raises."""
    sides = defaults.get("height"), defaults.get("width")
    if draft.init_path is None or draft.height or draft.width or not all(isinstance(side, int) for side in sides):
        return {}
    facts = inspect_clip(draft.init_path, _FIELD, 1)
    scale = math.sqrt(math.prod(map(int, sides)) / (facts.height * facts.width))  # type: ignore[arg-type]
    multiples = (geometry.token_multiple * geometry.spatial_factor * patch for patch in geometry.patch[1:])
    rows, columns = (
        max(round(side * scale / multiple), 1) * multiple
        for side, multiple in zip((facts.height, facts.width), multiples, strict=True)
    )
    return {"height": rows, "width": columns}


def default_strength(draft: Draft, own: Collection[str]) -> dict[str, float]:
    """Return the strength of a request that says none; nothing where noise levels of its own begin below 1. own: the
    fields that the request or its preset sets."""
    levels = next((draft.values[name] for name in EXPLICIT_LEVELS if name in own and name in draft.values), None)
    if draft.init_path is None or (levels is not None and levels[0] < 1):
        return {}
    return {"strength": DEFAULT_STRENGTH}


def check_initial(settings: BatchSettings) -> None:
    """Raises RequestError for files that a clip cannot start from, and a strength that leaves no step."""
    request, size, rule = settings.shared, settings.size, settings.sampling.geometry.frame_rule
    if request.init_path is None:
        return
    if steps_left_out(request) >= settings.num_inference_steps:
        raise RequestError(
            f"strength: with {request.strength:g} none of {settings.num_inference_steps} steps runs, and init_path "
            "stays as it is; expected more than 0"
        )
    facts = check_clip(_FIELD, request.init_path, size, rule)
    if request.mask_path is not None:
        check_clip_mask(request.mask_path, facts, _FIELD, size, rule)
    is_its_own = settings.sampling.geometry.makes_sound and initial_sound(request) == (_FIELD, request.init_path)
    if is_its_own and facts.fps is not None and abs(facts.fps - size.fps) > _OFF_RATE:
        raise RequestError(
            f"init_path: {request.init_path} has {facts.fps:.4g} frames per second, the clip {size.fps}: frames are "
            f"used one by one, and the sound would not go with them; convert it (ffmpeg -i in.mp4 -r {size.fps} "
            "out.mp4), or take its sound away (ffmpeg -i in.mp4 -an out.mp4)"
        )


def initial_sound(request: GenerationRequest) -> tuple[str, str] | None:
    """Return the field and the file of the sound that a resolved request starts from, in a model that makes pictures
    and sound: the given one, or the video's own; None for silence."""
    for field, path in (("audio_path", request.audio_path), (_FIELD, request.init_path)):
        if path is not None and has_sound(path, field):
            return field, path
    return None


def initial_note(settings: BatchSettings) -> str | None:
    """Return which of the steps run from init_path; None without one, and where all run from noise."""
    request = settings.shared
    if request.init_path is None or starts_from_noise(request):
        return None
    level = settings.build_sampler().steps(torch.device("cpu"))[0].sigma
    given = "sigmas" if request.strength is None else f"strength {request.strength:g}"
    return (
        f"init_path: {given}: {settings.num_steps} of {settings.num_inference_steps} steps run, from a noise level of "
        f"{level:.3g}"
    )


def initial_remarks(settings: BatchSettings) -> Iterator[str]:
    """Yield sentences on what of init_path is not used, and on the sound that starts from it."""
    request, size = settings.shared, settings.size
    if request.init_path is None:
        return
    for field in (_FIELD, "mask_path"):
        if (path := getattr(request, field)) is not None:
            yield from clip_remarks(field, path, size)
    if starts_from_noise(request):
        rest = "the rest of the mask alone is of it" if request.mask_path else "it is not used"
        yield f"init_path: strength {request.strength:g} begins with noise{_largest_of_use(request)}: {rest}"
        return
    if settings.sampling.geometry.makes_sound:
        yield f"init_path: the sound starts from {_sound_text(request)}, at the same step as the pictures"


def _largest_of_use(request: GenerationRequest) -> str:
    """Return, for a strength under 1 that leaves out no step because they are few, the largest one that does."""
    num_steps = request.num_inference_steps
    if request.strength == 1.0 or num_steps is None or num_steps < 2:
        return ""
    most = math.floor(100 * (num_steps - 1) / num_steps) / 100
    return f", as {num_steps} steps are few (give {most:g} or less)"


def _sound_text(request: GenerationRequest) -> str:
    source = initial_sound(request)
    if source is None:
        return "silence, as the file has none"
    return "that of audio_path" if source[0] == "audio_path" else "that of the video"
