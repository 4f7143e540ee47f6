"""The step caches that a request asks for, with the counts of computed and reused steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Self

import torch

from diffusion_runtime.core.block_stack import BlockRunner
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.denoising.interface import BranchWrapper, PredictBranches
from diffusion_runtime.denoising.step_cache.calibration import Calibration
from diffusion_runtime.denoising.step_cache.cfg_gate import cfg_gate
from diffusion_runtime.denoising.step_cache.counted_runner import CountedRunner
from diffusion_runtime.denoising.step_cache.dbcache import DBCache
from diffusion_runtime.denoising.step_cache.easycache import easycache
from diffusion_runtime.denoising.step_cache.magcache import MagCache
from diffusion_runtime.denoising.step_cache.teacache import TeaCache, polynomial_of
from diffusion_runtime.parallel.groups import ProcessMesh
from diffusion_runtime.report.attention_report import AttentionRecorder
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.request.step_cache_options import (
    DBCacheOptions,
    EasyCacheOptions,
    MagCacheOptions,
    StepCacheSettings,
    TeaCacheOptions,
    TeaCachePolynomials,
)


def _nothing(_device: torch.device) -> None:
    """Do nothing: every process has counted everything."""


@dataclass(frozen=True)
class StepCache:
    """Step cache of one generation. wrappers: around the velocities of the guidance branches, innermost first; none if
    every step is computed. block_runner: of the transformer. finish: called after the last step with the latents'
    device, on every process; it completes the counts."""

    wrappers: tuple[BranchWrapper, ...] = ()
    block_runner: BlockRunner = field(default_factory=BlockRunner)
    finish: Callable[[torch.device], None] = _nothing

    @classmethod
    def of(
        cls,
        request: GenerationRequest,
        mesh: ProcessMesh,
        recorder: AttentionRecorder,
        model: Mapping[str, str] = MappingProxyType({}),
        published: TeaCachePolynomials | None = None,
    ) -> Self:
        """request: a resolved one. mesh: the processes that run it. recorder: counts the steps of each branch and
        expert. model: of `model_identity`. published: TeaCache's coefficients for it. Raises RequestError for a
        calibration that is another model's."""
        gate = 1.0 if request.cfg_gate is None else request.cfg_gate
        settings = None if request.step_cache is None else StepCacheSettings.parse(request.step_cache)
        options = None if settings is None else settings.options
        wrappers: list[BranchWrapper] = []
        runner: CountedRunner | None = None
        if settings is not None and settings.decides_per_branch:
            recorder.note(
                f"{settings.method} decides for each guidance branch by itself, so they run one after the other "
                "(two_pass)"
            )
        if isinstance(options, DBCacheOptions):
            runner = DBCache(options, mesh.forward, recorder)
        elif isinstance(options, MagCacheOptions):
            calibration = calibration_of(options.file, "magcache", model)
            assert calibration is not None, "MagCacheOptions asks for a file"
            assert request.num_inference_steps is not None, "the request is resolved"
            runner = MagCache(options, calibration, request.num_inference_steps, recorder)
        elif isinstance(options, TeaCacheOptions):
            polynomial = polynomial_of(options, calibration_of(options.file, "teacache", model), published)
            runner = TeaCache(options, polynomial, mesh.forward, recorder)
        elif gate < 1 or options is not None:
            wrappers.append(_counted(recorder))
        if gate < 1 and mesh.branch.size > 1:
            recorder.note("cfg_gate saves no time with --cfg-parallel: the second group of processes waits")
        if gate < 1:
            wrappers.append(cfg_gate(gate, lambda step, branches: recorder.record_reused(step, branches, "cfg_gate")))
        if isinstance(options, EasyCacheOptions):

            def on_reused(step: StepInfo, branches: Sequence[str], error: float) -> None:
                recorder.record_reused(step, branches, "easycache", error)

            wrappers.append(easycache(options, on_reused))
        if runner is None:
            return cls(tuple(wrappers))
        return cls(tuple(wrappers), runner, functools.partial(runner.share_counts, mesh.branch))


def calibration_of(file: str, method: str, model: Mapping[str, str]) -> Calibration | None:
    """Return the calibration that a step cache names, or None where it names none. model: of `model_identity`. Raises
    RequestError for a file that is none, or is another model's."""
    if not file:
        return None
    calibration = Calibration.read(file, method)
    calibration.check_model(model, method)
    return calibration


def _counted(recorder: AttentionRecorder) -> BranchWrapper:
    def wrap(velocities: PredictBranches) -> PredictBranches:
        def counted(latents: torch.Tensor, step: StepInfo, wanted: Sequence[str]) -> dict[str, torch.Tensor]:
            recorder.record_computed(step, wanted)
            return velocities(latents, step, wanted)

        return counted

    return wrap
