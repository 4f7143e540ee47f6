"""Progressive resolution settings: early steps on smaller latents (arXiv:2605.18736), and their text form
`dct:delta=0.05`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Self

from diffusion_runtime.errors import ConfigError, RequestError, nearest, shown
from diffusion_runtime.options import build_options, parse_pairs

NONE = "none"
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
        for name, value in (("A", self.A), ("beta", self.beta)):
            if value is not None and not 0 < value <= 1e6:
                raise ValueError(f"{name}: expected a number above 0 and at most 1e6, got {value:g}")

    @property
    def spectrum(self) -> LatentSpectrum | None:
        return None if self.A is None or self.beta is None else LatentSpectrum(self.A, self.beta)


METHODS: Mapping[str, type] = MappingProxyType({"dct": DctOptions})


@dataclass(frozen=True)
class ProgressiveSettings:
    """A method with its options, an instance of METHODS[method]."""

    method: str
    options: DctOptions

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """`dct` or `dct:levels=1,delta=0.05`; None for `none` and for no levels, which run every step at full size.

        Raises RequestError for an unknown method or option, and a value that it cannot have.
        """
        method, _, rest = text.partition(":")
        method = method.strip()
        if method == NONE and not rest:
            return None
        if method not in METHODS:
            raise RequestError(
                f"progressive_resolution: unknown value {shown(method)}.{nearest(method, (*METHODS, NONE))}"
            )
        where = f"progressive_resolution: {method}"
        try:
            options: Any = build_options(METHODS[method], parse_pairs(rest), where)
        except ConfigError as error:
            message = str(error)
            raise RequestError(message if message.startswith(where) else f"{where}: {message}") from error
        return cls(method, options) if options.levels else None

    def with_spectrum(self, spectrum: LatentSpectrum) -> Self:
        """The same with the spectrum of an autoencoder in its options."""
        options = dataclasses.replace(self.options, A=spectrum.A, beta=spectrum.beta)
        return dataclasses.replace(self, options=options)

    @property
    def text(self) -> str:
        """Every option spelled out, as it stands in a recipe; `parse` reads it."""
        pairs = [
            f"{item.name}={json.dumps(getattr(self.options, item.name))}" for item in dataclasses.fields(self.options)
        ]
        return f"{self.method}:{','.join(pairs)}"


@dataclass(frozen=True)
class ProgressiveText:
    """The check of a request's progressive_resolution."""

    metavar: ClassVar[str] = "METHOD"
    kind: ClassVar[type] = str

    def __call__(self, name: str, value: object) -> None:
        if not isinstance(value, str):
            raise RequestError(f"{name}: expected one of {', '.join((*METHODS, NONE))}, got {shown(value)}")
        ProgressiveSettings.parse(value)
