"""Reads a model folder's scheduler/scheduler_config.json: which sampler it selects, with which settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diffusion_runtime.core.model_folder import AnyFolder, read_json_in
from diffusion_runtime.errors import ModelLoadError, shown
from diffusion_runtime.request.samplers import SAMPLERS
from diffusion_runtime.untrusted.known_settings import is_positive

# Class name in the folder -> the sampler behind it.
SAMPLER_OF_CLASS = {
    class_name: name
    for name, sampler in SAMPLERS.items()
    for class_name in (sampler.scheduler_class, *sampler.also_classes)
    if class_name is not None
}
# Sampler -> what its class calls the flow shift.
SHIFT_KEY = {name: sampler.shift_key for name, sampler in SAMPLERS.items() if sampler.shift_key is not None}
# How the shift follows the size: a shift for the size at hand is given to the sampler instead.
_SHIFT_BY_SIZE = (
    "use_dynamic_shifting",
    "base_shift",
    "max_shift",
    "base_image_seq_len",
    "max_image_seq_len",
    "time_shift_type",
)
# Defaults of the diffusers classes where a file leaves these out.
_CLASS_DEFAULTS: dict[str, Any] = {
    "use_dynamic_shifting": False,
    "stochastic_sampling": False,
    "prediction_type": "epsilon",
    "use_flow_sigmas": False,
}
# Lengths of arrays that the classes allocate: a damaged number would take all memory of the machine.
_LENGTHS = {"num_train_timesteps": 100_000, "solver_order": 100}
# Published models have up to 17; beyond this, float32 makes neighbouring noise levels of many steps equal.
_MOST_SHIFT = 1000


@dataclass(frozen=True)
class SchedulerConfig:
    """class_name: the diffusers class; values: its settings; path: the file they come from."""

    class_name: str
    values: Mapping[str, Any] = field(default_factory=dict)
    path: Path = Path("scheduler/scheduler_config.json")

    @property
    def sampler(self) -> str | None:
        """The name of our sampler for this scheduler class, None for a class without one."""
        return SAMPLER_OF_CLASS.get(self.class_name)

    @property
    def defaults(self) -> dict[str, Any]:
        """The request fields that this file sets: `sampler` and `flow_shift`; none for a class that is not ours."""
        sampler = self.sampler
        if sampler is None:
            return {}
        if self.shifts_by_size:
            return {"sampler": sampler}
        # Both classes use a shift of 1 where the file sets none.
        return {"sampler": sampler, "flow_shift": float(self.values.get(SHIFT_KEY[sampler], 1.0))}

    @property
    def shifts_by_size(self) -> bool:
        """True if the flow shift depends on the size of the clip; the model's FlowSchedule then computes it."""
        return bool(self.values.get("use_dynamic_shifting", False))

    def options_for(self, sampler: str) -> dict[str, Any]:
        """Return the settings `sampler` takes from this file: all for its own class, else the training timesteps
        alone."""
        if sampler == self.sampler:
            left_out = {SHIFT_KEY[sampler], *_SHIFT_BY_SIZE}
            return {key: value for key, value in self.values.items() if key not in left_out}
        return {key: self.values[key] for key in ("num_train_timesteps",) if key in self.values}

    def unknown_class_error(self) -> ModelLoadError:
        known = " and ".join(f"{name} (sampler {sampler})" for name, sampler in SAMPLER_OF_CLASS.items())
        return ModelLoadError(
            f"{self.path}: the scheduler class {shown(self.class_name)} is not supported; supported are {known}. "
            "Choose one with the request's `sampler`"
        )


def read_scheduler_config(folder: AnyFolder) -> SchedulerConfig:
    """Read the scheduler settings of a model folder.

    Raises ModelLoadError when the file is missing, is no JSON mapping, names no class, or describes something other
    than a flow-matching model (every sampler here integrates a velocity).
    """
    path = folder / "scheduler" / "scheduler_config.json"
    values = read_json_in(folder, "scheduler", "scheduler_config.json")
    if not isinstance(values.get("_class_name"), str):
        raise ModelLoadError(f"{path}: expected a JSON mapping with `_class_name`")
    plain = {key: value for key, value in values.items() if not key.startswith("_")}
    config = SchedulerConfig(values["_class_name"], plain, path)
    _check_is_flow_matching(config)
    return config


def _check_is_flow_matching(config: SchedulerConfig) -> None:
    sampler = config.sampler
    for key, wanted in (SAMPLERS[sampler].required if sampler is not None else {}).items():
        actual = config.values.get(key, _CLASS_DEFAULTS[key])
        if actual != wanted:
            raise ModelLoadError(
                f"{config.path}: {key}: expected {wanted!r}, got {shown(actual)}; this is not supported"
            )
    for key in SHIFT_KEY.values():
        value = config.values.get(key, 1)
        if not is_positive(value) or value > _MOST_SHIFT:
            raise ModelLoadError(
                f"{config.path}: {key}: expected a number above 0, up to {_MOST_SHIFT}, got {shown(value)}"
            )
    for key, most in _LENGTHS.items():
        value = config.values.get(key, 1)
        if type(value) is not int or not 1 <= value <= most:
            raise ModelLoadError(f"{config.path}: {key}: expected a whole number from 1 to {most}, got {shown(value)}")
