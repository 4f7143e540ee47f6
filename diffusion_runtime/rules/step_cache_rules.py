"""Rules for requests with a step cache: what fits the model, and the request as a recipe has it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

from diffusion_runtime.denoising.step_cache.requested import calibration_of
from diffusion_runtime.denoising.step_cache.teacache import polynomial_of
from diffusion_runtime.errors import RequestError
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.request.samplers import SAMPLERS
from diffusion_runtime.request.step_cache_options import (
    DBCacheOptions,
    MagCacheOptions,
    StepCacheSettings,
    TeaCacheOptions,
    TeaCachePolynomials,
)


class CachedModel(Protocol):
    """What RequestRules know of the model that a step cache is for; see there."""

    @property
    def teacache(self) -> TeaCachePolynomials | None: ...

    @property
    def few_steps(self) -> object | None: ...

    @property
    def loras(self) -> Sequence[Any]: ...

    @property
    def num_blocks(self) -> int | None: ...

    @property
    def needs_whole_passes(self) -> bool: ...

    @property
    def identity(self) -> Any: ...

    def is_guided(self, request: GenerationRequest) -> bool: ...


def with_step_cache(request: GenerationRequest) -> GenerationRequest:
    """A resolved request with every option of its step cache spelled out, as a recipe has it, and the guidance mode
    that the cache needs; `none` stays.

    Raises RequestError for a cache that is not made for so few steps.
    """
    cache = None if request.step_cache is None else StepCacheSettings.parse(request.step_cache)
    if cache is None:
        return request
    _check_one_prediction(request, cache.method)
    if request.num_inference_steps is not None:
        cache.check_steps(request.num_inference_steps)
    if cache.decides_per_branch:
        request = dataclasses.replace(request, guidance_mode="two_pass")
    return dataclasses.replace(request, step_cache=cache.text)


def _check_one_prediction(request: GenerationRequest, method: str) -> None:
    """Raises RequestError for a sampler that calls the model several times per step."""
    sampler = None if request.sampler is None else SAMPLERS.get(request.sampler)
    if sampler is not None and sampler.num_predictions_per_step > 1:
        others = ", ".join(name for name, each in SAMPLERS.items() if each.num_predictions_per_step == 1)
        raise RequestError(
            f"step_cache: {method} reuses what the step before computed, and sampler {request.sampler} calls the model "
            f"{sampler.num_predictions_per_step} times per step; leave the cache out, or use {others}"
        )


def with_fitting_step_cache(request: GenerationRequest, model: CachedModel) -> GenerationRequest:
    """`with_step_cache`, after its coefficients or calibration were seen to fit the model. Raises RequestError where
    they do not, or there are none."""
    cache = None if request.step_cache is None else StepCacheSettings.parse(request.step_cache)
    if cache is not None:
        _check_one_prediction(request, cache.method)
    if cache is not None and request.num_inference_steps is not None:
        # First: no file makes up for it.
        cache.check_steps(request.num_inference_steps)
    if (
        cache is not None
        and model.needs_whole_passes
        and isinstance(cache.options, DBCacheOptions | MagCacheOptions | TeaCacheOptions)
    ):
        raise RequestError(
            f"step_cache: {cache.method} leaves out blocks, which a CUDA graph cannot; leave out --cuda-graphs on, "
            "or use easycache"
        )
    if cache is not None and isinstance(cache.options, DBCacheOptions) and model.num_blocks is not None:
        cache.options.check_blocks(model.num_blocks)
    if cache is not None and isinstance(cache.options, MagCacheOptions):
        calibration_of(cache.options.file, cache.method, model.identity())
    if cache is not None and isinstance(cache.options, TeaCacheOptions):
        calibration = calibration_of(cache.options.file, cache.method, model.identity())
        polynomial = polynomial_of(cache.options, calibration, published_teacache(model))
        threshold = polynomial.threshold if cache.options.threshold is None else cache.options.threshold
        if threshold is None:
            raise RequestError(
                "step_cache: teacache: no threshold is documented for these coefficients; expected one, such as "
                "teacache:threshold=0.1"
            )
        options = dataclasses.replace(cache.options, threshold=threshold)
        cache = dataclasses.replace(cache, options=options)
        request = dataclasses.replace(request, step_cache=cache.text)
    return with_step_cache(request)


def published_teacache(model: CachedModel) -> TeaCachePolynomials | None:
    """A model or LoRA that was distilled to few steps is another model than the coefficients were measured on."""
    return model.teacache if model.few_steps is None else None


def step_cache_remarks(request: GenerationRequest, model: CachedModel) -> list[str]:
    """What a resolved request's step cache was not measured for."""
    cache = None if request.step_cache is None else StepCacheSettings.parse(request.step_cache)
    if cache is None or not isinstance(cache.options, MagCacheOptions | TeaCacheOptions):
        return []
    calibration = calibration_of(cache.options.file, cache.method, model.identity())
    if calibration is not None:
        branches = ("cond", "uncond") if model.is_guided(request) else ("cond",)
        return calibration.remarks(request.to_dict(), branches, cache.method, model.identity())
    if model.loras and model.teacache is not None:
        return [f"step_cache: teacache: the coefficients were measured on {model.teacache.models} without LoRA files"]
    return []
