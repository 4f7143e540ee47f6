"""Latent spectra of published autoencoders, for progressive resolution, and how a model folder's is recognised."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diffusion_runtime.core.model_folder import AnyFolder, read_config
from diffusion_runtime.decoders.autoencoder import COMPONENT
from diffusion_runtime.request.progressive_options import LatentSpectrum


@dataclass(frozen=True)
class KnownSpectrum:
    """A measured spectrum of one autoencoder. settings: of vae/config.json, which recognise the autoencoder: numbers
    that depend on its weights among them. source: who measured the spectrum."""

    settings: Mapping[str, Any]
    spectrum: LatentSpectrum
    source: str

    def describes(self, config: Mapping[str, Any]) -> bool:
        return all(_is_same(config.get(key), value) for key, value in self.settings.items())


KNOWN_SPECTRA = (
    # FLUX.1's, which Z-Image's folders hold as well.
    KnownSpectrum(
        {"_class_name": "AutoencoderKL", "latent_channels": 16, "scaling_factor": 0.3611, "shift_factor": 0.1159},
        LatentSpectrum(203.615097, 1.915461),
        "arXiv:2605.18736",
    ),
    # Wan 2.1's, which Wan 2.2 A14B uses.
    KnownSpectrum(
        {
            "_class_name": "AutoencoderKLWan",
            "latents_std": (
                2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
                3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160,
            ),
        },
        LatentSpectrum(219.484718, 2.422687),
        "arXiv:2605.18736",
    ),
    # The embedded model's.
    KnownSpectrum(
        {
            "_class_name": "AutoencoderKLWan",
            "latents_std": (
                1.2369, 1.511, 2.1219, 0.31771, 1.3446, 0.52313, 0.58662, 0.47272,
                0.43055, 0.53929, 1.0294, 0.4975, 1.2153, 1.3221, 0.59682, 0.5254,
            ),
        },
        LatentSpectrum(15.96, 2.022),
        "`diffusion-runtime calibrate` with 16 prompts, 5 frames of 256 x 256",
    ),
)  # fmt: skip


def read_spectrum(folder: AnyFolder) -> LatentSpectrum | None:
    """Return the measured spectrum of a folder's autoencoder; None for one without. Raises ModelLoadError."""
    config = read_config(folder, COMPONENT).values
    return next((known.spectrum for known in KNOWN_SPECTRA if known.describes(config)), None)


def _is_same(value: object, expected: object) -> bool:
    if isinstance(expected, tuple):
        return (
            isinstance(value, list)
            and len(value) == len(expected)
            and all(_is_same(*pair) for pair in zip(value, expected, strict=True))
        )
    if isinstance(expected, float):
        return isinstance(value, int | float) and math.isclose(value, expected, rel_tol=1e-4)
    return value == expected
