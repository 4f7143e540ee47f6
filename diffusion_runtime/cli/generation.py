"""What `generate` does once its flags are read: settle, load, make every item, say what ran."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from diffusion_runtime.cli.batch import BatchResult, Item, run_batch
from diffusion_runtime.cli.dry_run import show_plan
from diffusion_runtime.cli.failures import Failure
from diffusion_runtime.cli.outputs import Outputs, remove_empty
from diffusion_runtime.cli.settings import Flags, Settings, settle
from diffusion_runtime.cli.tables import attention_table, remarks_of, seconds_text
from diffusion_runtime.cli.terminal import Terminal, json_text, put_on_stdout
from diffusion_runtime.errors import DiffusionRuntimeError

if TYPE_CHECKING:
    from diffusion_runtime.loading import PipelineDescription
    from diffusion_runtime.pipeline import RequestRules

SCHEMA = "diffusion_runtime.generate/1"


@dataclass(frozen=True)
class OutputFlags:
    """The flags of `generate` that say where results go and what is said."""

    output_path: str | None = None
    file_format: str | None = None
    as_json: bool = False
    dry_run: bool = False


def run_generate(flags: Flags, output_flags: OutputFlags, terminal: Terminal) -> int:
    """The verb: returns its exit code. Raises DiffusionRuntimeError for whatever stops it before the first item."""
    started = time.perf_counter()
    settings = settle(flags)
    outputs = Outputs.parse(output_flags.output_path, output_flags.file_format)
    for request in settings.requests:
        if request.num_frames is not None:
            outputs.format_for(request)
    for note in settings.notes:
        terminal.warn(note)
    if output_flags.dry_run:
        from diffusion_runtime.loading import inspect_pipeline

        outputs.check_without_writing()
        description = inspect_pipeline(settings.runtime)
        items = resolve_all(description.rules, settings, outputs)
        return show_plan(description, items, outputs, terminal, as_json=output_flags.as_json)
    made = outputs.prepare()
    try:
        return _generate(settings, outputs, terminal, as_json=output_flags.as_json, started=started)
    finally:
        remove_empty(made)


def _generate(settings: Settings, outputs: Outputs, terminal: Terminal, *, as_json: bool, started: float) -> int:
    from diffusion_runtime.memory.allocator import tune_cpu_allocator

    tune_cpu_allocator()
    load_started = time.perf_counter()
    terminal.say(f"loading {settings.runtime.model_path}")
    from diffusion_runtime.loading import inspect_pipeline, load_pipeline

    # The requests are checked against the model before its weights are read, which may take minutes.
    description = inspect_pipeline(settings.runtime)
    items = resolve_all(description.rules, settings, outputs)
    _warn_of_another_model(settings, description, terminal)
    pipeline = load_pipeline(settings.runtime, on_stage=lambda stage: terminal.say(f"  {stage}"))
    load_seconds = time.perf_counter() - load_started
    result = run_batch(
        items,
        lambda request, on_progress: pipeline(request, on_progress=on_progress),
        outputs,
        terminal,
        None if as_json else (lambda path: put_on_stdout(str(path))),
    )
    timings = {"load": load_seconds, **sum_timings(result), "total": time.perf_counter() - started}
    _say_end(result, timings, terminal)
    if as_json:
        put_on_stdout(json_text(to_json_object(result, timings)))
    return result.exit_code


def _warn_of_another_model(settings: Settings, description: PipelineDescription, terminal: Terminal) -> None:
    now = description.to_dict()["model"]
    then = settings.repeated_model
    if then.get("path") == now["path"] and then.get("config_sha256") not in (None, now["config_sha256"]):
        terminal.warn(f"{now['path']} has changed since the file of --from was made; the result will differ")


def resolve_all(rules: RequestRules, settings: Settings, outputs: Outputs) -> list[Item]:
    """Every request with the model's values filled in; one that cannot be is an item with its failure.

    Raises the first error when it is every item's.
    """
    preset = settings.preset_for(rules.presets)
    items: list[Item] = []
    errors: list[DiffusionRuntimeError] = []
    for request in settings.requests:
        try:
            resolved = rules.resolve(request, preset)
            outputs.format_for(resolved)
            items.append(Item(resolved))
        except DiffusionRuntimeError as error:
            errors.append(error)
            items.append(Item(request, Failure.of(error)))
    if len(errors) == len(items):
        raise errors[0]
    return items


def sum_timings(result: BatchResult) -> dict[str, float]:
    """Seconds by stage over all finished items."""
    sums: dict[str, float] = {}
    for outcome in result.finished:
        for name, seconds in outcome.timings.items():
            sums[name] = sums.get(name, 0.0) + seconds
    return sums


def to_json_object(result: BatchResult, timings: dict[str, float]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "items": [outcome.to_dict() for outcome in result.outcomes],
        "num_items": result.num_items,
        "interrupted": result.interrupted,
        "timings": {name: round(seconds, 4) for name, seconds in timings.items()},
        "exit_code": result.exit_code,
    }


def _say_end(result: BatchResult, timings: dict[str, float], terminal: Terminal) -> None:
    reports = [outcome.attention_report for outcome in result.finished]
    if reports:
        terminal.show(attention_table(reports))
        for remark in remarks_of(reports):
            terminal.say(remark)
    if result.interrupted:
        terminal.error(f"interrupted: {len(result.finished)} of {result.num_items} finished{_listed(result)}")
    elif result.failures and result.num_items > 1:
        lines = [
            f"  {outcome.request.prompt!r}, seed {outcome.request.seed}: {outcome.failure.message}"
            for outcome in result.outcomes
            if outcome.failure is not None
        ]
        terminal.error("\n".join([f"{len(lines)} of {result.num_items} failed:", *lines]))
    if result.finished:
        count = f"{len(result.finished)} file{'s' if len(result.finished) > 1 else ''}"
        terminal.say(f"{count}: {seconds_text(timings)}")


def _listed(result: BatchResult) -> str:
    return "".join(f"\n  {outcome.path}" for outcome in result.finished)
