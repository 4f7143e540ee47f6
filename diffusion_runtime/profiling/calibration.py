"""Calibration: what step caches and progressive resolution need to know of a model, measured on whole generations."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from diffusion_runtime.core.progress import OnProgress, Progress
from diffusion_runtime.denoising.progressive_resolution import MIN_FITTED_SIZE, fit_spectrum
from diffusion_runtime.denoising.step_cache.calibration import Calibration
from diffusion_runtime.denoising.step_cache.measurement import StackMeasurement, fit_polynomials, mean_ratios
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.generation.interface import InspectablePipeline
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.rules.batch_settings import BatchSettings


def calibrate(
    pipeline: InspectablePipeline, requests: Sequence[GenerationRequest], *, on_progress: OnProgress | None = None
) -> Calibration:
    """Measure what MagCache, TeaCache and progressive resolution need to know of this model, on these requests.
    on_progress: as of `Pipeline.generate`, each request by itself.

    Raises what `Pipeline.generate` raises, and ConfigError on several processes, which hold a part of the tokens each.
    """
    if pipeline.mesh.size > 1:
        raise ConfigError("calibrate: expected one process; leave out --num-gpus and degrees")
    if pipeline.rules.sampling.is_causal:
        raise ConfigError("calibrate: this model makes a video chunk by chunk, for which there are no step caches")
    if pipeline.parts.upsampler is not None:
        raise ConfigError("calibrate: the two stages of a generation are no one schedule; leave out upsampler_path")
    # Each branch by itself, as the cache runs them.
    own = {"step_cache": None, "cfg_gate": None, "progressive_resolution": None, "guidance_mode": "two_pass"}
    batch = [pipeline.resolve(dataclasses.replace(request, **own)) for request in requests]  # type: ignore[arg-type]
    settings = BatchSettings.of(batch, pipeline.rules.sampling)
    measured: list[StackMeasurement] = []
    clean: list[torch.Tensor] = []
    with pipeline.hooks.holding("on_latents", clean.append):
        for index, request in enumerate(batch):

            def watch(progress: Progress, index: int = index) -> None:
                if on_progress is not None:
                    on_progress(dataclasses.replace(progress, request_index=index))

            measured.append(StackMeasurement())
            with pipeline.hooks.holding("block_runner", measured[-1]):
                pipeline(request, on_progress=watch)
    latents = pipeline.rules.sampling.geometry.parts(torch.cat(clean), settings.size).video
    spectrum = None if min(latents.shape[-2:]) < MIN_FITTED_SIZE else fit_spectrum(latents)
    of_each = ("prompt", "negative_prompt", "seed")
    return Calibration(
        model=pipeline.rules.step_caches.identity(),
        num_steps=settings.num_inference_steps,
        ratios=mean_ratios(measured, settings.num_inference_steps),
        prompts=tuple(request.prompt for request in batch),
        request={key: value for key, value in settings.shared.to_dict().items() if key not in of_each},
        versions={"diffusion_runtime": str(pipeline.recipe["version"]), "torch": torch.__version__},
        coefficients=fit_polynomials(measured),
        spectrum=None if spectrum is None else dataclasses.asdict(spectrum),
    )
