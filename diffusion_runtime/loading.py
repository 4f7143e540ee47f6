"""load_pipeline and inspect_pipeline: the only place where parts are chosen and put together."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from diffusion_runtime.attention.config import AttentionConfig
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.attention.self_check import SelfChecker, remarks_on
from diffusion_runtime.attention_report import LibraryAttention
from diffusion_runtime.config import Degrees, RuntimeConfig
from diffusion_runtime.denoising.scheduler_config import SchedulerConfig, read_scheduler_config
from diffusion_runtime.description import PipelineDescription, planned_attention
from diffusion_runtime.device_guard import device_guard
from diffusion_runtime.diffusers_bridge.choice import is_passthrough
from diffusion_runtime.diffusers_bridge.passthrough import DiffusersPipeline, load_passthrough
from diffusion_runtime.diffusers_bridge.passthrough_folder import PassthroughPlan, plan_passthrough
from diffusion_runtime.errors import ConfigError, ModelLoadError, first_line
from diffusion_runtime.hardware import device_of_process, resolve_device, resolve_dtype
from diffusion_runtime.memory.primitive_cache import bound_primitive_cache
from diffusion_runtime.memory.shortage import explain_memory_shortage
from diffusion_runtime.models.checkpoint import resolve_model_folder
from diffusion_runtime.models.component_files import (
    check_component_files,
    check_components,
    refuse_quantised_components,
)
from diffusion_runtime.models.diffusers_import import check_diffusers_import
from diffusion_runtime.models.generation import generation_settings
from diffusion_runtime.models.interface import DiffusionTransformer, LatentDecoder, ModelFamily
from diffusion_runtime.models.lora import Lora, read_lora
from diffusion_runtime.models.registry import family_for_folder
from diffusion_runtime.models.shared_decoder import SharedDecoder
from diffusion_runtime.parallel.dry_run_mesh import planned_mesh
from diffusion_runtime.parallel.groups import ProcessMesh
from diffusion_runtime.parallel.world import World
from diffusion_runtime.pipeline import Pipeline
from diffusion_runtime.request import layered
from diffusion_runtime.request_rules import RequestRules
from diffusion_runtime.text_encoders.interface import TextEncoder
from diffusion_runtime.text_encoders.shared import SharedTextEncoder

# Ulysses sends one group of heads while it computes another. On two H200s that hides 15 of 17.5 ms of a forward pass
# (benchmarks/results/parallel_gpu.json); over gloo, on CPUs, it costs more than it hides.
_HEAD_GROUPS = 2

OnStage = Callable[[str], None]


@dataclass(frozen=True)
class _Prepared:
    """A model whose attention is settled and whose weights are still on disk. transformer: on the meta device. loras:
    read, and not yet merged."""

    description: PipelineDescription
    family: ModelFamily
    transformer: DiffusionTransformer
    device: torch.device
    dtype: torch.dtype
    loras: tuple[Lora, ...]
    mesh: ProcessMesh


@dataclass(frozen=True)
class _PreparedPassthrough:
    """A pipeline of diffusers' own, still on disk."""

    description: PipelineDescription
    plan: PassthroughPlan
    device: torch.device
    dtype: torch.dtype


def load_pipeline(
    model: str | RuntimeConfig = "shapes",
    *,
    attention: Any = None,
    attention_override: Any = None,
    device: str = "auto",
    dtype: str = "auto",
    backend: str = "auto",
    lora: Sequence[Any] = (),
    self_check: bool = True,
    on_stage: OnStage | None = None,
    world: World | None = None,
) -> Pipeline | DiffusersPipeline:
    """Load a model: `shapes` (embedded), a diffusers folder or a hub id; or all that a RuntimeConfig says.

    backend: `native` is our own transformer, `diffusers` diffusers' own pipeline behind the same call; `auto` takes the
    native one where there is one.

    attention: what the config level says, in any form AttentionConfig.parse takes; attention_override: the same one
    level higher, as the command line does. lora: files to merge into the transformer, as paths or (path, scale) pairs.
    self_check: whether third-party attention kernels are compared with the definition on this machine's accelerator
    before the weights are read, once for each version. on_stage: called with a phrase before each part is loaded.
    world: the processes that run the model together, each of which must load it alike.

    Raises, before any weight is read, BackendUnavailableError for an attention choice that cannot run here and
    ConfigError for a value that is wrong; InstallationError where an installed package keeps diffusers from being
    imported; then ModelLoadError for a folder that cannot be used and DeviceMemoryError
    when it does not fit.
    """
    keywords = {
        "attention": attention,
        "attention_override": attention_override,
        "device": device,
        "dtype": dtype,
        "backend": backend,
        "lora": lora,
        "self_check": self_check,
    }
    config = _runtime_config(model, keywords)
    check_diffusers_import()
    if world is not None:
        config = dataclasses.replace(config, parallel=config.parallel.with_world(world.size))
    say: OnStage = on_stage if on_stage is not None else lambda _: None
    bound_primitive_cache()
    say("choosing attention")
    passthrough = _prepare_passthrough(config, is_loading=True)
    if passthrough is not None:
        say("loading diffusers' pipeline")
        recipe = passthrough.description.to_dict()
        folder = resolve_model_folder(config.model_path)
        return load_passthrough(folder, passthrough.plan, passthrough.device, passthrough.dtype, recipe)
    prepared = _prepare(config, world, is_loading=True)
    description, family = prepared.description, prepared.family
    assert isinstance(description.rules, RequestRules)
    folder = resolve_model_folder(config.model_path)
    check_component_files(folder)
    advice = "A dtype of bfloat16 needs half of what float32 does; so does a smaller model"
    with device_guard(prepared.device), explain_memory_shortage("loading", advice):
        say("loading the text encoder")
        text_encoder = _load_text_encoder(prepared, folder, world)
        say("loading the transformer")
        transformer = family.load_transformer(
            folder, prepared.transformer, prepared.device, prepared.dtype, prepared.loras
        )
        say("loading the decoder")
        decoder = _load_decoder(prepared, folder, world)
    if world is not None:
        world.wait_for_all()
        world.enable_hang_detection(config.parallel.timeout)
    return Pipeline(
        text_encoder=text_encoder,
        transformer=transformer,
        decoder=decoder,
        rules=description.rules,
        load_image_conditioner=lambda: family.load_image_conditioner(folder, prepared.device, prepared.dtype),
        device=prepared.device,
        dtype=prepared.dtype,
        recipe=description.to_dict(),
        mesh=prepared.mesh,
        remarks=remarks_on(description.self_checks),
    )


def _load_text_encoder(prepared: _Prepared, folder: Path, world: World | None) -> TextEncoder:
    def load() -> TextEncoder:
        return prepared.family.load_text_encoder(folder, prepared.device, prepared.dtype)

    return load() if world is None else SharedTextEncoder(load() if world.is_first else None, world)


def _load_decoder(prepared: _Prepared, folder: Path, world: World | None) -> LatentDecoder:
    def load() -> LatentDecoder:
        return prepared.family.load_decoder(folder, prepared.device, prepared.dtype)

    if world is None:
        return load()
    return SharedDecoder(load() if world.is_first or prepared.family.decoder_splits_rows else None, world)


def inspect_pipeline(config: RuntimeConfig) -> PipelineDescription:
    """What `load_pipeline` would put together, from the folder's json alone: no weight is read or downloaded, and no
    self-check is made.

    Raises what `load_pipeline` raises before it reads weights.
    """
    check_diffusers_import()
    passthrough = _prepare_passthrough(config)
    return _prepare(config).description if passthrough is None else passthrough.description


def _runtime_config(model: str | RuntimeConfig, keywords: Mapping[str, Any]) -> RuntimeConfig:
    if not isinstance(model, RuntimeConfig):
        return RuntimeConfig(model_path=model, **keywords)
    given = [name for name, value in keywords.items() if value not in (None, "auto", (), True)]
    if given:
        raise ConfigError(
            f"load_pipeline: {', '.join(given)}: put it into the RuntimeConfig, or give a model path instead"
        )
    return model


def _prepare(config: RuntimeConfig, world: World | None = None, *, is_loading: bool = False) -> _Prepared:
    folder = resolve_model_folder(config.model_path, weights=False)
    family = family_for_folder(folder)
    check_components(folder)
    refuse_quantised_components(folder)
    family.check_settings(folder)
    rules = _request_rules(folder, family, read_scheduler_config(folder))
    rules.try_scheduler()
    degrees = _settle_degrees(config, folder, family, rules)
    device = resolve_device(_device_name(config, world))
    dtype = resolve_dtype(config.dtype, device)
    mesh = _make_mesh(degrees, device, world, config.parallel.timeout)
    override, stated = AttentionConfig.parse(config.attention_override), AttentionConfig.parse(config.attention)
    for level in (override, stated):
        level.check_roles([role for role, _ in family.roles], family.name)
    policy = AttentionPolicy(
        cli=override,
        config=stated,
        device=str(device),
        dtype=dtype,
        mesh=mesh,
        num_head_groups=_HEAD_GROUPS if device.type == "cuda" else 1,
        self_check=config.self_check,
    )
    checker = SelfChecker(
        enabled=config.self_check,
        may_run=is_loading,
        from_first=None if world is None else world.from_first,
        # Of one call of self-attention: a ring's part of the grid.
        num_keys=() if rules.num_default_tokens is None else (-(-rules.num_default_tokens // degrees.ring),),
    )
    # Every attention layer settles its backend when it is made, so a choice that cannot run ends here.
    transformer, self_checks = checker.settle(
        lambda: _build_transformer(family, folder, policy), lambda built: built.attention_layers()
    )
    policy.check_rules(layer.layer for layer in transformer.attention_layers())
    description = PipelineDescription(
        config=config,
        folder=folder,
        family=family.name,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        rules=dataclasses.replace(rules, attention_layers=tuple(transformer.attention_layers())),
        attention=planned_attention(transformer.attention_layers()),
        libraries=(
            LibraryAttention("text_encoder", "transformers", "its own choice"),
            LibraryAttention("vae", "diffusers", "its own choice"),
        ),
        degrees=degrees,
        self_checks=self_checks,
    )
    loras = tuple(read_lora(lora) for lora in config.lora)
    for lora in loras:
        lora.check_components(family.transformer_components(folder))
    return _Prepared(description, family, transformer, device, dtype, loras, mesh)


def _build_transformer(family: ModelFamily, folder: Path, policy: AttentionPolicy) -> DiffusionTransformer:
    try:
        return family.build_transformer(folder, policy)
    except (RuntimeError, OverflowError) as error:
        # Sizes that pass one by one and not together: their products are more than torch counts to.
        raise ModelLoadError(
            f"{folder / 'transformer' / 'config.json'}: no transformer can have these sizes: {first_line(error)}"
        ) from error


def _prepare_passthrough(config: RuntimeConfig, *, is_loading: bool = False) -> _PreparedPassthrough | None:
    """The same for a folder that diffusers' own pipeline runs; None for every other."""
    folder = resolve_model_folder(config.model_path, weights=False)
    if not is_passthrough(config.backend, folder):
        return None
    check_components(folder)
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    checker = SelfChecker(enabled=config.self_check, may_run=is_loading)
    plan = plan_passthrough(config, folder, device, dtype, os.environ, checker)
    description = PipelineDescription(
        config=config,
        folder=folder,
        family=plan.rules.pipeline_class,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        rules=plan.rules,
        attention=planned_attention(plan.layers),
        libraries=plan.libraries,
        self_checks=plan.self_checks,
    )
    return _PreparedPassthrough(description, plan, device, dtype)


def _settle_degrees(config: RuntimeConfig, folder: Path, family: ModelFamily, rules: RequestRules) -> Degrees:
    """How the processes share the work, chosen where it is left open. Raises ConfigError."""
    if config.parallel.num_processes == 1:
        return Degrees()
    num_heads = family.num_shared_heads(folder)
    if num_heads is None:
        raise ConfigError(
            f"parallel: {family.name} models run on one process in this version: nothing says how their tokens are "
            "cut; leave out --num-gpus"
        )
    return config.parallel.settle(num_heads, is_guided=rules.is_guided_by_default)


def _device_name(config: RuntimeConfig, world: World | None) -> str:
    if world is not None:
        return device_of_process(config.device, world.place.local_rank, world.place.local_world_size)
    if config.parallel.num_processes > 1:
        # What the first of them would run on: all processes of this machine are alike.
        return device_of_process(config.device, 0, config.parallel.num_processes)
    return config.device


def _make_mesh(degrees: Degrees, device: torch.device, world: World | None, timeout: float) -> ProcessMesh:
    """The process groups; without a world, which processes there would be, for choices alone."""
    if world is None:
        return planned_mesh(degrees.ulysses, degrees.ring, degrees.branches)
    world.open_groups(device, timeout)
    return ProcessMesh.create(
        ulysses_degree=degrees.ulysses,
        ring_degree=degrees.ring,
        branch_degree=degrees.branches,
        ring_inside=degrees.ring_inside,
        timeout=world.collective_timeout,
    )


def _request_rules(folder: Path, family: ModelFamily, scheduler: SchedulerConfig) -> RequestRules:
    """generation.json over the scheduler's own settings over the family's defaults."""
    settings = generation_settings(folder)
    defaults = dict(family.request_defaults(folder))
    if scheduler.sampler is None:
        # Another scheduler would make other pictures: only a request or generation.json may put one in its place.
        del defaults["sampler"]
    return RequestRules(
        defaults=layered(defaults, scheduler.defaults, settings.defaults),
        presets=settings.presets,
        geometry=family.geometry(folder),
        scheduler=scheduler,
        schedule=family.schedule(folder, scheduler),
        embeds_guidance=family.embeds_guidance(folder),
        takes_guidance=family.takes_guidance(folder),
        guidance_offset=family.guidance_offset,
        takes_image=family.takes_image(folder),
        needs_image=family.needs_image(folder),
        attention_layers=(),
    )
