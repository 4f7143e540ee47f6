"""Checks a diffusers folder for the passthrough before any weight is read: pipeline class, components, weights,
attention."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from diffusion_runtime.attention.config import AttentionConfig
from diffusion_runtime.attention.force import current_force
from diffusion_runtime.attention.layers import AttentionLayer
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.attention.roles import TEXT_ENCODER
from diffusion_runtime.attention.select import ENVIRONMENT_VARIABLE
from diffusion_runtime.attention.self_check import SelfCheck, SelfChecker
from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.core.model_folder import INDEX_FILE, MODULAR_INDEX_FILE, ModelFolder, read_index
from diffusion_runtime.diffusers_bridge.attach import AttachedAttention, plan_attachment
from diffusion_runtime.diffusers_bridge.compiled_denoisers import check_compilable
from diffusion_runtime.diffusers_bridge.denoisers import denoises
from diffusion_runtime.diffusers_bridge.dispatcher import check_dispatcher_backend
from diffusion_runtime.diffusers_bridge.dispatcher_names import dispatcher_name
from diffusion_runtime.diffusers_bridge.loras import PlannedLora, plan_loras, remarks_of
from diffusion_runtime.diffusers_bridge.meta_device import meta_model, meta_pipeline
from diffusion_runtime.diffusers_bridge.modular import is_modular_class, modular_interface, modular_pipeline
from diffusion_runtime.diffusers_bridge.pipeline_arguments import further_arguments
from diffusion_runtime.diffusers_bridge.pipeline_interface import PipelineInterface
from diffusion_runtime.diffusers_bridge.request_rules import PassthroughRules, accepted, signature_defaults
from diffusion_runtime.diffusers_bridge.size_rules import SizeRules
from diffusion_runtime.diffusers_bridge.stored_components import load_stored, stored_formats
from diffusion_runtime.errors import ConfigError, ModelLoadError, shown
from diffusion_runtime.models.generation import generation_settings
from diffusion_runtime.models.published import PublishedModel, model_of_name
from diffusion_runtime.models.registry import supported_transformer_classes
from diffusion_runtime.report.attention_report import LibraryAttention
from diffusion_runtime.text_encoders.attention_choice import EncoderAttention, choose_encoder_attention
from diffusion_runtime.text_encoders.loading import quiet_transformers
from diffusion_runtime.untrusted.files import shown_path
from diffusion_runtime.weights.cached_folder import way_to_complete
from diffusion_runtime.weights.weight_files import STEMS, find_weight_files

_logger = logging.getLogger("diffusion_runtime.diffusers_bridge")
_LIBRARIES = ("diffusers", "transformers")
_DENOISERS = ("transformer", "unet")


@dataclass(frozen=True)
class AttentionChoice:
    """The attention choice of a RuntimeConfig for a passthrough.

    ours: whether any level chooses one of our backends, which are then attached. dispatcher: a name of diffusers' own,
    None for none. source: the level of that name. self_check: RuntimeConfig's.
    """

    config: Any
    override: Any
    ours: bool
    dispatcher: str | None
    source: str
    self_check: bool = True

    @classmethod
    def of(cls, config: RuntimeConfig, environment: Mapping[str, str]) -> AttentionChoice:
        """Read the choice from a config and the environment. diffusers' names count when they are the whole of a level.
        Raises ConfigError."""
        for source, choice in (("cli", config.attention_override), ("config", config.attention)):
            name = dispatcher_name(choice)
            if name is not None:
                return cls(None, None, False, name, source, config.self_check)
            if _is_choice(choice):
                # Below a choice of ours, a name that both have means one of ours.
                break
        levels = (config.attention_override, config.attention)
        for level in levels:
            if dispatcher_name(level) is None:
                AttentionConfig.parse(level).check_phases(f"{shown(config.model_path)} (diffusers' own pipeline)")
        forced = any(choice.role != TEXT_ENCODER for choice in current_force())
        ours = any(map(_is_choice, levels)) or bool(environment.get(ENVIRONMENT_VARIABLE)) or forced
        # Choices for text encoders are applied when they are loaded.
        stated, override = (
            None if level is None else AttentionConfig.parse(level).of_layers()
            for level in (config.attention, config.attention_override)
        )
        return cls(stated, override, ours, None, "platform", config.self_check)


@dataclass(frozen=True)
class PassthroughPlan:
    """Everything decided about a folder before its weights are read.

    pipeline_class: of diffusers. layers: ours, as they would be attached; empty when none are, or when they are unknown
    before the weights are loaded. libraries: components whose attention is their library's own. self_checks: of the
    backends that those layers chose. loras: the LoRA files, read. text_attention: the choice for the text encoders,
    None for transformers' own. dequantized: by component, the formats of weights that this runtime dequantises.
    """

    pipeline_class: Any
    choice: AttentionChoice
    rules: PassthroughRules
    layers: tuple[AttentionLayer, ...]
    libraries: tuple[LibraryAttention, ...]
    self_checks: tuple[SelfCheck, ...] = ()
    loras: tuple[PlannedLora, ...] = ()
    text_attention: EncoderAttention | None = None
    dequantized: Mapping[str, str] = field(default_factory=dict)

    def remarks_on_weights(self, dtype: torch.dtype) -> tuple[str, ...]:
        """Return what plan and report say of components that are dequantised."""
        computed = str(dtype).removeprefix("torch.")
        return tuple(
            f"{component}: stored as {formats}, dequantised at load, computed in {computed}"
            for component, formats in self.dequantized.items()
        )


def plan_passthrough(
    config: RuntimeConfig,
    folder: ModelFolder,
    device: torch.device,
    dtype: torch.dtype,
    environment: Mapping[str, str],
    checker: SelfChecker,
) -> PassthroughPlan:
    """Read the folder's json and decide everything that follows from it.

    Raises ModelLoadError for a folder that diffusers cannot load or that asks for code of its own, and for a pipeline
    that no request can run; BackendUnavailableError and ConfigError for an attention choice that cannot run.
    """
    if config.parallel.num_processes > 1:
        raise ConfigError(
            "parallel: a pipeline of diffusers' own runs on one process; leave out --num-gpus and degrees"
        )
    index = read_index(folder)
    with quiet_transformers():
        pipeline_class = _pipeline_class(folder, index)
        modular = None if folder.modular is None else modular_pipeline(pipeline_class, folder)
        interface = PipelineInterface.of(pipeline_class) if modular is None else modular_interface(modular)
        _check_can_run(folder, interface)
        choice = AttentionChoice.of(config, environment)
        if choice.dispatcher is not None:
            check_dispatcher_backend(choice.dispatcher)
        models = {name: meta_model(folder, name, entry) for name, entry in _components(index)}
        models = {name: model for name, model in models.items() if model is not None}
        if config.compile != "off":
            check_compilable(models)
        loras = plan_loras(pipeline_class, config.lora, models)
        # The blocks of a modular pipeline check sizes when they run.
        unloaded = meta_pipeline(pipeline_class, folder, index, models) if modular is None else None
        sizes = SizeRules.of(interface, unloaded)
    handles = _planned(models, choice, device, dtype, checker) if choice.ours else []
    text_attention = _text_attention(index, config, device, dtype)
    settings = generation_settings(folder)

    def check_steps(num_steps: int) -> None:
        for handle in handles:
            handle.check_request(num_steps)

    rules = PassthroughRules(
        interface=interface,
        sizes=sizes,
        defaults={**signature_defaults(interface), **accepted(settings.defaults, interface)},
        presets={name: accepted(preset, interface) for name, preset in settings.presets.items()},
        check_steps=check_steps,
        lora_remarks=remarks_of(loras),
        further=further_arguments(interface, config.pipeline_arguments or {}),
    )
    if (named := model_of_name(config.model_path)) is not None and (left_out := _left_out(named, rules)):
        _logger.warning(
            "%s: settings documented for this name are not applied to diffusers' own pipeline: %s; give those that you "
            "want with the request",
            named.name,
            left_out,
        )
    return PassthroughPlan(
        pipeline_class,
        choice,
        rules,
        tuple(layer for handle in handles for module in handle.modules for layer in module.layers),
        tuple(library_attention(index, text_attention)),
        tuple(dict.fromkeys(check for handle in handles for check in handle.self_checks)),
        loras,
        text_attention,
        _dequantized_so_far(folder),
    )


def _text_attention(
    index: Mapping[str, Any], config: RuntimeConfig, device: torch.device, dtype: torch.dtype
) -> EncoderAttention | None:
    """Choose the attention of the text encoders. Raises BackendUnavailableError."""
    levels = [
        AttentionConfig() if dispatcher_name(level) is not None else AttentionConfig.parse(level)
        for level in (config.attention_override, config.attention)
    ]
    classes = {
        name: entry[1]
        for name, entry in _components(index)
        if name.startswith("text_encoder") and entry[0] == "transformers"
    }
    policy = AttentionPolicy(cli=levels[0], config=levels[1], device=str(device), dtype=dtype)
    return choose_encoder_attention(policy, classes)


def check_weights(folder: ModelFolder) -> tuple[str | None, dict[str, str]]:
    """Check that every component has its weights, as complete safetensors. Returns the variant to load, such as `fp16`,
    where a component has no files without one, and by component the formats of weights that are dequantised here.

    Raises ModelLoadError for a component that is missing, and for files that are missing, pickled, cut off, or
    quantised in a way that neither this runtime nor a declared method reads.
    """
    variant: str | None = None
    dequantized: dict[str, str] = {}
    for component, entry in _components(read_index(folder)):
        if not (folder / component).is_dir():
            raise ModelLoadError(f"{shown_path(folder / component)} is missing; {way_to_complete(folder / component)}")
        stem = STEMS.get(entry[0])
        # Schedulers and tokenizers have no config.json.
        if stem is None or not (folder / component / "config.json").is_file():
            continue
        files = find_weight_files(folder / component, stem)
        if formats := stored_formats(files, folder.read_json(component, "config.json")):
            dequantized[component] = formats
            continue
        found = re.match(rf"{stem}\.([A-Za-z]\w*)(?:-\d+-of-\d+)?\.safetensors", files[0].name)
        variant = variant or (found and found[1])
    return variant, dequantized


def load_dequantized(
    folder: ModelFolder, components: Collection[str], dtype: torch.dtype
) -> dict[str, torch.nn.Module]:
    """Load components whose weights are dequantised here. Raises ModelLoadError."""
    entries = dict(_components(read_index(folder)))
    return {name: load_stored(folder, name, entries[name], dtype) for name in components}


def _dequantized_so_far(folder: ModelFolder) -> dict[str, str]:
    """Return what check_weights does; nothing of files that are not here yet. Loading says what is wrong with files."""
    try:
        return check_weights(folder)[1]
    except ModelLoadError:
        return {}


def library_attention(index: Mapping[str, Any], text_attention: EncoderAttention | None) -> list[LibraryAttention]:
    """Return text encoders and autoencoders, to which none of our attention is attached."""
    rows = []
    for name, entry in _components(index):
        if entry[0] not in _LIBRARIES or not name.startswith(("text_encoder", "vae", "image_encoder")):
            continue
        if text_attention is not None and name.startswith("text_encoder") and entry[0] == "transformers":
            row = LibraryAttention(name, entry[0], text_attention.implementation, text_attention.reason)
        elif entry[0] == "transformers":
            row = LibraryAttention(name, entry[0], f"{entry[1]}'s default")
        else:
            row = LibraryAttention(name, entry[0], entry[1])
        rows.append(row)
    return rows


def _left_out(named: PublishedModel, rules: PassthroughRules) -> str:
    """Return a published model's documented request values and presets that its pipeline lacks."""
    values = [
        f"{field} {shown(value)}" + (f" (the pipeline's own: {shown(own)})" if own is not None else "")
        for field, value in named.request.items()
        if (own := rules.defaults.get(field)) != value
    ]
    presets = [name for name in named.presets if name not in rules.presets]
    return ", ".join([*values, *([f"presets {', '.join(presets)}"] if presets else [])])


def _components(index: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """Return (name, [library, class]) of every component; optional ones that a pipeline lacks are left out."""
    pairs = [(name, entry) for name, entry in index.items() if isinstance(entry, list) and len(entry) == 2]
    return [(name, entry) for name, entry in pairs if all(isinstance(part, str) for part in entry)]


def _is_choice(choice: Any) -> bool:
    """Return whether a level chooses anything; `auto` alone is no choice."""
    config = AttentionConfig.parse(choice).of_layers()
    default = [] if config.default is None else [config.default]
    specs = [*default, *config.per_role.values(), *(rule.spec for rule in config.schedule)]
    return any(spec.candidates or spec.options for spec in specs)


def _pipeline_class(folder: ModelFolder, index: Mapping[str, Any]) -> Any:
    """Return the class of diffusers that model_index.json names. Raises ModelLoadError."""
    import diffusers

    where = folder / INDEX_FILE
    name = index.get("_class_name")
    if not isinstance(name, str):
        raise ModelLoadError(
            f"{where}: key '_class_name': expected the name of a diffusers pipeline, got {shown(name)}"
        )
    for component, (library, class_name) in _components(index):
        # A pipeline's own module inside diffusers, such as stable_diffusion for its safety checker.
        if library not in _LIBRARIES and not inspect.ismodule(getattr(diffusers.pipelines, library, None)):
            raise ModelLoadError(
                f"{where}: key {shown(component)}: {shown(library)} is code that comes with the folder; only classes "
                f"of {' and '.join(_LIBRARIES)} are loaded"
            )
        if library == "diffusers" and getattr(diffusers, class_name, None) is None:
            raise ModelLoadError(
                f"{where}: key {shown(component)}: diffusers {diffusers.__version__} has no {shown(class_name)}, "
                "and there is no native model for it either; native models: "
                f"{', '.join(supported_transformer_classes())}"
            )
    found: Any = getattr(diffusers, name, None)
    is_class = inspect.isclass(found)
    if is_modular_class(found) and folder.modular is None:
        raise ModelLoadError(
            f"{where}: key '_class_name': {shown(name)} is a modular pipeline of diffusers, and the folder has no "
            f"{MODULAR_INDEX_FILE}; copy or download the whole folder"
        )
    if is_class and not issubclass(found, diffusers.DiffusionPipeline | diffusers.ModularPipeline):
        raise ModelLoadError(
            f"{where}: key '_class_name': expected the name of a diffusers pipeline, got {shown(name)}, which is "
            "another class of diffusers"
        )
    if not is_class:
        raise ModelLoadError(
            f"{where}: diffusers {diffusers.__version__} has no pipeline {shown(name)}; a newer one may have it: "
            "pip install -U diffusers"
        )
    classes = {component: getattr(diffusers, entry[1], object) for component, entry in _components(index)}
    if not any(denoises(component, kind) for component, kind in classes.items()):
        raise ModelLoadError(
            f"{where}: {name} has no transformer and no UNet among {shown(list(classes))}: there is nothing to run here"
        )
    return found


def _check_can_run(folder: ModelFolder, interface: PipelineInterface) -> None:
    """Check that some request can run the pipeline and that its result is a picture or video. Raises ModelLoadError."""
    reasons = interface.refusals()
    if reasons:
        raise ModelLoadError(
            f"{folder}: {interface.name} cannot run here: {'; '.join(reasons)}. Call it in a script of your own; "
            "diffusion_runtime.attach(pipeline, ...) puts attention backends of ours into it"
        )


def _planned(
    models: Mapping[str, Any],
    choice: AttentionChoice,
    device: torch.device,
    dtype: torch.dtype,
    checker: SelfChecker,
) -> list[AttachedAttention]:
    """Plan our attention in the denoisers among `models`, which have no weights; those that could not be built are
    planned when they are loaded.

    Raises what `attach` raises.
    """
    return [
        plan_attachment(
            model,
            choice.config,
            override=choice.override,
            device=device,
            dtype=dtype,
            component=component,
            checker=checker,
        )
        for component, model in models.items()
        if component.startswith(_DENOISERS)
    ]
