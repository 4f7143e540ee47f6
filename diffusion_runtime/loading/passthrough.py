"""Passthrough loading: a pipeline of diffusers' own, prepared from json alone and then loaded."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from diffusion_runtime.attention.layers import AttentionLayer
from diffusion_runtime.attention.self_check import SelfChecker
from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.core.hardware import resolve_device, resolve_dtype
from diffusion_runtime.core.model_folder import ModelFolder
from diffusion_runtime.diffusers_bridge.compilation import check_compilation, keep_artefacts
from diffusion_runtime.diffusers_bridge.compiled_blocks import CompiledBlocks
from diffusion_runtime.diffusers_bridge.passthrough import DiffusersPipeline, load_passthrough
from diffusion_runtime.diffusers_bridge.passthrough_folder import PassthroughPlan, plan_passthrough
from diffusion_runtime.diffusers_bridge.request_rules import PassthroughRules
from diffusion_runtime.loading.description import PipelineDescription, planned_attention
from diffusion_runtime.loading.interface import OnStage
from diffusion_runtime.memory.cpu_memory import bound_primitive_cache
from diffusion_runtime.models.model_sources import check_weights_are_there, fetch_weights
from diffusion_runtime.models.part_files import with_parts
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.rules.combinations import check_pipeline_options
from diffusion_runtime.weights.weight_files import check_components


@dataclass(frozen=True)
class PreparedPassthrough:
    """A pipeline of diffusers' own, still on disk."""

    description: PipelineDescription
    plan: PassthroughPlan
    device: torch.device
    dtype: torch.dtype

    @property
    def rules(self) -> PassthroughRules:
        return self.plan.rules

    @property
    def inspectable(self) -> None:
        return None

    @property
    def layers(self) -> tuple[AttentionLayer, ...]:
        return self.plan.layers

    def planned_for(self, requests: Sequence[GenerationRequest]) -> PreparedPassthrough:
        """Return itself: what diffusers' pipeline takes is not known here, and there is no plan."""
        del requests
        return self

    planned_to_load = planned_for

    def for_these_alone(self, requests: Sequence[GenerationRequest]) -> PreparedPassthrough:
        """Return itself: diffusers' own pipeline reads its whole folder."""
        del requests
        return self

    def check_files(self) -> None:
        """Check that the weight files are there, as Prepared.check_files says."""
        config = self.description.config
        check_weights_are_there(config.model_path, self.description.model_folder, offline=config.offline)

    def load(self, on_stage: OnStage | None = None, requests: Sequence[GenerationRequest] = ()) -> DiffusersPipeline:
        """Read the weights, as Prepared.load says. requests: not read, as nothing is planned."""
        del requests
        began = time.perf_counter()
        say: OnStage = on_stage if on_stage is not None else lambda _: None
        config = self.description.config
        bound_primitive_cache()
        say("choosing attention")
        plan, self_checks = SelfChecker(enabled=config.self_check).build_checked(
            lambda: _plan_passthrough(config, self.description.model_folder, self.device, self.dtype),
            lambda built: built.layers,
            self.plan,
        )
        plan = dataclasses.replace(plan, self_checks=self_checks)
        say("loading diffusers' pipeline")
        recipe = _describe_passthrough(config, self.description.model_folder, plan, self.device, self.dtype).to_dict()
        read_began = time.perf_counter()
        fetch_weights(config.model_path, self.description.model_folder, offline=config.offline, variant=config.variant)
        compiled = None
        if config.compile == "regional":
            keep_artefacts(self.device, self.description.model_folder.digest)
            compiled = CompiledBlocks()
        folder = with_parts(self.description.model_folder, (), config.variant, ())
        pipeline = load_passthrough(folder, plan, self.device, self.dtype, recipe, compiled)
        pipeline.note_load({"prepare": read_began - began, "read": time.perf_counter() - read_began})
        return pipeline


def prepare_passthrough(config: RuntimeConfig, folder: ModelFolder) -> PreparedPassthrough:
    """`prepare` for a folder that diffusers' own pipeline runs."""
    check_pipeline_options(config)
    check_components(folder)
    if folder.download_gb is None:
        with_parts(folder, (), config.variant, ())
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    check_compilation(config, device)
    plan = _plan_passthrough(config, folder, device, dtype)
    return PreparedPassthrough(_describe_passthrough(config, folder, plan, device, dtype), plan, device, dtype)


def _plan_passthrough(
    config: RuntimeConfig, folder: ModelFolder, device: torch.device, dtype: torch.dtype
) -> PassthroughPlan:
    checker = SelfChecker(enabled=config.self_check, may_run=False)
    return plan_passthrough(config, folder, device, dtype, os.environ, checker)


def _describe_passthrough(
    config: RuntimeConfig, folder: ModelFolder, plan: PassthroughPlan, device: torch.device, dtype: torch.dtype
) -> PipelineDescription:
    return PipelineDescription(
        config=config,
        model_folder=folder,
        family=plan.rules.pipeline_class,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        rules=plan.rules,
        attention=planned_attention(plan.layers),
        libraries=plan.libraries,
        self_checks=plan.self_checks,
        quantization="; ".join(plan.remarks_on_weights(dtype)) or None,
    )
