"""Builds parts of a diffusers pipeline, and the pipeline itself, on the meta device from their configs: no weight is
read.

Some facts need an instance: which attention layers a model has, and which sizes the pipeline's own checks refuse. Parts
that cannot be built this way are checked when the weights are loaded.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from diffusion_runtime.core.empty_modules import empty_modules
from diffusion_runtime.core.model_folder import ModelFolder
from diffusion_runtime.errors import BackendUnavailableError, ModelLoadError, shown

# Settings of schedulers that give the length of their tables, and the longest that is made; published ones have 1000.
_TABLE_LENGTHS = ("num_train_timesteps", "solver_order")
_MAX_TABLE_LENGTH = 100_000

_logger = logging.getLogger("diffusion_runtime.diffusers_bridge")


def meta_model(folder: ModelFolder, component: str, entry: Any) -> Any:
    """Build a model of diffusers on the meta device, from its config alone; None when it cannot be built there.

    entry: of model_index.json, [library, class name]. Raises ModelLoadError for a config that cannot be read.
    """
    model_class = _class_of(entry, "ModelMixin")
    config = folder / component / "config.json"
    if model_class is None or not config.is_file():
        return None
    try:
        with empty_modules(), _quiet_diffusers():
            return model_class.from_config(folder.read_json(component, "config.json"))
    except (BackendUnavailableError, ModelLoadError):
        raise
    except (
        Exception
    ) as error:  # any exception: classes read values of tensors in their constructors, which the meta device refuses
        _logger.debug("%s: %s cannot be made without weights: %s", folder, entry[1], error)
        return None


def meta_pipeline(
    pipeline_class: Any, folder: ModelFolder, index: Mapping[str, Any], models: Mapping[str, Any]
) -> Any | None:
    """Build a pipeline with its class from `models` and the scheduler, with None for every other component; None where
    the class needs those, or a model is missing: classes would use default factors in its place.

    index: model_index.json. models: on the meta device, by component.
    """
    arguments: dict[str, Any] = {}
    for name, parameter in inspect.signature(pipeline_class.__init__).parameters.items():
        if name == "self" or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        entry = index.get(name)
        if name in models:
            arguments[name] = models[name]
        elif isinstance(entry, list):
            if _class_of(entry, "ModelMixin") is not None:
                return None
            arguments[name] = _scheduler(folder, name, entry)
        elif entry is not None or parameter.default is inspect.Parameter.empty:
            arguments[name] = entry
    try:
        with _quiet_diffusers():
            return pipeline_class(**arguments)
    except (
        Exception
    ) as error:  # any exception: a class may fail in any way with a tokenizer or text encoder that is None
        _logger.debug("%s: %s cannot be made without weights: %s", folder, pipeline_class.__name__, error)
        return None


def _scheduler(folder: ModelFolder, component: str, entry: list[Any]) -> Any | None:
    """Build a scheduler from its config; None for every other kind of component, and for one that cannot be built."""
    kind = _class_of(entry, "SchedulerMixin")
    config = folder / component / "scheduler_config.json"
    if kind is None or not config.is_file():
        return None
    values = folder.read_json(component, "scheduler_config.json")
    for key, value in values.items():
        if key in _TABLE_LENGTHS and not (isinstance(value, int) and 0 < value <= _MAX_TABLE_LENGTH):
            raise ModelLoadError(
                f"{config}: key {key!r}: expected a whole number from 1 to {_MAX_TABLE_LENGTH}, got {shown(value)}"
            )
    try:
        with _quiet_diffusers():
            return kind.from_config(values)
    except Exception as error:  # loading reports what is wrong with it
        _logger.debug("%s: %s", config, error)
        return None


def _class_of(entry: Any, base: str) -> Any | None:
    """Return the class of diffusers that an entry of model_index.json names; None where it is not one of `base`."""
    import diffusers

    if not isinstance(entry, list) or len(entry) != 2 or entry[0] != "diffusers":
        return None
    found: Any = getattr(diffusers, str(entry[1]), None)
    return found if inspect.isclass(found) and issubclass(found, getattr(diffusers, base)) else None


@contextlib.contextmanager
def _quiet_diffusers() -> Iterator[None]:
    """Context manager: silence diffusers' warnings about configs, which are shown when the weights are loaded."""
    from diffusers.utils import logging as diffusers_logging

    before = diffusers_logging.get_verbosity()
    diffusers_logging.set_verbosity_error()
    try:
        yield
    finally:
        diffusers_logging.set_verbosity(before)
