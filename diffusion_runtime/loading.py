"""prepare, load_pipeline and inspect_pipeline: the only place where parts are chosen and put together."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from diffusion_runtime.attention.config import AttentionConfig
from diffusion_runtime.attention.layers import AttentionLayer
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.attention.self_check import SelfChecker, remarks_on
from diffusion_runtime.attention_report import LibraryAttention
from diffusion_runtime.config import Degrees, RuntimeConfig
from diffusion_runtime.description import PipelineDescription, planned_attention
from diffusion_runtime.device_guard import device_guard
from diffusion_runtime.diffusers_bridge.choice import is_passthrough
from diffusion_runtime.diffusers_bridge.passthrough import DiffusersPipeline, load_passthrough
from diffusion_runtime.diffusers_bridge.passthrough_folder import PassthroughPlan, plan_passthrough
from diffusion_runtime.diffusers_bridge.request_rules import PassthroughRules
from diffusion_runtime.errors import ConfigError, ModelLoadError, first_line
from diffusion_runtime.generation_pipeline import GenerationPipeline, GenerationRules
from diffusion_runtime.hardware import device_of_process, resolve_device, resolve_dtype
from diffusion_runtime.memory.cpu_memory import bound_primitive_cache
from diffusion_runtime.memory.device_memory import explain_memory_shortage
from diffusion_runtime.models.checkpoint import resolve_model_folder
from diffusion_runtime.models.component_files import (
    check_component_files,
    check_components,
    refuse_quantised_components,
)
from diffusion_runtime.models.diffusers_import import check_diffusers_import
from diffusion_runtime.models.family import Model
from diffusion_runtime.models.interface import DiffusionTransformer, LatentDecoder
from diffusion_runtime.models.lora import Lora, read_lora
from diffusion_runtime.models.published import PublishedModel, model_of_name
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


class Prepared(Protocol):
    """A model whose attention is decided and whose weights are still on disk."""

    @property
    def description(self) -> PipelineDescription:
        """What `load` puts together, as far as it is known without weights and self-checks."""

    @property
    def rules(self) -> GenerationRules:
        """What the model says about requests."""

    @property
    def layers(self) -> tuple[AttentionLayer, ...]:
        """Its attention layers in the order in which they run; empty where they are known once weights are loaded."""

    def load(self, on_stage: OnStage | None = None) -> GenerationPipeline:
        """Read the weights. on_stage: called with a phrase before each part is loaded.

        Raises BackendUnavailableError for an attention choice whose self-check fails here, before any weight is read;
        then ModelLoadError for a folder that cannot be used and DeviceMemoryError when it does not fit.
        """


@dataclass(frozen=True)
class PreparedModel:
    """A native model. transformer: on the meta device. loras: read, and not yet merged. world: the processes that run
    the model together, None for one alone."""

    description: PipelineDescription
    model: Model[Any, Any]
    transformer: DiffusionTransformer
    policy: AttentionPolicy
    device: torch.device
    dtype: torch.dtype
    loras: tuple[Lora, ...]
    mesh: ProcessMesh
    world: World | None

    @property
    def rules(self) -> RequestRules:
        assert isinstance(self.description.rules, RequestRules)
        return self.description.rules

    @property
    def layers(self) -> tuple[AttentionLayer, ...]:
        return self.rules.attention_layers

    def load(self, on_stage: OnStage | None = None) -> Pipeline:
        """As `Prepared.load`. Raises besides ConfigError where several processes are asked for and none were joined."""
        say: OnStage = on_stage if on_stage is not None else lambda _: None
        world, config = self.world, self.description.config
        if world is None and self.mesh.size > 1:
            raise ConfigError(
                f"parallel: {self.mesh.size} processes are asked for, and this one has joined no others; start it with "
                "torchrun and give load_pipeline the world of `with join_processes() as world`"
            )
        bound_primitive_cache()
        say("choosing attention")
        checked = self._check_attention()
        description, opened = checked.description, self.model
        check_component_files(resolve_model_folder(config.model_path))
        advice = "A dtype of bfloat16 needs half of what float32 does; so does a smaller model"
        with device_guard(self.device), explain_memory_shortage("loading", advice):
            say("loading the text encoder")
            text_encoder = self._load_text_encoder()
            say("loading the transformer")
            transformer = opened.load_transformer(checked.transformer, self.device, self.dtype, self.loras)
            say("loading the decoder")
            decoder = self._load_decoder()
        if world is not None:
            world.wait_for_all()
            world.enable_hang_detection(config.parallel.timeout)
        return Pipeline(
            text_encoder=text_encoder,
            transformer=transformer,
            decoder=decoder,
            rules=checked.rules,
            load_image_conditioner=lambda: opened.load_image_conditioner(self.device, self.dtype),
            device=self.device,
            dtype=self.dtype,
            recipe=description.to_dict(),
            mesh=self.mesh,
            remarks=remarks_on(description.self_checks),
        )

    def _check_attention(self) -> PreparedModel:
        """The same with every due self-check made; a failed one makes layers decide again."""
        from_first = None if self.world is None else self.world.from_first
        checker = _self_checker(self.description.config, self.rules, self.description.degrees)
        checker = dataclasses.replace(checker, may_run=True, from_first=from_first)
        # Loading fills the transformer, so a second `load` needs another one.
        is_empty = all(parameter.is_meta for parameter in self.transformer.parameters())
        transformer, self_checks = checker.settle(
            lambda: _build_transformer(self.model, self.policy),
            lambda built: built.attention_layers(),
            self.transformer if is_empty else None,
        )
        layers = tuple(transformer.attention_layers())
        description = dataclasses.replace(
            self.description,
            rules=dataclasses.replace(self.rules, attention_layers=layers),
            attention=planned_attention(layers),
            self_checks=self_checks,
        )
        return dataclasses.replace(self, description=description, transformer=transformer)

    def _load_text_encoder(self) -> TextEncoder:
        def load() -> TextEncoder:
            return self.model.load_text_encoder(self.device, self.dtype)

        return load() if self.world is None else SharedTextEncoder(load() if self.world.is_first else None, self.world)

    def _load_decoder(self) -> LatentDecoder:
        def load() -> LatentDecoder:
            return self.model.load_decoder(self.device, self.dtype)

        if self.world is None:
            return load()
        is_needed = self.world.is_first or self.model.family.decoder_splits_rows
        return SharedDecoder(load() if is_needed else None, self.world)


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
    def layers(self) -> tuple[AttentionLayer, ...]:
        return self.plan.layers

    def load(self, on_stage: OnStage | None = None) -> DiffusersPipeline:
        """As `Prepared.load`."""
        say: OnStage = on_stage if on_stage is not None else lambda _: None
        config = self.description.config
        bound_primitive_cache()
        say("choosing attention")
        plan, self_checks = SelfChecker(enabled=config.self_check).settle(
            lambda: _plan_passthrough(config, self.description.folder, self.device, self.dtype),
            lambda built: built.layers,
            self.plan,
        )
        plan = dataclasses.replace(plan, self_checks=self_checks)
        say("loading diffusers' pipeline")
        recipe = _describe_passthrough(config, self.description.folder, plan, self.device, self.dtype).to_dict()
        return load_passthrough(resolve_model_folder(config.model_path), plan, self.device, self.dtype, recipe)


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
) -> GenerationPipeline:
    """Load a model: `shapes` (embedded), a diffusers folder or a hub id; or all that a RuntimeConfig says.

    backend: `native` is our own transformer, `diffusers` diffusers' own pipeline behind the same call; `auto` takes the
    native one where there is one.

    attention: the config level, in any form AttentionConfig.parse takes; attention_override: the same one level higher,
    as the command line does. lora: files to merge into the transformer, as paths or (path, scale) pairs. self_check:
    whether third-party attention kernels are compared with the definition on this machine's accelerator before the
    weights are read, once per version. on_stage: called with a phrase before each part is loaded. world: the processes
    that run the model together, each of which must load it alike.

    Raises, before any weight is read, BackendUnavailableError for an attention choice that cannot run here and
    ConfigError for a value that is wrong; InstallationError where an installed package keeps diffusers from being
    imported; then ModelLoadError for a folder that cannot be used and DeviceMemoryError when it does not fit.
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
    return prepare(_runtime_config(model, keywords), world).load(on_stage)


def inspect_pipeline(config: RuntimeConfig) -> PipelineDescription:
    """Dry run of `load_pipeline`, from the folder's json alone: no weight is read or downloaded, and no self-check is
    run.

    Raises what `load_pipeline` raises before it reads weights.
    """
    return prepare(config).description


def prepare(
    config: RuntimeConfig, world: World | None = None, *, is_guided: Callable[[RequestRules], bool] | None = None
) -> Prepared:
    """Open a model and decide its attention, from the folder's json alone: no weight is read or downloaded, and no
    self-check is made. `load` of the result reads the weights.

    world: the processes that run the model together, each of which must prepare and load it alike. is_guided: whether
    every request that will come runs two branches of guidance, asked where processes could share them; None: the
    model's own defaults decide.

    Raises what `load_pipeline` raises before it reads weights, self-checks aside.
    """
    check_diffusers_import()
    if world is not None:
        config = dataclasses.replace(config, parallel=config.parallel.with_world(world.size))
    folder = resolve_model_folder(config.model_path, weights=False)
    if is_passthrough(config.backend, folder):
        return _prepare_passthrough(config, folder)
    return _prepare_model(config, folder, world, is_guided)


def _runtime_config(model: str | RuntimeConfig, keywords: Mapping[str, Any]) -> RuntimeConfig:
    if not isinstance(model, RuntimeConfig):
        return RuntimeConfig(model_path=model, **keywords)
    given = [name for name, value in keywords.items() if value not in (None, "auto", (), True)]
    if given:
        raise ConfigError(
            f"load_pipeline: {', '.join(given)}: put it into the RuntimeConfig, or give a model path instead"
        )
    return model


def _prepare_model(
    config: RuntimeConfig, folder: Path, world: World | None, is_guided: Callable[[RequestRules], bool] | None
) -> PreparedModel:
    family = family_for_folder(folder)
    check_components(folder)
    refuse_quantised_components(folder)
    model = family.open(folder)
    rules = _request_rules(model, model_of_name(config.model_path))
    rules.try_scheduler()
    degrees = _choose_degrees(config, model, rules)
    is_open = config.parallel.cfg_parallel is None and degrees.branches > 1
    if is_open and is_guided is not None and not is_guided(rules):
        config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, cfg_parallel=False))
        degrees = _choose_degrees(config, model, rules)
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
    # Every attention layer decides when it is made, so a choice that cannot run ends here.
    transformer, self_checks = _self_checker(config, rules, degrees).settle(
        lambda: _build_transformer(model, policy), lambda built: built.attention_layers()
    )
    layers = tuple(transformer.attention_layers())
    policy.check_rules(layer.layer for layer in layers)
    description = PipelineDescription(
        config=config,
        folder=folder,
        family=family.name,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        rules=dataclasses.replace(rules, attention_layers=layers),
        attention=planned_attention(layers),
        libraries=(
            LibraryAttention("text_encoder", "transformers", "its own choice"),
            LibraryAttention("vae", "diffusers", "its own choice"),
        ),
        degrees=degrees,
        self_checks=self_checks,
    )
    loras = tuple(read_lora(lora) for lora in config.lora)
    for lora in loras:
        lora.check_components(model.transformer_components)
    return PreparedModel(description, model, transformer, policy, device, dtype, loras, mesh, world)


def _self_checker(config: RuntimeConfig, rules: RequestRules, degrees: Degrees) -> SelfChecker:
    """One that makes no check: what was kept of earlier ones is all it knows."""
    tokens = rules.num_default_tokens
    # Of one call of self-attention: a ring's part of the grid.
    num_keys = () if tokens is None else (-(-tokens // degrees.ring),)
    return SelfChecker(enabled=config.self_check, may_run=False, num_keys=num_keys)


def _build_transformer(model: Model[Any, Any], policy: AttentionPolicy) -> DiffusionTransformer:
    try:
        return model.build_transformer(policy)
    except (RuntimeError, OverflowError) as error:
        # Sizes that are valid one by one and not together: their products exceed torch's integers.
        raise ModelLoadError(
            f"{model.folder / 'transformer' / 'config.json'}: no transformer can have these sizes: {first_line(error)}"
        ) from error


def _prepare_passthrough(config: RuntimeConfig, folder: Path) -> PreparedPassthrough:
    """The same for a folder that diffusers' own pipeline runs."""
    check_components(folder)
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    plan = _plan_passthrough(config, folder, device, dtype)
    return PreparedPassthrough(_describe_passthrough(config, folder, plan, device, dtype), plan, device, dtype)


def _plan_passthrough(config: RuntimeConfig, folder: Path, device: torch.device, dtype: torch.dtype) -> PassthroughPlan:
    checker = SelfChecker(enabled=config.self_check, may_run=False)
    return plan_passthrough(config, folder, device, dtype, os.environ, checker)


def _describe_passthrough(
    config: RuntimeConfig, folder: Path, plan: PassthroughPlan, device: torch.device, dtype: torch.dtype
) -> PipelineDescription:
    return PipelineDescription(
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


def _choose_degrees(config: RuntimeConfig, model: Model[Any, Any], rules: RequestRules) -> Degrees:
    """How the processes share the work, chosen where it is left open. Raises ConfigError."""
    if config.parallel.num_processes == 1:
        return Degrees()
    if model.num_shared_heads is None:
        raise ConfigError(
            f"parallel: {model.family.name} models run on one process in this version: nothing says how their tokens "
            "are cut; leave out --num-gpus"
        )
    return config.parallel.choose_degrees(model.num_shared_heads, is_guided=rules.is_guided_by_default)


def _device_name(config: RuntimeConfig, world: World | None) -> str:
    if world is not None:
        return device_of_process(config.device, world.place.local_rank, world.place.local_world_size)
    if config.parallel.num_processes > 1:
        # The hardware of rank 0: all processes of this machine are alike.
        return device_of_process(config.device, 0, config.parallel.num_processes)
    return config.device


def _make_mesh(degrees: Degrees, device: torch.device, world: World | None, timeout: float) -> ProcessMesh:
    """The process groups; without a world, a mesh for a dry run."""
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


def _request_rules(model: Model[Any, Any], named: PublishedModel | None) -> RequestRules:
    """What is documented of a model chosen by name over generation.json over the scheduler's own settings over the
    model's defaults."""
    documented = [] if named is None else [named.request]
    defaults, scheduler = dict(model.defaults), model.scheduler
    if scheduler.sampler is None:
        # Another scheduler would give other images: only a request or generation.json may replace it.
        del defaults["sampler"]
    return RequestRules(
        defaults=layered(defaults, scheduler.defaults, model.generation.defaults, *documented),
        presets=model.generation.presets if named is None else {**model.generation.presets, **named.presets},
        geometry=model.geometry,
        scheduler=scheduler,
        schedule=model.schedule,
        embeds_guidance=model.embeds_guidance,
        takes_guidance=model.takes_guidance,
        guidance_offset=model.family.guidance_offset,
        model_fields=_model_fields(model),
        needs_image=model.needs_image,
        attention_layers=(),
    )


def _model_fields(model: Model[Any, Any]) -> frozenset[str]:
    """The request fields that not every model uses and this one does."""
    facts = {
        "image_path": model.takes_image,
        "true_cfg_scale": model.embeds_guidance,
        "guidance_scale_2": len(model.transformer_components) > 1,
    }
    return frozenset(model.family.request_fields) | {name for name, holds in facts.items() if holds}
