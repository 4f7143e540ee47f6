"""Published coefficients of TeaCache, from teacache.yaml, and how the model they are for is recognised."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusion_runtime.core.model_folder import AnyFolder, read_json_in
from diffusion_runtime.request.step_cache_options import TeaCachePolynomial, TeaCachePolynomials
from diffusion_runtime.untrusted.yaml_text import read_packaged_yaml

TEACACHE_FILE = Path(__file__).with_name("teacache.yaml")


@dataclass(frozen=True)
class PublishedPolynomials:
    """Coefficients of one model. recognised_by: json file -> key -> value; None for a key that is null or absent."""

    polynomials: TeaCachePolynomials
    recognised_by: Mapping[str, Mapping[str, Any]]

    def describe(self, folder: AnyFolder) -> bool:
        """Return whether the folder holds the model that they were measured on. Raises ModelLoadError for json that
        cannot be read."""
        for file, settings in self.recognised_by.items():
            if not (folder / file).exists():
                return False
            values = read_json_in(folder, *file.split("/"))
            # diffusers writes a component that a pipeline leaves out as a pair of nulls.
            found = {key: None if values.get(key) == [None, None] else values.get(key) for key in settings}
            if found != settings:
                return False
        return True


@functools.cache
def published_polynomials() -> tuple[PublishedPolynomials, ...]:
    """Return all of them, as teacache.yaml has them."""
    return tuple(
        PublishedPolynomials(
            TeaCachePolynomials(
                models=name,
                source=entry["source"],
                plain=_polynomial(entry),
                of_ret_steps=_polynomial(entry["use_ret_steps"]) if "use_ret_steps" in entry else None,
            ),
            entry["recognised_by"],
        )
        for name, entry in read_packaged_yaml(TEACACHE_FILE).items()
    )


def read_polynomials(folder: AnyFolder) -> TeaCachePolynomials | None:
    """Return the coefficients published for a folder's model; None for other models. Raises ModelLoadError."""
    return next((each.polynomials for each in published_polynomials() if each.describe(folder)), None)


def _polynomial(entry: Mapping[str, Any]) -> TeaCachePolynomial:
    return TeaCachePolynomial(tuple(map(float, entry["coefficients"])), next(iter(entry["thresholds"]), None))
