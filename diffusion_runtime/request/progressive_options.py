"""Progressive resolution settings: early steps on smaller latents (arXiv:2605.18736), and their text form
`dct:delta=0.05`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import MappingProxyType
from typing import Self

from diffusion_runtime.core.options import MethodSettings

MAX_LEVELS = 3


@dataclass(frozen=True)
class LatentSpectrum:
    """The power of an autoencoder's latents over spatial frequency: P(w) = A * w^-beta, w in periods over the shorter
    side, in units in which white noise of deviation 1 has power 1 (orthonormal DCT)."""

    A: float
    beta: float

    def power(self, frequency: float) -> float:
        """P above. frequency: above 0."""
        return float(self.A * frequency**-self.beta)


@dataclass(frozen=True)
class DctOptions:
    """Upsampling in the basis of the discrete cosine transform (DCT).

    levels: how often height and width are halved for the first steps; 0 turns it off. delta: how much of the power at
    the highest frequency of the smaller latents may be missing where the size grows; more of it runs more steps on the
    smaller latents. A, beta: of the LatentSpectrum, None for the one that is known of the model's autoencoder.
    """

    levels: int = 1
    delta: float = 0.01
    A: float | None = None
    beta: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.levels <= MAX_LEVELS:
            raise ValueError(f"levels: expected a whole number from 0 to {MAX_LEVELS}, got {self.levels}")
        if not 0 < self.delta <= 0.5:
            raise ValueError(f"delta: expected a number above 0 and at most 0.5, got {self.delta:g}")
        if (self.A is None) != (self.beta is None):
            raise ValueError("A, beta: expected both or none; they describe one spectrum")
        for name, value, most in (("A", self.A, "1e6"), ("beta", self.beta, "100")):
            if value is not None and not 0 < value <= float(most):
                raise ValueError(f"{name}: expected a number above 0 and at most {most}, got {value:g}")

    @property
    def spectrum(self) -> LatentSpectrum | None:
        return None if self.A is None or self.beta is None else LatentSpectrum(self.A, self.beta)


@dataclass(frozen=True)
class ProgressiveSettings(MethodSettings):
    """The way in which the size grows, with the method's options."""

    field = "progressive_resolution"
    methods = MappingProxyType({"dct": DctOptions})

    options: DctOptions

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """`dct` or `dct:levels=1,delta=0.05`; None for `none` and for no levels, which run every step at full size.

        Raises RequestError for an unknown method or option, and a value that it cannot have.
        """
        settings = super().parse(text)
        return settings if settings is not None and settings.options.levels else None

    def with_spectrum(self, spectrum: LatentSpectrum) -> Self:
        """The same with the spectrum of an autoencoder in its options."""
        options = dataclasses.replace(self.options, A=spectrum.A, beta=spectrum.beta)
        return dataclasses.replace(self, options=options)
