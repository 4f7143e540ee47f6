"""Calibration of MagCache and TeaCache: how a model changes from step to step, in a file that records its origin."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from diffusion_runtime.config import LoraConfig
from diffusion_runtime.errors import RequestError, shown
from diffusion_runtime.request.step_cache_options import (
    CALIBRATED_THRESHOLD,
    NUM_COEFFICIENTS,
    TeaCachePolynomial,
    TeaCachePolynomials,
)
from diffusion_runtime.untrusted.json_text import read_json_file

SCHEMA = "diffusion_runtime.step_cache_calibration/1"
_AGAIN = "measure this one: diffusion-runtime calibrate PROMPT ... --model-path MODEL -o FILE"
# Request values that move a model's steps nearer to each other or further apart.
_COMPARED = ("sampler", "flow_shift", "guidance_scale", "height", "width", "num_frames", "sigmas")
# Of the model's identity: it rounds what the model computes, and does not make another model of it.
_QUANTIZATION = "quantization"


@dataclass(frozen=True)
class Calibration:
    """ratios, of MagCache: by guidance branch, for every step mean(|r_t| / |r_t-1|) over tokens, samples and prompts,
    with r the residual of all blocks; 1 for the first step. coefficients, of TeaCache: of the polynomial, the highest
    power first, `plain` and, of models that have it, `of_ret_steps`; empty where there were too few steps to fit one.
    model: of `model_identity`. prompts, request: what was generated; versions: of the packages that computed. spectrum:
    A and beta of the clean latents' LatentSpectrum, for progressive resolution; None if the latents are too small to
    fit one."""

    model: Mapping[str, str]
    num_steps: int
    ratios: Mapping[str, tuple[float, ...]]
    prompts: tuple[str, ...]
    request: Mapping[str, Any]
    versions: Mapping[str, str]
    coefficients: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    spectrum: Mapping[str, float] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as they stand in the file."""
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def read(cls, path: str | Path, method: str) -> Self:
        """method: the step cache that names the file, for messages. Raises RequestError for a file that is missing or
        is no calibration."""
        where = f"step_cache: {method}.file"
        values = read_json_file(path, where, error=RequestError)
        where = f"{where}: {path}"
        if not isinstance(values, dict) or values.get("schema") != SCHEMA:
            raise RequestError(f"{where}: expected a file that `diffusion-runtime calibrate` wrote")
        model, num_steps, ratios = (values.get(key) for key in ("model", "num_steps", "ratios"))
        if not isinstance(model, dict) or not isinstance(num_steps, int) or not isinstance(ratios, dict) or not ratios:
            raise RequestError(f"{where}: its model, num_steps or ratios are missing; {_AGAIN}")
        if isinstance(num_steps, bool) or num_steps < 1:
            raise RequestError(f"{where}: key 'num_steps': expected 1 or more, got {shown(num_steps)}; {_AGAIN}")
        coefficients = values.get("coefficients", {})
        if not isinstance(coefficients, dict):
            raise RequestError(f"{where}: key 'coefficients': expected a mapping, got {shown(coefficients)}; {_AGAIN}")
        prompts = values.get("prompts")
        return cls(
            model={key: str(value) for key, value in model.items()},
            num_steps=num_steps,
            ratios=_lists(ratios, num_steps, f"{where}: key 'ratios", "numbers above 0", lambda number: number > 0),
            prompts=tuple(map(str, prompts)) if isinstance(prompts, list) else (),
            request=request if isinstance(request := values.get("request"), dict) else {},
            versions=versions if isinstance(versions := values.get("versions"), dict) else {},
            coefficients=_lists(coefficients, NUM_COEFFICIENTS, f"{where}: key 'coefficients", "numbers"),
            spectrum=_spectrum(values.get("spectrum"), where),
        )

    def check_model(self, model: Mapping[str, str], method: str) -> None:
        """model: of `model_identity`. Raises RequestError for another one than was measured; another quantization is
        one of the `remarks`."""
        for key in model:
            if key != _QUANTIZATION and model[key] != self.model.get(key):
                raise RequestError(
                    f"step_cache: {method}: this calibration is for another model: {key}: expected "
                    f"{shown(model[key])}, got {shown(self.model.get(key))}; {_AGAIN}"
                )

    def ratios_for(self, num_steps: int) -> dict[str, tuple[float, ...]]:
        """`ratios` of so many steps: for each the nearest that was measured, as MagCache's authors do."""
        factor = (self.num_steps - 1) / max(1, num_steps - 1)
        nearest = [round(index * factor) for index in range(num_steps)]
        return {branch: tuple(ratios[index] for index in nearest) for branch, ratios in self.ratios.items()}

    @property
    def polynomials(self) -> TeaCachePolynomials | None:
        """For TeaCache; None of a file that has none."""
        if "plain" not in self.coefficients:
            return None
        found = {name: TeaCachePolynomial(each, CALIBRATED_THRESHOLD) for name, each in self.coefficients.items()}
        return TeaCachePolynomials("this calibration", "calibrate", found["plain"], found.get("of_ret_steps"))

    def remarks(
        self, request: Mapping[str, Any], branches: Iterable[str], method: str, model: Mapping[str, str]
    ) -> list[str]:
        """Return how a resolved request and its model differ from what was measured, as sentences. branches: those that
        run. model: of `model_identity`."""
        where, remarks = f"step_cache: {method}", []
        # Files of versions without quantization name none.
        measured, runs = self.model.get(_QUANTIZATION, "none"), model.get(_QUANTIZATION, "none")
        if measured != runs:
            remarks.append(
                f"{where}: calibrated with quantization {shown(measured)}, run with {shown(runs)}: the changes from "
                "step to step may differ"
            )
        num_steps = request.get("num_inference_steps")
        if num_steps != self.num_steps:
            remarks.append(
                f"{where}: calibrated with {self.num_steps} steps, run with {num_steps}: each step takes what the "
                "nearest one measured"
                if method == "magcache"
                else f"{where}: calibrated with {self.num_steps} steps, run with {num_steps}: the changes from step to "
                "step may be outside of what was measured"
            )
        others = [
            f"{key} {shown(self.request[key])} (here {shown(request.get(key))})"
            for key in _COMPARED
            if key in self.request and not _is_same(self.request[key], request.get(key))
        ]
        if others:
            remarks.append(f"{where}: calibrated with {', '.join(others)}")
        missing = [branch for branch in branches if branch not in self.ratios]
        if missing and method == "magcache":
            remarks.append(
                f"{where}: the calibration has no steps of {', '.join(missing)}, which are all computed; calibrate "
                "with guidance"
            )
        return remarks


def model_identity(
    family: str,
    config_sha256: str,
    loras: Iterable[LoraConfig],
    quantization: str = "none",
    ignored_layers: Iterable[str] = (),
    transformer_paths: Iterable[str] = (),
) -> dict[str, str]:
    """Return the values that identify a model: the family, the hash of its folder's configs with the names of replaced
    transformer weight files, its LoRA files by name and scale, and its quantization with the layers left unquantised.
    """
    files = "".join(f" with {Path(path).name}" for path in transformer_paths)
    named = [f"{Path(lora.path).name} x {lora.scale:g}" for lora in loras]
    ignored = ", ".join(ignored_layers)
    return {
        "family": family,
        "config_sha256": f"{config_sha256}{files}",
        "lora": ", ".join(named),
        _QUANTIZATION: f"{quantization} without {ignored}" if ignored else quantization,
    }


def _spectrum(values: object, where: str) -> dict[str, float] | None:
    """Raises RequestError."""
    if values is None:
        return None
    spectrum = _floats([values.get("A"), values.get("beta")]) if isinstance(values, dict) else None
    if spectrum is None:
        raise RequestError(f"{where}: key 'spectrum': expected the numbers A and beta, got {shown(values)}; {_AGAIN}")
    return dict(zip(("A", "beta"), spectrum, strict=True))


def _lists(
    lists: Mapping[str, Any],
    count: int,
    where: str,
    expected: str,
    is_valid: Callable[[float], bool] = math.isfinite,
) -> dict[str, tuple[float, ...]]:
    """Lists of `count` numbers each, by name. Raises RequestError."""
    result = {}
    for name, numbers in lists.items():
        values = _floats(numbers)
        if values is None or len(values) != count or not all(map(is_valid, values)):
            raise RequestError(f"{where}.{shown(name[:20])[1:-1]}': expected {count} {expected}; {_AGAIN}")
        result[name] = values
    return result


def _floats(numbers: object) -> tuple[float, ...] | None:
    """Return the list of finite numbers, or None for anything else."""
    if not isinstance(numbers, list) or any(type(number) not in (int, float) for number in numbers):
        return None
    try:
        values = tuple(map(float, numbers))
    except OverflowError:
        return None
    return values if all(map(math.isfinite, values)) else None


def _is_same(measured: object, value: object) -> bool:
    if isinstance(measured, list | tuple) and isinstance(value, list | tuple):
        return list(measured) == list(value)
    return measured == value
