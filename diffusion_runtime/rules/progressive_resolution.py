"""Rules for early steps on smaller latents: the request as a recipe has it."""

from __future__ import annotations

from typing import Any

from diffusion_runtime.denoising.interface import Sampler
from diffusion_runtime.errors import RequestError
from diffusion_runtime.request.progressive_options import LatentSpectrum, ProgressiveSettings
from diffusion_runtime.rules.batch_settings import BatchSettings


def progressive_values(settings: BatchSettings, sampler: Sampler, spectrum: LatentSpectrum | None) -> dict[str, Any]:
    """Return the request values with every option of progressive resolution spelled out. sampler: of the settings.
    spectrum: of the autoencoder's latents, None where nobody measured it.

    Raises RequestError where it cannot be run.
    """
    text = settings.shared.progressive_resolution
    progressive = None if text is None else ProgressiveSettings.parse(text)
    if progressive is None:
        return {}
    if progressive.options.spectrum is None:
        if spectrum is None:
            raise RequestError(
                "progressive_resolution: the spectrum of this model's latents is not known; say it, "
                f"{progressive.method}:A=...,beta=...; `diffusion-runtime calibrate` measures it"
            )
        progressive = progressive.with_spectrum(spectrum)
    size, geometry = settings.size, settings.sampling.geometry
    geometry.check_halving(size.height, size.width, progressive.options.levels)
    settings.sizes.stages_of(progressive, sampler)
    return {"progressive_resolution": progressive.text}
