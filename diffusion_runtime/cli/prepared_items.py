"""The model of a command, opened once, and its items, each with its request checked against the model."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from diffusion_runtime.cli.settings import Settings
from diffusion_runtime.cli.terminal import Terminal
from diffusion_runtime.errors import ConfigError, DiffusionRuntimeError
from diffusion_runtime.session.batch import Item
from diffusion_runtime.session.failures import Failure
from diffusion_runtime.session.outputs import Outputs

if TYPE_CHECKING:
    from diffusion_runtime.config import RuntimeConfig
    from diffusion_runtime.generation.interface import GenerationRules
    from diffusion_runtime.loading import Prepared
    from diffusion_runtime.loading.description import PipelineDescription
    from diffusion_runtime.parallel.world import World
    from diffusion_runtime.rules.request_rules import RequestRules


def prepare_items(
    settings: Settings,
    outputs: Outputs,
    world: World | None = None,
    *,
    is_dry_run: bool = False,
    plan_for: str | None = None,
) -> tuple[Prepared, list[Item]]:
    """The model, opened once, and every item, its request checked against the model. plan_for: as of prepare."""
    from diffusion_runtime.loading import prepare

    prepared = prepare(
        _as_recorded(settings),
        world,
        is_guided=lambda rules: are_guided(rules, settings),
        is_dry_run=is_dry_run,
        plan_for=plan_for,
    )
    if settings.begins:
        return prepared, _continued(prepared, settings, outputs)
    return prepared, resolve_all(prepared.rules, settings, outputs)


def _as_recorded(settings: Settings) -> RuntimeConfig:
    """Return the runtime with the dtype `auto` where the repeated recipe has that and it leads to the same one here, so
    that recipes of equal runs are equal."""
    from diffusion_runtime.core.hardware import resolve_device, resolve_dtype

    runtime, recorded = settings.runtime, (settings.repeated.get("runtime") or {}).get("dtype")
    if recorded != "auto" or runtime.dtype == "auto":
        return runtime
    # A device that is not here, or a dtype that it does not take, is refused where they are used.
    with contextlib.suppress(DiffusionRuntimeError):
        here = resolve_dtype("auto", resolve_device(runtime.device))
        if str(here).removeprefix("torch.") == runtime.dtype:
            return dataclasses.replace(runtime, dtype="auto")
    return runtime


def _continued(prepared: Prepared, settings: Settings, outputs: Outputs) -> list[Item]:
    """Return the items that go on from files of latents, which are checked against them.

    Raises ConfigError for a pipeline of diffusers', and for other values than those of the steps before.
    """
    from diffusion_runtime.generation.input_files import input_digests
    from diffusion_runtime.generation.saved_latents import read_latents
    from diffusion_runtime.session.finishing import continued_recipe, continued_request

    native = prepared.inspectable
    if native is None:
        raise ConfigError("finish: the model runs as a pipeline of diffusers' own, which begins with the first step")
    saved = [read_latents(path) for path in settings.begins]
    requests = [
        continued_request(each, request, native.rules) for each, request in zip(saved, settings.requests, strict=True)
    ]
    items = resolve_all(native.rules, dataclasses.replace(settings, requests=tuple(requests)), outputs)
    found = []
    for item, begin in zip(items, saved, strict=True):
        item = dataclasses.replace(item, begin=begin, allow_changes=settings.allow_changes)
        try:
            if item.failure is None:
                begin.check(native.rules.settings(item.request))
                recipe = {"request": item.request.recorded(), "inputs": input_digests(item.request)}
                recipe = {**prepared.description.to_dict(), **recipe}
                continued_recipe(begin, recipe, allow_changes=settings.allow_changes)
        except DiffusionRuntimeError as error:
            if len(items) == 1:
                raise
            item = dataclasses.replace(item, failure=Failure.of(error))
        found.append(item)
    return found


def are_guided(rules: RequestRules, settings: Settings) -> bool:
    """Return whether all requests that can be made run two branches of guidance, which processes could share then."""
    resolved = []
    for request in settings.requests:
        # Errors are reported with the items.
        with contextlib.suppress(DiffusionRuntimeError):
            resolved.append(rules.resolve(request, settings.preset_for(rules.presets)))
    return all(rules.is_guided(request) for request in resolved)


def import_libraries() -> float:
    """Import what loads models, torch among it; returns the seconds that took."""
    started = time.perf_counter()
    from diffusion_runtime.loading import prepare

    del prepare
    return time.perf_counter() - started


def warn_of_changed_files(
    settings: Settings, items: Sequence[Item], description: PipelineDescription, terminal: Terminal
) -> None:
    """Say which of the model, its weight files and the images of the recipe of --from are no longer what they were."""
    from diffusion_runtime.generation.input_files import changed_inputs
    from diffusion_runtime.models.weight_fingerprint import changed_weights

    requests = [item.request for item in items if item.failure is None]
    described = description.to_dict()
    now = described["model"]
    then = settings.repeated.get("model") or {}
    changed = [*changed_weights(settings.repeated, described), *changed_inputs(settings.repeated, requests)]
    if then.get("path") == now["path"]:
        commits = (then.get("commit"), now.get("commit"))
        if None not in commits and commits[0] != commits[1]:
            terminal.warn(
                f"{now['path']} is at commit {commits[1]}, the file of --from was made with {commits[0]}: the result "
                f"may differ. `--revision {commits[0]}` repeats it"
            )
        elif then.get("config_sha256") not in (None, now["config_sha256"]):
            changed.insert(0, now["path"])
    for path in changed:
        terminal.warn(f"{path} has changed since the file of --from was made; the result will differ")


def resolve_all(rules: GenerationRules, settings: Settings, outputs: Outputs) -> list[Item]:
    """Every request with the model's values filled in; one that cannot be is an item with its failure.

    Raises the first error when it is every item's.
    """
    preset = settings.preset_for(rules.presets)
    items: list[Item] = []
    errors: list[DiffusionRuntimeError] = []
    for request in settings.requests:
        try:
            resolved = rules.resolve(request, preset)
            outputs.format_for(resolved, has_sound=rules.makes_sound)
            items.append(Item(resolved))
        except DiffusionRuntimeError as error:
            errors.append(error)
            items.append(Item(request, Failure.of(error)))
    if len(errors) == len(items):
        raise errors[0]
    return items
