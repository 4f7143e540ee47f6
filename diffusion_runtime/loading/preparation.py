"""prepare, load_pipeline and inspect_pipeline: the only place where parts are chosen and put together."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Unpack

from diffusion_runtime.config import RuntimeConfig, runtime_options
from diffusion_runtime.core.hardware import resolve_device
from diffusion_runtime.core.model_folder import ModelFolder, read_index
from diffusion_runtime.core.planned_device import NAMED_CARDS, PlannedDevice, any_card, named_device
from diffusion_runtime.decoders.diffusers_import import check_diffusers_import
from diffusion_runtime.errors import MAX_SHOWN_CHARACTERS, ConfigError
from diffusion_runtime.generation.interface import GenerationPipeline
from diffusion_runtime.kernels.implementation import fusion_is_on
from diffusion_runtime.loading.description import PipelineDescription
from diffusion_runtime.loading.interface import OnStage, Prepared
from diffusion_runtime.loading.load_options import LoadOptions
from diffusion_runtime.loading.native_preparation import prepare_native
from diffusion_runtime.models.found_files import is_all_in_files, with_found_files
from diffusion_runtime.models.lora_sources import located
from diffusion_runtime.models.model_sources import ConfigFolder, find_configs, resolve_model_folder
from diffusion_runtime.models.modular_folder import open_folder
from diffusion_runtime.models.part_files import named_components
from diffusion_runtime.models.published import model_of_name
from diffusion_runtime.models.registry import is_supported
from diffusion_runtime.parallel.world import World
from diffusion_runtime.rules.request_rules import RequestRules

_logger = logging.getLogger("diffusion_runtime.diffusers_bridge")
# Of RuntimeConfig: load_pipeline has the model as its first argument, and starts no processes.
NOT_KEYWORDS = ("model_path", "parallel")


def load_pipeline(
    model: str | RuntimeConfig = "emoji",
    *,
    on_stage: OnStage | None = None,
    world: World | None = None,
    **options: Unpack[LoadOptions],
) -> GenerationPipeline:
    """Load a model: `emoji` (embedded), a diffusers folder or a hub id; or all that a RuntimeConfig says.

    backend: `native` is our own transformer, `diffusers` diffusers' own pipeline behind the same call; `auto` takes the
    native one where there is one.

    attention: the config level, in any form AttentionConfig.parse takes; attention_override: the same one level higher,
    as the command line does. lora: files to merge into the transformer, as paths or (path, scale) pairs. The other
    options: see RuntimeConfig.
    on_stage: called with a phrase before each part is loaded, and with its bytes, rate and time left, from a thread of
    its own, where that takes long. world: the processes that run the model together, each of which must load it alike.

    Raises, before any weight is read, BackendUnavailableError for an attention choice that cannot run here and
    ConfigError for a value that is wrong; InstallationError where an installed package keeps diffusers, which this
    model needs, from being imported; then ModelLoadError for a folder that cannot be used and DeviceMemoryError when it
    does not fit.
    """
    started = time.perf_counter()
    prepared = prepare(_runtime_config(model, options), world)
    prepare_seconds = time.perf_counter() - started
    pipeline = prepared.load(on_stage)
    pipeline.note_load({"prepare": prepare_seconds})
    return pipeline


def _with_options(shown: inspect.Signature) -> inspect.Signature:
    """Return the signature of load_pipeline with every option by name, for help() and documentation; type checkers and
    editors read LoadOptions."""
    model, *others = (each for each in shown.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD)
    options = [
        inspect.Parameter(item.name, inspect.Parameter.KEYWORD_ONLY, default=item.default, annotation=item.type)
        for item in dataclasses.fields(RuntimeConfig)
        if item.name not in NOT_KEYWORDS
    ]
    return shown.replace(parameters=[model, *options, *others])


load_pipeline.__signature__ = _with_options(inspect.signature(load_pipeline))  # type: ignore[attr-defined]


def inspect_pipeline(config: RuntimeConfig, *, plan_for: str | None = None) -> PipelineDescription:
    """Dry run of `load_pipeline`, from json alone: no weight is read or downloaded, and no self-check is run. A
    published model needs no network: what the hub's cache lacks of its json, the package knows. plan_for: a GPU that is
    not here, such as `h100`.

    Raises what `load_pipeline` raises before it reads weights.
    """
    return prepare(config, is_dry_run=True, plan_for=plan_for).description


def prepare(
    config: RuntimeConfig,
    world: World | None = None,
    *,
    is_guided: Callable[[RequestRules], bool] | None = None,
    is_dry_run: bool = False,
    plan_for: str | None = None,
) -> Prepared:
    """Open a model and decide its attention, from the folder's json alone: no weight of the model is read or
    downloaded, and no self-check is made; LoRA files are read. `load` of the result reads the weights.

    world: the processes that run the model together, each of which must prepare and load it alike. is_guided: whether
    every request that will come runs two branches of guidance, asked where processes could share them; None: the
    model's own defaults decide. is_dry_run: nothing will be loaded, so of a published model the json in this package
    will do (`find_configs`). plan_for: a device of NAMED_CARDS that is not here, for a dry run; a dry run with
    `device: cuda` and a memory limit needs no card, too.

    Raises what `load_pipeline` raises before it reads weights, self-checks aside.
    """
    # Checks the environment's variable, which the first call of a kernel would read otherwise.
    fusion_is_on()
    if world is not None:
        config = dataclasses.replace(config, parallel=config.parallel.with_world(world.size))
    config = with_workflow_of_name(with_found_files(config))
    found = (
        find_configs(config.model_path, revision=config.revision, offline=config.offline, workflow=config.workflow)
        if is_dry_run or is_all_in_files(config)
        # Which variants there are is only seen once they are here.
        else ConfigFolder(
            resolve_model_folder(
                config.model_path,
                weights=config.variant is not None,
                elsewhere=named_components(config),
                revision=config.revision,
                offline=config.offline,
                variant=config.variant,
            )
        )
    )
    loras = located(config.lora, offline=config.offline, is_dry_run=is_dry_run)
    config = dataclasses.replace(config, lora=loras)
    folder = ModelFolder(found.path, found.downloads_gb, is_packaged=found.is_packaged)
    folder = open_folder(folder, backend=config.backend, offline=config.offline, workflow=config.workflow)
    planned_on = _planned_device(config, plan_for) if is_dry_run else None
    if _is_passthrough(config.backend, folder):
        if planned_on is not None:
            raise ConfigError(
                "plan_for: diffusers' own pipeline runs this model, and is planned for this machine's devices alone"
            )
        # Imported here: its graph breaks import torch's compiler, 1.5 s that a native model does not wait for.
        check_diffusers_import()
        from diffusion_runtime.loading.passthrough import prepare_passthrough

        return prepare_passthrough(config, folder)
    return prepare_native(config, folder, world, is_guided, planned_on)


def with_workflow_of_name(config: RuntimeConfig) -> RuntimeConfig:
    """Return a config with the workflow of the published model that it names. Raises ConfigError for another one."""
    named = model_of_name(config.model_path)
    if named is None or named.workflow == config.workflow or (named.workflow is None and config.workflow is not None):
        return config
    if config.workflow is not None:
        raise ConfigError(
            f"workflow: {config.workflow}: {config.model_path} is the model of {named.workflow}; leave out --workflow"
        )
    return dataclasses.replace(config, workflow=named.workflow)


def _planned_device(config: RuntimeConfig, plan_for: str | None) -> PlannedDevice | None:
    """The device that a dry run plans for where it is not this machine's. Raises ConfigError for a device beside
    `plan_for`, and for a GPU that is not here and of which nothing is known."""
    if plan_for is not None:
        if config.device not in ("auto", "cuda"):
            raise ConfigError(f"plan_for: {plan_for}: and device: {config.device} beside it; leave one of them out")
        return named_device(plan_for)
    try:
        resolve_device(config.device)
        return None
    except ConfigError as error:
        if config.device != "cuda":
            raise
        if config.memory_limit is None:
            raise ConfigError(
                f"{error}. A card that is not here is planned for by --plan-for {' or '.join(NAMED_CARDS)}, or by "
                "--device cuda --memory-limit 24GB"
            ) from error
    return any_card()


def _runtime_config(model: str | RuntimeConfig, options: Mapping[str, Any]) -> RuntimeConfig:
    declared = runtime_options()
    for name in options:
        if name not in declared or name in NOT_KEYWORDS:
            raise TypeError(f"load_pipeline() got an unexpected keyword argument {name!r}")
    if not isinstance(model, RuntimeConfig):
        return RuntimeConfig(model_path=model, **options)
    given = [name for name, value in options.items() if value != declared[name].default]
    if given:
        raise ConfigError(
            f"load_pipeline: {', '.join(given)}: put it into the RuntimeConfig, or give a model path instead"
        )
    return model


def _is_passthrough(backend: str, folder: ModelFolder) -> bool:
    """Return whether diffusers' own pipeline runs a folder. backend: of RuntimeConfig; with `auto` the choice is
    logged.

    Raises ModelLoadError when there is no model_index.json, or one that cannot be read.
    """
    if folder.modular is not None:
        return str(read_index(folder).get("_class_name")) == folder.modular.class_name
    if backend != "auto":
        return backend == "diffusers"
    index = read_index(folder)
    # A folder without either is broken, which our own loading reports better.
    entry = index.get("transformer") or index.get("unet")
    if not isinstance(entry, list) or len(entry) != 2 or entry[0] != "diffusers" or is_supported(str(entry[1])):
        return False
    model, pipeline = (str(name)[:MAX_SHOWN_CHARACTERS] for name in (entry[1], index.get("_class_name")))
    _logger.info("%s: no native model for %s; diffusers' own %s runs it", folder, model, pipeline)
    return True
