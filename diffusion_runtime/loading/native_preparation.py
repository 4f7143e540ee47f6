"""Native preparation: folder, request rules, degrees, device and the attention of every layer, from json alone."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from diffusion_runtime.attention.config import AttentionConfig
from diffusion_runtime.attention.layers import AttentionLayer
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.attention.self_check import SelfCheck
from diffusion_runtime.config import Degrees, RuntimeConfig
from diffusion_runtime.core.hardware import Hardware, device_of_process, resolve_device, resolve_dtype
from diffusion_runtime.core.model_folder import ModelFolder, component_class, read_index
from diffusion_runtime.core.planned_device import PlannedDevice
from diffusion_runtime.decoders.frame_interpolation import InterpolationFile, open_interpolation
from diffusion_runtime.decoders.latent_upsampler import UpsamplerFolder, open_upsampler
from diffusion_runtime.decoders.tiny_decoder import TinyDecoder, TinyFile, is_published_choice, read_tiny_decoder
from diffusion_runtime.errors import ConfigError, shown
from diffusion_runtime.loading.cuda_graphs import check_graphs
from diffusion_runtime.loading.description import PipelineDescription, planned_attention
from diffusion_runtime.loading.memory_planning import check_offload
from diffusion_runtime.loading.model_rules import request_rules_of, rules_with_loras
from diffusion_runtime.loading.native_model import Attending, PreparedModel, build_attending, self_checker_of
from diffusion_runtime.models.controlnet_folder import with_controlnet
from diffusion_runtime.models.family import Model
from diffusion_runtime.models.lora_sources import waits_on_hub
from diffusion_runtime.models.model_sources import EMBEDDED_FOLDERS, has_weights
from diffusion_runtime.models.part_files import check_sees, named_components, part_files, with_parts
from diffusion_runtime.models.registry import family_for_folder, lora_names_of_families
from diffusion_runtime.parallel.groups import ProcessMesh, planned_mesh
from diffusion_runtime.parallel.world import World
from diffusion_runtime.report.attention_report import LibraryAttention
from diffusion_runtime.rules.combinations import check_combinations
from diffusion_runtime.rules.features import ChosenRuntime
from diffusion_runtime.rules.request_rules import RequestRules
from diffusion_runtime.text_encoders.attention_choice import DEFAULT, EncoderAttention, choose_encoder_attention
from diffusion_runtime.weights.lora.binding import Lora, bind_files
from diffusion_runtime.weights.quantization import Quantization
from diffusion_runtime.weights.transformer_files import transformer_files
from diffusion_runtime.weights.weight_files import check_components, refuse_quantised_components

_logger = logging.getLogger("diffusion_runtime.loading")
# Ulysses sends one group of heads while it computes another. On two H200s that hides 15 of 17.5 ms of a forward pass
# (benchmarks/results/parallel_gpu.json); over gloo, on CPUs, it costs more than it hides.
_HEAD_GROUPS = 2


@dataclass(frozen=True)
class _Parts:
    """Parts that a config names, opened: the model of its folder with parts from elsewhere, a tiny decoder, an
    upsampler, and weights of frame interpolation."""

    folder: ModelFolder
    model: Model[Any, Any]
    tiny: TinyFile | None
    upsampler: UpsamplerFolder | None
    interpolation: InterpolationFile | None


@dataclass(frozen=True)
class _Devices:
    """The device of a model, and its processes. hardware: of a device that is not in this machine, else None."""

    device: torch.device
    dtype: torch.dtype
    hardware: Hardware | None
    degrees: Degrees
    mesh: ProcessMesh


@dataclass(frozen=True)
class _Attention:
    """Attention choices. policy: what layers are built with. text: chosen for the text encoders, None for their own."""

    policy: AttentionPolicy
    text: EncoderAttention | None


@dataclass(frozen=True)
class _Weights:
    """A transformer on the meta device with what else attends, its LoRA files and its quantisation."""

    built: Attending
    layers: tuple[AttentionLayer, ...]
    self_checks: tuple[SelfCheck, ...]
    quantization: Quantization
    loras: tuple[Lora, ...]


def prepare_native(
    config: RuntimeConfig,
    folder: ModelFolder,
    world: World | None,
    is_guided: Callable[[RequestRules], bool] | None,
    planned_on: PlannedDevice | None = None,
) -> PreparedModel:
    """`prepare` for a folder of a family here. planned_on: the device where it is not in this machine."""
    parts = _open_parts(config, folder)
    rules = _rules_of(parts.model, config)
    if parts.interpolation is not None:
        rules = dataclasses.replace(rules, interpolation=parts.interpolation.version)
    config, degrees = _degrees_of(config, parts.model, rules, is_guided)
    devices = _devices_of(config, parts.model, degrees, world, planned_on)
    model = parts.model.shared_by(devices.mesh.tensor)
    attention = _attention_of(config, model, devices)
    weights = _weights_of(config, model, rules, attention.policy, devices, decodes=parts.tiny is None)
    description = PipelineDescription(
        config=config,
        model_folder=parts.folder,
        family=model.family.name,
        device=str(devices.device),
        dtype=str(devices.dtype).removeprefix("torch."),
        rules=dataclasses.replace(
            rules_with_loras(model, config, parts.folder.digest, rules, config.lora, weights.loras),
            attention_layers=weights.layers,
            num_blocks=weights.built.transformer.num_blocks,
            text_roles=weights.built.transformer.text_roles,
        ),
        attention=planned_attention(weights.built.layers),
        libraries=(
            _text_attention(model, devices.dtype, attention.text),
            _decoder_attention(model, parts.tiny, weights.built.decoder),
        ),
        degrees=degrees,
        self_checks=weights.self_checks,
        quantization=weights.quantization.describe(model.modules(weights.built.transformer)),
        planned_on=planned_on,
    )
    return PreparedModel(
        description,
        model,
        weights.built.transformer,
        attention.policy,
        devices.device,
        devices.dtype,
        weights.loras,
        devices.mesh,
        world,
        parts.tiny,
        parts.upsampler,
        weights.quantization,
        text_attention=attention.text,
        decoder_attention=weights.built.decoder,
        interpolation=parts.interpolation,
    )


def _open_parts(config: RuntimeConfig, folder: ModelFolder) -> _Parts:
    """Open the folder, and what else the config names, from json and the heads of files. Raises ConfigError and
    ModelLoadError."""
    family = family_for_folder(folder)
    check_components(folder)
    files, parts, elsewhere = transformer_files(config), part_files(config), named_components(config)
    refuse_quantised_components(folder, elsewhere)
    if files:
        # Files of parts hold no optional ones.
        folder = folder.without(each for each in family.files.optional if not has_weights(folder.path, each))
    folder = with_parts(folder, parts, _variant_here(config, folder), elsewhere).without_downloads(elsewhere)
    folder = with_controlnet(folder, config.controlnet_path, family.files.controlnet_class, family.name)
    family.decoding.check_mode(config.vae_decode, family.name)
    model = family.open(folder).with_decoder(config.vae_decoder)
    model = model.with_transformer_files(files, lora_names_of_families)
    folder = folder.without_downloads(model.weights.in_files)
    family.decoding.check_tiling(config.vae_tiling, family.name, model.geometry.spatial_factor)
    if family.text.shapes(folder, model.config).sees:
        check_sees(folder)
    for component in family.files.diffusers_components:
        if component.name in (part.component for part in parts):
            component.check_weights(folder)
    tiny = _read_tiny_decoder(config, model)
    upsampler = None
    if config.upsampler_path is not None:
        channels = model.geometry.num_channels
        upsampler = open_upsampler(config.upsampler_path, family.requests.second_stage, family.name, channels)
    interpolation = None if config.interpolation_path is None else open_interpolation(config.interpolation_path)
    return _Parts(folder, model, tiny, upsampler, interpolation)


def _rules_of(model: Model[Any, Any], config: RuntimeConfig) -> RequestRules:
    """Return the rules of requests, without LoRA files. Raises ModelLoadError."""
    rules = request_rules_of(model, config)
    rules.sampling.check_scheduler(rules.defaults)
    return rules


def _degrees_of(
    config: RuntimeConfig,
    model: Model[Any, Any],
    rules: RequestRules,
    is_guided: Callable[[RequestRules], bool] | None,
) -> tuple[RuntimeConfig, Degrees]:
    """Return how the processes share the work, and the config with what that decides. Raises ConfigError."""
    degrees = _choose_degrees(config, model, rules)
    is_open = config.parallel.cfg_parallel is None and degrees.branches > 1
    if is_open and is_guided is not None and not is_guided(rules):
        config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, cfg_parallel=False))
        degrees = _choose_degrees(config, model, rules)
    return config, degrees


def _devices_of(
    config: RuntimeConfig,
    model: Model[Any, Any],
    degrees: Degrees,
    world: World | None,
    planned_on: PlannedDevice | None,
) -> _Devices:
    """Return the device, and the processes once they have met. Raises ConfigError."""
    hardware = None if planned_on is None else planned_on.hardware
    device = resolve_device(_device_name(config, world)) if hardware is None else torch.device(hardware.platform)
    dtype = resolve_dtype(config.dtype, device)
    if hardware is None:
        model.family.decoding.check_products(config.vae_decode, device, dtype)
    check_combinations("native", ChosenRuntime(config))
    check_offload(config, device)
    # Before the processes meet, so that what cannot be shared is said at once.
    model.shared_by(planned_mesh(1, 1, 1, degrees.tensor).tensor)
    return _Devices(device, dtype, hardware, degrees, _make_mesh(degrees, device, world, config.parallel.timeout))


def _attention_of(config: RuntimeConfig, model: Model[Any, Any], devices: _Devices) -> _Attention:
    """Return the attention choices of the transformer's layers and of the text encoders. Raises ConfigError."""
    family, device = model.family, devices.device
    override, stated = AttentionConfig.parse(config.attention_override), AttentionConfig.parse(config.attention)
    for level in (override, stated):
        level.of_layers().check_roles([role for role, _ in family.roles], family.name)
        if not model.sampling.is_causal:
            level.check_phases(f"{shown(config.model_path)} ({family.name})", has_prefix=model.sampling.caches_prefix)
    policy = AttentionPolicy(
        cli=override,
        config=stated,
        device=str(device),
        dtype=devices.dtype,
        mesh=devices.mesh,
        num_head_groups=_HEAD_GROUPS if device.type == "cuda" else 1,
        has_phases=model.sampling.has_phases,
        self_check=config.self_check,
        planned_on=devices.hardware,
    )
    return _Attention(policy, choose_encoder_attention(policy, _text_encoder_classes(model, devices.dtype)))


def _weights_of(
    config: RuntimeConfig,
    model: Model[Any, Any],
    rules: RequestRules,
    policy: AttentionPolicy,
    devices: _Devices,
    *,
    decodes: bool,
) -> _Weights:
    """Build the transformer without weights, and the attention of its decoder if it decodes, and bind its LoRA files.
    Raises BackendUnavailableError for an attention choice that cannot run, ConfigError and ModelLoadError."""
    quantization = Quantization.of(model.family.name, config.quantization, config.quantization_ignored_layers)
    # Every attention layer decides when it is made, so a choice that cannot run ends here.
    built, self_checks = self_checker_of(config, rules, devices.degrees).build_checked(
        lambda: build_attending(model, policy, quantization, decodes=decodes), lambda built: built.layers
    )
    transformer = built.transformer
    # Explicit paths exist locally, so the dry run can check them too.
    named = [file.component for file in model.weights.files]
    model.weights.check(model.modules(transformer), named)
    layers = tuple(transformer.attention_layers())
    policy.check_rules(layer.layer for layer in built.layers)
    _warn_of_lossy_commits(layers)
    check_graphs(config, devices.device, transformer, layers)
    target = model.lora_target(lora_names_of_families)
    loras = bind_files([lora for lora in config.lora if not waits_on_hub(lora)], target)
    if model.weights.prepare is not None:
        # What only names in files show, such as gates, is said of a plan too.
        model.weights.make_room(model.modules(transformer), loras)
    return _Weights(built, layers, self_checks, quantization, loras)


def _text_attention(model: Model[Any, Any], dtype: torch.dtype, chosen: EncoderAttention | None) -> LibraryAttention:
    """Return what runs the text encoders' attention. chosen: None for their library's own."""
    library = model.family.text.library(model.folder, dtype)
    if chosen is None:
        return LibraryAttention("text_encoder", library, DEFAULT, "")
    return LibraryAttention("text_encoder", library, chosen.implementation, chosen.reason)


def _text_encoder_classes(model: Model[Any, Any], dtype: torch.dtype) -> dict[str, str | None]:
    """Return the class of transformers of each text encoder in the folder; None for a module of ours."""
    is_ours = model.family.text.library(model.folder, dtype) == "torch"
    return {
        name: None if is_ours else str(entry[1])
        for name, entry in read_index(model.folder).items()
        if name.startswith("text_encoder") and isinstance(entry, list) and len(entry) == 2
    }


def _decoder_attention(
    model: Model[Any, Any], tiny: TinyFile | None, layers: Sequence[AttentionLayer]
) -> LibraryAttention:
    """Return what decodes, and by which class. layers: its attention; none where that is the class's own, which cannot
    be chosen."""
    if tiny is not None:
        return LibraryAttention("vae", TinyDecoder.library, "a tiny decoder, without attention")
    if (named := model.named_decoder) is not None:
        return LibraryAttention("vae", named.component.decoding_library(model.folder), named.component.class_name)
    library = model.family.files.decoding_library(model.folder)
    chosen = f"role {layers[0].layer.role}" if layers else ""
    return LibraryAttention("vae", library, component_class(model.folder, "vae")[1], chosen)


def _warn_of_lossy_commits(layers: Sequence[AttentionLayer]) -> None:
    lossy = {(each.backend, each.reason) for layer in layers for each in layer.decisions.lossy_commits()}
    for backend, reason in sorted(lossy):
        _logger.warning(
            "attention backend %s gives up accuracy and also computes commits (%s): what a commit loses, every later "
            "chunk inherits (every step, of a prefix); keep it to the others with --decode-attention-backend, or "
            "phase: denoise in its rule",
            backend,
            reason,
        )


def _variant_here(config: RuntimeConfig, folder: ModelFolder) -> str | None:
    """The variant to read; None in a dry run of a model whose weights are still on the hub."""
    return config.variant if folder.download_gb is None else None


def _read_tiny_decoder(config: RuntimeConfig, model: Model[Any, Any]) -> TinyFile | None:
    if config.vae_decoder is None or model.named_decoder is not None:
        return None
    family = model.family
    # The embedded model's autoencoder has the shapes of Wan 2.1's, and latents of its own.
    if config.model_path in EMBEDDED_FOLDERS and is_published_choice(config.vae_decoder):
        raise ConfigError(
            f"vae_decoder: {shown(config.vae_decoder)} is made for published models; the embedded ones have latents of "
            "their own, and no tiny decoder; leave out --vae-decoder"
        )
    published = family.decoding.tiny_decoders if model.tiny_decoders is None else model.tiny_decoders
    return read_tiny_decoder(config.vae_decoder, model.folder, family.name, model.geometry, published)


def _choose_degrees(config: RuntimeConfig, model: Model[Any, Any], rules: RequestRules) -> Degrees:
    """Return how the processes share the work, chosen where it is left open. Raises ConfigError."""
    if config.parallel.num_processes == 1:
        return Degrees()
    if model.num_shared_heads is None:
        raise ConfigError(
            f"parallel: {model.family.name} models run on one process in this version: nothing says how their tokens "
            "are cut; leave out --num-gpus"
        )
    return config.parallel.choose_degrees(model.num_shared_heads, is_guided=rules.sampling.is_guided_by(rules.defaults))


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
        return planned_mesh(degrees.ulysses, degrees.ring, degrees.branches, degrees.tensor)
    world.open_groups(device, timeout)
    return ProcessMesh.create(
        ulysses_degree=degrees.ulysses,
        ring_degree=degrees.ring,
        branch_degree=degrees.branches,
        tensor_degree=degrees.tensor,
        ring_inside=degrees.ring_inside,
        timeout=world.collective_timeout,
    )
