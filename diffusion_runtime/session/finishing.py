"""Finishing: whether saved latents are those of a model and a request, before their denoising goes on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from diffusion_runtime.errors import ConfigError, OutputError, RequestError, UsageError, shown
from diffusion_runtime.generation.saved_latents import SavedLatents
from diffusion_runtime.request.generation_request import INPUT_FIELDS, GenerationRequest
from diffusion_runtime.request.samplers import SAMPLERS
from diffusion_runtime.rules.batch_settings import BatchSettings
from diffusion_runtime.rules.request_rules import RequestRules
from diffusion_runtime.session.resume import output_identity

# Options of decoding, which comes after the latents.
_LATER_OPTIONS = frozenset(
    {
        "audio_vae_path",
        "interpolation_path",
        "vocoder_path",
        "upsampler_path",
        "vae_decode",
        "vae_decoder",
        "vae_tiling",
    }
)
# Fields of a request that may differ from those of the steps before: of what comes after them, and those that are
# compared as the noise levels and shapes they lead to.
_LATER_FIELDS = frozenset(
    {
        "stop_after_step",
        "num_inference_steps",
        "sigmas",
        "sigmas_before_shift",
        "flow_shift",
        "second_stage_sigmas",
        "second_stage_sampler",
        "adain_factor",
        "tone_map_compression_ratio",
        "height",
        "width",
        "segment_seeds",
        "decode_timestep",
        "decode_noise_scale",
        "color_correction",
        "interpolate",
    }
)


def request_of(saved: SavedLatents) -> GenerationRequest:
    """Return the request of saved latents, to its end. Raises OutputError for a recipe without one."""
    values = saved.recipe.get("request")
    if not isinstance(values, Mapping):
        raise OutputError("the recipe of the saved latents has no request; the file is damaged")
    try:
        return dataclasses.replace(GenerationRequest.from_dict(values), stop_after_step=None)
    except UsageError as error:
        raise OutputError(f"the recipe of the saved latents: {error}") from error


def kept_segments(saved: SavedLatents, settings: BatchSettings) -> SavedLatents:
    """Return saved latents without the segments that the request has another seed for, and, where each begins with the
    end of the one before, without those behind. settings: of the request."""
    if saved.state is not None:
        return saved
    values = {"seed": settings.shared.seed, **_of(saved.recipe, "request")}
    seeds = values.get("segment_seeds") or ()
    kept = dict[int, torch.Tensor]()
    for index in range(len(settings.segments)):
        then = seeds[index] if isinstance(seeds, list) and index < len(seeds) else values["seed"]
        is_same = index in saved.clean and then == settings.seed_of_segment(index)
        if not is_same and not settings.segments.is_blended:
            break
        if is_same:
            kept[index] = saved.clean[index]
    return dataclasses.replace(saved, clean=kept, num_done=len(kept))


def continued_recipe(saved: SavedLatents, recipe: Mapping[str, Any], *, allow_changes: bool) -> dict[str, Any]:
    """Return what the recipe of a generation that goes on holds beside its own: a length that was chosen for the
    prompt, and where the steps before were made with other values, how many they are and what those values were.

    recipe: of the generation. Raises ConfigError for other values of what made the steps, unless allow_changes.
    """
    changes = _changes(saved.recipe, recipe)
    if changes and not allow_changes:
        differing = "; ".join(
            f"{name}: {shown(then)} before, {shown(now)} now" for name, (then, now) in changes.items()
        )
        raise ConfigError(
            f"finish: the {saved.num_done} steps that are done were made with other values: {differing}. Give those of "
            "before, or --allow-changes to go on all the same"
        )
    asked = saved.recipe.get("asked")
    kept = {"asked": asked} if isinstance(asked, Mapping) else {}
    before = {name: then for name, (then, _) in changes.items()}
    steps_then, steps_now = (_of(each, "request").get("num_inference_steps") for each in (saved.recipe, recipe))
    if steps_then != steps_now:
        before["request.num_inference_steps"] = steps_then
    earlier = _of(saved.recipe, "continued")
    if not before and not earlier:
        return kept
    # Of several times, the first: what made the first steps.
    after, made_with = earlier.get("after", saved.num_done), {**before, **_of(earlier, "made_with")}
    return {**kept, "continued": {"after": after, "made_with": made_with}}


def continued_request(saved: SavedLatents, request: GenerationRequest, rules: RequestRules) -> GenerationRequest:
    """Return the request of the whole generation that goes on from saved latents: with another number of steps those
    done, then those of a schedule of so many steps that are below; with a second stage that the steps before were made
    without twice their height and width.

    Raises RequestError where no step is left, and for a sampler that spaces its own noise levels.
    """
    then = _of(saved.recipe, "request")
    second = request.second_stage_sigmas or rules.defaults.get("second_stage_sigmas")
    if second and not then.get("second_stage_sigmas"):
        doubled = {name: 2 * size for name in ("height", "width") if (size := getattr(request, name)) is not None}
        request = dataclasses.replace(request, **doubled)
    number, before = request.num_inference_steps, then.get("num_inference_steps")
    if number in (None, before) or request.sigmas is not None:
        return request
    if saved.state is None or saved.num_done >= saved.num_steps:
        raise RequestError(
            f"num_inference_steps: all {before} steps are done, and no other number can be made of them; leave it out"
        )
    settings = rules.settings(rules.resolve(request))
    sampler = str(settings.shared.sampler)
    if not SAMPLERS[sampler].takes_levels:
        raise RequestError(
            f"num_inference_steps: {sampler} spaces its own noise levels, and other steps cannot follow those that are "
            f"done; leave it out, or begin a draft with another --sampler"
        )
    steps = settings.build_sampler().steps(torch.device("cpu"))
    levels = list(saved.levels)
    # A step of several predictions begins at the first one's.
    below = {step.index: step.sigma for step in reversed(steps) if step.sigma is not None and step.sigma < levels[-1]}
    levels += [sigma for _, sigma in sorted(below.items())]
    # Levels that begin below 1 say what strength said.
    return dataclasses.replace(
        request,
        num_inference_steps=len(levels),
        sigmas=tuple(levels),
        sigmas_before_shift=None,
        flow_shift=None,
        strength=None,
    )


def _changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return what made the steps before and is another value now, by its name in a recipe: both values."""
    before, after = (_flat(output_identity(each)) for each in (then, now))
    names = dict.fromkeys((*before, *after))
    return {name: pair for name in names if (pair := (before.get(name), after.get(name)))[0] != pair[1]}


def _flat(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of an identity that steps are made with, by section and name."""
    found = {}
    for section, values in identity.items():
        if section == "continued":
            continue
        later = _LATER_FIELDS if section == "request" else _LATER_OPTIONS
        if not isinstance(values, Mapping):
            found[section] = values
            continue
        found |= {f"{section}.{name}": value for name, value in values.items() if name not in later}
    # A folder or a file may have moved: configs and weights, and digests of the files that were given, are compared.
    for name in ("model.path", *(f"request.{field}" for field in INPUT_FIELDS)):
        found.pop(name, None)
    return {name: value for name, value in found.items() if value is not None}


def _of(recipe: Mapping[str, Any], section: str) -> Mapping[str, Any]:
    found = recipe.get(section)
    return found if isinstance(found, Mapping) else {}
