"""A setting of a comparison, and what settings must have in common: model, prompts, seeds, sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diffusion_runtime.attention.backends.registry import find_backend
from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.core.options import build_options
from diffusion_runtime.core.runtime_options import WHAT
from diffusion_runtime.errors import (
    BackendUnavailableError,
    ConfigError,
    DiffusionRuntimeError,
    RequestError,
    UsageError,
    shown,
)
from diffusion_runtime.loading import Prepared, prepare
from diffusion_runtime.loading.description import PipelineDescription
from diffusion_runtime.request.generation_request import REQUEST_FIELDS, GenerationRequest
from diffusion_runtime.session.failures import Failure

# Request fields in which settings may not differ: other prompts, seeds or sizes make other clips.
SHARED_FIELDS = (
    *(name for name, declared in REQUEST_FIELDS.items() if declared.panel == WHAT),
    *("height", "width", "num_frames", "fps"),
)


@dataclass(frozen=True)
class Setting:
    """One setting, as it was asked for. requests: one per prompt and seed, not resolved; preset: of the model."""

    name: str
    runtime: RuntimeConfig
    requests: tuple[GenerationRequest, ...]
    preset: str | None = None


@dataclass(frozen=True)
class OpenedSetting:
    """A setting whose model was opened; no weight is read. requests: resolved; empty with a failure. same_as: the name
    of an earlier setting that resolves to the same thing."""

    setting: Setting
    prepared: Prepared | None
    requests: tuple[GenerationRequest, ...] = ()
    failure: Failure | None = None
    same_as: str | None = None

    @property
    def name(self) -> str:
        return self.setting.name


def open_settings(settings: Sequence[Setting]) -> list[OpenedSetting]:
    """Open every setting and check it against the first one, the reference.

    Raises ConfigError and RequestError, with the setting's name, for values that are wrong and for another model,
    other prompts, seeds or sizes than the reference's; whatever keeps the reference from running. What keeps another
    setting from running here, such as a backend that is missing, is its failure.
    """
    _check_models(settings)
    opened: list[OpenedSetting] = []
    keys: list[tuple[str, Any]] = []
    for setting in settings:
        try:
            prepared = prepare(setting.runtime)
            requests = tuple(prepared.rules.resolve(request, setting.preset) for request in setting.requests)
        except DiffusionRuntimeError as error:
            if isinstance(error, UsageError) or setting is settings[0]:
                raise named_error(setting.name, error) from error
            opened.append(OpenedSetting(setting, None, failure=Failure.of(error)))
            continue
        if opened:
            _check_requests(setting.name, requests, opened[0].requests)
        key = what_runs(prepared.description, requests)
        same_as = next((name for name, known in keys if known == key), None)
        keys.append((setting.name, key))
        opened.append(OpenedSetting(setting, prepared, requests, same_as=same_as))
    return opened


def named_error(name: str, error: DiffusionRuntimeError) -> DiffusionRuntimeError:
    """Return the same error with the setting's name."""
    message = f"--setting {name}: {error}"
    if isinstance(error, BackendUnavailableError):
        return BackendUnavailableError(message, error.reasons)
    try:
        return type(error)(message)
    except TypeError:
        return DiffusionRuntimeError(message)


def _check_models(settings: Sequence[Setting]) -> None:
    reference = settings[0].runtime.model_path
    for setting in settings:
        if setting.runtime.model_path != reference:
            raise ConfigError(
                f"--setting {setting.name}: model_path: expected {shown(reference)}, as the first setting has, got "
                f"{shown(setting.runtime.model_path)}; settings are compared on one model: give "
                "--model-path to compare, not in a setting"
            )
        if setting.runtime.parallel.num_processes > 1:
            raise ConfigError(
                f"--setting {setting.name}: compare runs one process, and {setting.runtime.parallel.num_processes} are "
                "asked for; leave out --num-gpus and degrees"
            )


def _check_requests(name: str, requests: Sequence[GenerationRequest], reference: Sequence[GenerationRequest]) -> None:
    if len(requests) != len(reference):
        raise RequestError(
            f"--setting {name}: expected the {len(reference)} generations (prompts and seeds) of the first setting, "
            f"got {len(requests)}; give prompts and seeds to compare, not in a setting"
        )
    for mine, its in zip(requests, reference, strict=True):
        for field in SHARED_FIELDS:
            if getattr(mine, field) != getattr(its, field):
                raise RequestError(
                    f"--setting {name}: {field}: expected {shown(getattr(its, field))}, as the first setting has, got "
                    f"{shown(getattr(mine, field))}; prompts, seeds and sizes are the same in all settings: give them "
                    "to compare, not in a setting"
                )


def what_runs(description: PipelineDescription, requests: Sequence[GenerationRequest]) -> Any:
    """Equal for two settings that resolve to the same thing, however they were written: who decided is left out."""
    values = description.to_dict()
    runtime = {**values["runtime"], "device": description.device, "dtype": description.dtype, "self_check": None}
    if description.attention:
        # What the choices led to stands in the decisions.
        runtime |= {"attention": None, "attention_override": None}
    attention = [
        (planned["role"], planned["when"], planned["layers"], _backend_of(planned)) for planned in values["attention"]
    ]
    return runtime, attention, tuple(requests)


def _backend_of(decision: Mapping[str, Any]) -> Any:
    """Backend, all options with their defaults, and the same of dense calls."""
    backend = find_backend(decision["backend"])
    options: Any = decision["options"]
    if backend is not None:
        built = build_options(backend.options_type, options, "options")
        options = (
            dataclasses.asdict(built) if dataclasses.is_dataclass(built) and not isinstance(built, type) else options
        )
    dense = decision.get("dense")
    return decision["backend"], options, None if dense is None else _backend_of(dense)
