"""Rules for requests with a step cache: what fits the model, and the request as a recipe has it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from diffusion_runtime.denoising.step_cache.requested import calibration_of
from diffusion_runtime.denoising.step_cache.teacache import polynomial_of
from diffusion_runtime.errors import RequestError
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.request.step_cache_options import (
    DBCacheOptions,
    MagCacheOptions,
    StepCacheSettings,
    TeaCacheOptions,
    TeaCachePolynomials,
)
from diffusion_runtime.request.strength import steps_that_run
from diffusion_runtime.rules.batch_settings import BatchSettings


def step_cache_of(request: GenerationRequest) -> StepCacheSettings | None:
    """Return the step cache of a request; None where every step is computed."""
    return None if request.step_cache is None else StepCacheSettings.parse(request.step_cache)


def step_cache_values(request: GenerationRequest, cache: StepCacheSettings | None = None) -> dict[str, Any]:
    """Return the request values with every option of the step cache spelled out, and the guidance mode that it needs;
    `none` stays. cache: with options that the model fills, None for that of the request.

    Raises RequestError for a cache that is not made for so few steps.
    """
    cache = step_cache_of(request) if cache is None else cache
    if cache is None:
        return {}
    if (num_steps := steps_that_run(request)) is not None:
        cache.check_steps(num_steps)
    return {"step_cache": cache.text, **({"guidance_mode": "two_pass"} if cache.decides_per_branch else {})}


@dataclass(frozen=True)
class StepCacheRules:
    """Rules of a model for step caches. teacache: what TeaCache's authors published for it. identity: of
    `model_identity`, computed when a calibration is compared with it. needs_whole_passes: whether every forward pass
    has to run all of its blocks, as a CUDA graph does."""

    teacache: TeaCachePolynomials | None = None
    identity: Callable[[], Mapping[str, str]] = dict
    needs_whole_passes: bool = False

    def published(self, *, is_distilled: bool) -> TeaCachePolynomials | None:
        """Return the published coefficients of this model. One that was distilled to few steps, or by a LoRA, is
        another model than they were measured on."""
        return None if is_distilled else self.teacache

    def values(self, request: GenerationRequest, num_blocks: int | None, *, is_distilled: bool) -> dict[str, Any]:
        """Return `step_cache_values` of a resolved request, with what the coefficients or calibration say. Raises
        RequestError where they do not fit the model, or there are none."""
        cache = step_cache_of(request)
        if cache is None:
            return {}
        if (num_steps := steps_that_run(request)) is not None:
            # First: no file makes up for it.
            cache.check_steps(num_steps)
        if isinstance(cache.options, DBCacheOptions) and num_blocks is not None:
            cache.options.check_blocks(num_blocks)
        if isinstance(cache.options, MagCacheOptions):
            calibration_of(cache.options.file, cache.method, self.identity())
        if isinstance(cache.options, TeaCacheOptions):
            calibration = calibration_of(cache.options.file, cache.method, self.identity())
            polynomial = polynomial_of(cache.options, calibration, self.published(is_distilled=is_distilled))
            threshold = polynomial.threshold if cache.options.threshold is None else cache.options.threshold
            if threshold is None:
                raise RequestError(
                    "step_cache: teacache: no threshold is documented for these coefficients; expected one, such as "
                    "teacache:threshold=0.1"
                )
            cache = dataclasses.replace(cache, options=dataclasses.replace(cache.options, threshold=threshold))
        return step_cache_values(request, cache)

    def remarks(self, settings: BatchSettings, *, has_loras: bool) -> list[str]:
        """Return what the step cache of a resolved request was not measured for, as sentences."""
        cache = step_cache_of(settings.shared)
        if cache is None or not isinstance(cache.options, MagCacheOptions | TeaCacheOptions):
            return []
        calibration = calibration_of(cache.options.file, cache.method, self.identity())
        if calibration is not None:
            branches = ("cond", "uncond") if settings.guidance.is_guided else ("cond",)
            return calibration.remarks(settings.shared.to_dict(), branches, cache.method, self.identity())
        if has_loras and self.teacache is not None:
            return [
                f"step_cache: teacache: the coefficients were measured on {self.teacache.models} without LoRA files"
            ]
        return []
