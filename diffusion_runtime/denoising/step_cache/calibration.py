"""Calibration of MagCache: how a model's residuals change from step to step, in a file that says where it is from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch

from diffusion_runtime.block_stack import BlockRunner, RunBlock, Streams
from diffusion_runtime.denoising.step_cache.stack_residual import entered, minus
from diffusion_runtime.errors import RequestError, shown
from diffusion_runtime.progressive_resolution import LatentSpectrum
from diffusion_runtime.step_info import StepInfo
from diffusion_runtime.untrusted.json_text import read_json_file

SCHEMA = "diffusion_runtime.step_cache_calibration/1"
_AGAIN = "measure this one: diffusion-runtime calibrate"


@dataclass(frozen=True)
class Calibration:
    """ratios: by guidance branch, for every step mean(|r_t| / |r_t-1|) over tokens, samples and prompts, with r the
    residual of all blocks; 1 for the first step. model: of `model_identity`. request: the values that were used;
    versions: of the packages that computed. spectrum: A and beta of the clean latents' LatentSpectrum, for progressive
    resolution; None of latents that are too small to say."""

    model: Mapping[str, str]
    num_steps: int
    ratios: Mapping[str, tuple[float, ...]]
    num_prompts: int
    request: Mapping[str, Any]
    versions: Mapping[str, str]
    spectrum: Mapping[str, float] | None = None

    @classmethod
    def of(
        cls,
        recipe: Mapping[str, Any],
        request: Mapping[str, Any],
        num_steps: int,
        measured: Sequence[ResidualRatios],
        spectrum: LatentSpectrum | None = None,
    ) -> Self:
        """recipe: of the pipeline. request: the values that all requests shared. measured: one per request."""
        shared = {key: value for key, value in request.items() if key not in ("prompt", "negative_prompt", "seed")}
        return cls(
            model=model_identity(recipe),
            num_steps=num_steps,
            ratios=_mean_ratios(measured, num_steps),
            num_prompts=len(measured),
            request=shared,
            versions={"diffusion_runtime": str(recipe["version"]), "torch": torch.__version__},
            spectrum=None if spectrum is None else asdict(spectrum),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as they stand in the file."""
        return {"schema": SCHEMA, "method": "magcache", **asdict(self)}

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Raises RequestError for a file that is missing or is no calibration."""
        values = read_json_file(path, "step_cache: magcache.file", error=RequestError)
        where = f"step_cache: magcache.file: {path}"
        if not isinstance(values, dict) or values.get("schema") != SCHEMA:
            raise RequestError(f"{where}: expected a file that `diffusion-runtime calibrate` wrote")
        model, num_steps, ratios = (values.get(key) for key in ("model", "num_steps", "ratios"))
        if not isinstance(model, dict) or type(num_steps) is not int or not isinstance(ratios, dict) or not ratios:
            raise RequestError(f"{where}: its model, num_steps or ratios are missing; {_AGAIN}")
        for branch, numbers in ratios.items():
            if not isinstance(numbers, list) or len(numbers) != num_steps or not all(map(_is_ratio, numbers)):
                raise RequestError(
                    f"{where}: key 'ratios.{str(branch)[:20]}': expected {num_steps} numbers above 0; {_AGAIN}"
                )
        return cls(
            model={key: str(value) for key, value in model.items()},
            num_steps=num_steps,
            ratios={str(branch): tuple(map(float, numbers)) for branch, numbers in ratios.items()},
            num_prompts=count if isinstance(count := values.get("num_prompts"), int) else 0,
            request=request if isinstance(request := values.get("request"), dict) else {},
            versions=versions if isinstance(versions := values.get("versions"), dict) else {},
        )

    def check_steps(self, num_steps: int) -> None:
        """Raises RequestError for another number of steps than was measured."""
        if num_steps != self.num_steps:
            raise RequestError(
                f"step_cache: magcache: this calibration is for {self.num_steps} steps, got {num_steps}; use "
                f"{self.num_steps}, or {_AGAIN}"
            )

    def check_model(self, model: Mapping[str, str]) -> None:
        """model: of `model_identity`. Raises RequestError for another one than was measured."""
        for key in model:
            if model[key] != self.model.get(key):
                raise RequestError(
                    f"step_cache: magcache: this calibration is for another model: {key}: expected "
                    f"{shown(model[key])}, got {shown(self.model.get(key))}; {_AGAIN}"
                )


def model_identity(recipe: Mapping[str, Any]) -> dict[str, str]:
    """What of a pipeline's recipe says which model it is: the family, the hash of its configs, its LoRA files by name
    and scale."""
    loras = [f"{Path(lora['path']).name} x {lora['scale']:g}" for lora in recipe["runtime"]["lora"]]
    model = recipe["model"]
    return {"family": model["family"], "config_sha256": model["config_sha256"], "lora": ", ".join(loras)}


class ResidualRatios(BlockRunner):
    """Runs every block, and measures the ratios of the residuals' sizes, for one request of one process."""

    def __init__(self) -> None:
        # By branch and step.
        self.ratios: dict[str, dict[int, float]] = {}
        self._before: dict[str, torch.Tensor] = {}
        self._expert: int | None = None

    def run(self, blocks: Sequence[RunBlock], streams: Streams, step: StepInfo, num_grid_tokens: int) -> Streams:
        """See BlockRunner.run."""
        if step.expert != self._expert:
            self._expert = step.expert
            self._before.clear()
        entering = entered(streams)
        streams = super().run(blocks, streams, step, num_grid_tokens)
        sizes = minus(streams, entering)[0][:, :num_grid_tokens].float().norm(dim=-1)
        before = self._before.get(step.branch)
        ratio = 1.0 if before is None else float((sizes / before.clamp(min=1e-12)).mean())
        self.ratios.setdefault(step.branch, {})[step.index] = ratio
        self._before[step.branch] = sizes
        return streams


def _mean_ratios(measured: Sequence[ResidualRatios], num_steps: int) -> dict[str, tuple[float, ...]]:
    """By branch, over several requests; 1 for a step that a branch did not run."""
    branches = dict.fromkeys(branch for each in measured for branch in each.ratios)
    return {
        branch: tuple(
            sum(each.ratios.get(branch, {}).get(index, 1.0) for each in measured) / len(measured)
            for index in range(num_steps)
        )
        for branch in branches
    }


def _is_ratio(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
