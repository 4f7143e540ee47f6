"""`generate` once its flags are parsed: resolve settings, prepare and load the model, run the batch, report."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffusion_runtime.cli.attention_plot_flag import check_plot_place, counting_density, write_plot
from diffusion_runtime.cli.dry_run import show_plan
from diffusion_runtime.cli.launching import CommandLine, launch_processes
from diffusion_runtime.cli.options import OutputFlags
from diffusion_runtime.cli.prepared_items import import_libraries, prepare_items, warn_of_changed_files
from diffusion_runtime.cli.profile_flag import check_profile_place, profiled
from diffusion_runtime.cli.report_remarks import remarks_of
from diffusion_runtime.cli.settings import Flags, Settings, resolve_settings
from diffusion_runtime.cli.stream import STANDARD_OUTPUT, for_stream, run_stream
from diffusion_runtime.cli.tables import attention_table, plain_table
from diffusion_runtime.cli.terminal import Terminal, json_text, put_on_stdout, put_path_on_stdout
from diffusion_runtime.core.hardware import device_of_process
from diffusion_runtime.core.memory_size import size_text
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.media.content_credentials import signer_of
from diffusion_runtime.session.batch import BatchResult, Done, Item, Outcome, run_batch
from diffusion_runtime.session.coordinator import Coordinator, SingleProcessCoordinator
from diffusion_runtime.session.failures import INTERRUPTED
from diffusion_runtime.session.interruptions import interruptions
from diffusion_runtime.session.latents_files import LatentsFiles
from diffusion_runtime.session.outputs import Outputs, remove_empty
from diffusion_runtime.session.reporter import seconds_text
from diffusion_runtime.session.resume import find_finished

if TYPE_CHECKING:
    from diffusion_runtime.generation.interface import GenerationPipeline
    from diffusion_runtime.loading import Prepared
    from diffusion_runtime.loading.description import PipelineDescription
    from diffusion_runtime.request.generation_request import GenerationRequest

SCHEMA = "diffusion_runtime.generate/1"
# Of shorter times a share says nothing, in seconds.
_LEAST_COMPARED = 0.05
# Timings that `load` is the sum of: of the libraries, from the folder to the memory plan, of the weights.
_PARTS_OF_LOAD = ("import", "prepare", "read")


def run_generate(
    flags: Flags,
    output_flags: OutputFlags,
    terminal: Terminal,
    command_line: CommandLine,
    coordinator: Coordinator | None = None,
) -> int:
    """The verb: returns its exit code. Raises DiffusionRuntimeError for whatever stops it before the first item.

    command_line: what it is to run again where several processes are asked for. coordinator: the processes that run it
    already, each of which calls this.
    """
    started = time.perf_counter()
    coordinator = SingleProcessCoordinator() if coordinator is None else coordinator
    settings = resolve_settings(flags)
    if coordinator.world is not None:
        settings = settings.on_processes(coordinator.world.size)
    if output_flags.stream is not None or output_flags.interactive:
        output_flags = for_stream(output_flags, settings)
    signer = signer_of(output_flags.sign, output_flags.cert)
    outputs = Outputs.parse(output_flags.output_path, output_flags.file_format, signer)
    for request in settings.requests:
        if request.num_frames is not None:
            outputs.format_for(request)
    for note in settings.notes:
        terminal.warn(note)
    check_profile_place(output_flags.profile, dry_run=output_flags.dry_run)
    check_plot_place(output_flags.attention_plot, outputs.file, dry_run=output_flags.dry_run)
    if output_flags.plan_for is not None and not output_flags.dry_run:
        raise ConfigError(
            f"plan_for: {output_flags.plan_for}: no weights are loaded for a GPU that is not here; add --dry-run"
        )
    if output_flags.dry_run:
        outputs.check_without_writing()
        prepared, items = prepare_items(settings, outputs, is_dry_run=True, plan_for=output_flags.plan_for)
        _check_saving(output_flags, prepared)
        warn_of_changed_files(settings, items, prepared.description, terminal)
        requests = [item.request for item in items if item.failure is None]
        prepared = prepared.for_these_alone(requests)
        prepared.check_files()
        prepared = prepared.planned_for(requests)
        return show_plan(prepared.description, items, outputs, terminal, as_json=output_flags.as_json)
    writes_files = output_flags.stream != STANDARD_OUTPUT
    new_folders = outputs.prepare() if coordinator.is_first and writes_files else ()
    try:
        if coordinator.world is None and settings.runtime.parallel.num_processes > 1:
            return _launch(settings, outputs, output_flags, terminal, command_line)
        if output_flags.stream is not None:
            return run_stream(settings, outputs, output_flags, terminal, coordinator, started)
        return _generate(settings, outputs, output_flags, terminal, coordinator, started)
    finally:
        remove_empty(new_folders)


def _launch(
    settings: Settings, outputs: Outputs, output_flags: OutputFlags, terminal: Terminal, command_line: CommandLine
) -> int:
    """Run the command in several processes, and check what can be checked once while they import what they need."""
    num_processes = settings.runtime.parallel.num_processes
    # What they cannot run on is known before any is started.
    on_cpu = device_of_process(settings.runtime.device, 0, num_processes) == "cpu"

    def check() -> None:
        # Rank 0 logs it again.
        with Terminal(quiet=True, log_format=terminal.log_format).log():
            prepared, items = prepare_items(settings, outputs)
        if output_flags.resume:
            requests = [item.request for item in items if item.failure is None]
            find_finished(requests, outputs, prepared.planned_to_load(requests).description.to_dict())

    schema = SCHEMA if output_flags.as_json else None
    return launch_processes(command_line, num_processes, outputs, terminal, schema, on_cpu=on_cpu, check=check)


def _generate(
    settings: Settings,
    outputs: Outputs,
    output_flags: OutputFlags,
    terminal: Terminal,
    coordinator: Coordinator,
    started: float,
) -> int:
    from diffusion_runtime.memory.cpu_memory import tune_cpu_allocator

    tune_cpu_allocator()
    load_started = time.perf_counter()
    import_seconds = import_libraries()
    terminal.say(f"loading {settings.runtime.model_path}")
    # The requests are checked against the model before its weights are read, which may take minutes.
    prepared, items = prepare_items(settings, outputs, coordinator.world)
    _check_saving(output_flags, prepared)
    description = prepared.description
    warn_of_changed_files(settings, items, description, terminal)
    if description.degrees.num_processes > 1:
        degrees = description.degrees
        terminal.say(f"{degrees.num_processes} processes: {degrees} ({degrees.reason})")
    done: tuple[Done, ...] = ()
    if output_flags.resume:
        # With what the plan of all requests decides about the output.
        prepared = prepared.planned_to_load([item.request for item in items if item.failure is None])
        items, done = _skip_finished(items, outputs, prepared.description, coordinator)
        for each in done:
            terminal.say(f"done already: {each.path}")
        if output_flags.save_latents:
            _say_missing_latents(done, terminal)
        if not items:
            return _end(BatchResult((), 0, done=done), {}, output_flags, terminal, coordinator)
    requests = [item.request for item in items if item.failure is None]
    prepared = prepared.for_these_alone(requests)
    prepare_seconds = time.perf_counter() - load_started - import_seconds
    pipeline = prepared.load(lambda stage: terminal.say(f"  {stage}"), requests)
    pipeline.note_load({"import": import_seconds, "prepare": prepare_seconds})
    parts = {name: pipeline.load_timings[name] for name in _PARTS_OF_LOAD}
    load_seconds = time.perf_counter() - load_started
    items = _with_expected_times(items, pipeline, outputs)
    prints_paths = coordinator.is_first and not output_flags.as_json
    on_file = put_path_on_stdout if prints_paths else None
    latents = LatentsFiles(is_asked=output_flags.save_latents, is_first=coordinator.is_first)
    with (
        pipeline.hooks.holding("keep", latents.keep),
        counting_density(output_flags.attention_plot, pipeline),
        profiled(output_flags.profile, pipeline, on_file, len(items), coordinator, terminal) as (make, finish),
    ):
        result = run_batch(items, make, outputs, terminal, finish, coordinator, latents)
    if coordinator.is_first:
        write_plot(output_flags.attention_plot, result, terminal)
    if result.finished and (files := _files_of(pipeline.recipe)):
        terminal.show(plain_table(("part", "size", "file"), files, "Weights from files"))
    result = dataclasses.replace(result, done=done)
    timings = {**parts, "load": load_seconds, **sum_timings(result), "total": time.perf_counter() - started}
    try:
        return _end(result, timings, output_flags, terminal, coordinator)
    except KeyboardInterrupt:
        return _end(dataclasses.replace(result, interrupted=True), timings, output_flags, terminal, coordinator)


def _check_saving(output_flags: OutputFlags, prepared: Prepared) -> None:
    """Raises ConfigError for --save-latents with a pipeline that hands over none."""
    if output_flags.save_latents and prepared.inspectable is None:
        raise ConfigError(
            "--save-latents: this pipeline is diffusers' own, which keeps its latents to itself; leave it out"
        )


def _with_expected_times(items: list[Item], pipeline: GenerationPipeline, outputs: Outputs) -> list[Item]:
    """Return the items with the seconds that this machine's figures say; the first one warms the process up."""
    from diffusion_runtime.explanation.expected_time import expected_time
    from diffusion_runtime.explanation.stage_times import is_offloaded

    found, is_first = [], True
    for item in items:
        if item.failure is None:
            expected = expected_time(
                pipeline.recipe,
                pipeline.rules,
                item.request,
                outputs.format_for(item.request),
                is_first=is_first,
                is_offloaded=is_offloaded(pipeline),
                num_done=0 if item.begin is None else item.begin.num_steps_done,
            )
            item, is_first = dataclasses.replace(item, expected=expected.seconds), False
        found.append(item)
    return found


def _files_of(recipe: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the part, size and path of every file of weights that a recipe names."""
    sizes, runtime = recipe.get("weight_bytes", {}), recipe.get("runtime", {})
    return [(key.removesuffix("_path"), size_text(size), str(runtime.get(key))) for key, size in sizes.items()]


def _end(
    result: BatchResult,
    timings: dict[str, float],
    output_flags: OutputFlags,
    terminal: Terminal,
    coordinator: Coordinator,
) -> int:
    _report_end(result, timings, terminal)
    if not result.interrupted:
        # A run reports one JSON object: the results, once no rank can fail any more, or an error.
        coordinator.agree(None)
    if output_flags.as_json and coordinator.is_first:
        text = json_text(to_json_object(result, timings))
        if coordinator.world is None:
            # An interruption within the object, or by its reader, must not report a second one.
            interruptions.all_is_reported(INTERRUPTED)
            put_on_stdout(text)
        else:
            from diffusion_runtime.media.publish import uninterrupted

            # Too late for an interruption: everything is made, and this reports it.
            with contextlib.suppress(KeyboardInterrupt), uninterrupted():
                put_on_stdout(text)
    if coordinator.world is None:
        interruptions.all_is_reported(result.exit_code)
    return result.exit_code


def _say_missing_latents(done: Sequence[Done], terminal: Terminal) -> None:
    """Say which finished files have no latents beside them: those of steps that ran, which do not run again."""
    from diffusion_runtime.generation.saved_latents import latents_path

    lacking = [each.path for each in done if not latents_path(each.path).exists()]
    if lacking:
        first, others = shlex.quote(str(lacking[0])), f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        terminal.warn(
            f"--save-latents: {first}{others} is done and has none beside it, and none are made of a file that is "
            f"done; `diffusion-runtime generate --from {first} --save-latents -o FOLDER/` makes both"
        )


def _skip_finished(
    items: list[Item], outputs: Outputs, description: PipelineDescription, coordinator: Coordinator
) -> tuple[list[Item], tuple[Done, ...]]:
    """The items that are still to be made, and those that an earlier run made. Rank 0 looks."""
    requests = [item.request for item in items if item.failure is None]

    def look() -> str:
        found = find_finished(requests, outputs, description.to_dict())
        return json.dumps([None if path is None else str(path) for path in found])

    found: Iterator[str | None] = iter(json.loads(coordinator.from_first(look)))
    waiting: list[Item] = []
    done: list[Done] = []
    for item in items:
        path = None if item.failure is not None else next(found)
        if path is None:
            waiting.append(item)
        else:
            done.append(Done(item.request, Path(path)))
    return waiting, tuple(done)


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
        "items": [*(done.to_dict() for done in result.done), *(outcome.to_dict() for outcome in result.outcomes)],
        "num_items": result.num_items + len(result.done),
        "interrupted": result.interrupted,
        "timings": {name: round(seconds, 4) for name, seconds in timings.items()},
        "exit_code": result.exit_code,
    }


def _failed_lines(result: BatchResult) -> list[str]:
    """One for each cause for which items of several failed, but for what has just been reported: what ended the batch,
    and the one cause of all of them."""
    outcomes = result.outcomes[: -1 if result.disk_is_full else None]
    failed: dict[str, list[GenerationRequest]] = {}
    for outcome in outcomes if result.num_items > 1 else ():
        if outcome.failure is not None:
            failed.setdefault(outcome.failure.message, []).append(outcome.request)
    if len(failed) == 1 and not result.finished:
        return []
    lines = []
    for message, requests in failed.items():
        others = f" and {len(requests) - 1} more" if len(requests) > 1 else ""
        lines.append(f"  {requests[0].prompt!r}, seed {requests[0].seed}{others}: {message}")
    return lines


def _report_end(result: BatchResult, timings: dict[str, float], terminal: Terminal) -> None:
    reports = [outcome.attention_report for outcome in result.finished]
    if reports:
        terminal.show(attention_table(reports))
        for remark in remarks_of(reports):
            terminal.say(remark, wraps=True)
    if result.interrupted:
        with interruptions.reporting():
            terminal.error(
                f"interrupted: {len(result.finished)} of {result.num_items} finished{_finished_paths(result)}"
            )
    elif lines := _failed_lines(result):
        num_failed = len(result.failures) - result.disk_is_full
        terminal.error("\n".join([f"{num_failed} of {result.num_items} failed:", *lines]))
    if result.finished:
        count = f"{len(result.finished)} file{'s' if len(result.finished) > 1 else ''}"
        whole = {name: seconds for name, seconds in timings.items() if name not in _PARTS_OF_LOAD}
        peak = result.finished[-1].peak_memory
        if peak:
            places = ", ".join(f"{place} {size_text(peak[place])}" for place in sorted(peak))
            terminal.say(f"peak memory: {places}", wraps=True)
        parts = {name: timings[name] for name in _PARTS_OF_LOAD if name in timings}
        text = seconds_text(whole)
        if parts and "load" in whole:
            load = seconds_text({"load": whole["load"]})
            text = text.replace(load, f"{load} ({seconds_text(parts)})", 1)
        terminal.say(f"{count}: {text}", wraps=True)
        if compared := compared_text(result.finished):
            terminal.say(f"expected from figures of this machine: {compared}", wraps=True)


def compared_text(finished: Sequence[Outcome]) -> str:
    """`denoise 1.10 s (took 1.13 s, +3 %)`, for the stages that something was known of for every file."""
    texts = []
    for name in finished[0].expected:
        if all(name in each.expected and name in each.timings for each in finished):
            expected, took = (
                sum(values[name] for values in both)
                for both in zip(*((each.expected, each.timings) for each in finished), strict=True)
            )
            share = f", {took / expected - 1:+.0%}" if expected >= _LEAST_COMPARED else ""
            texts.append(f"{name} {expected:.2f} s (took {took:.2f} s{share})")
    return ", ".join(texts)


def _finished_paths(result: BatchResult) -> str:
    return "".join(f"\n  {outcome.path}" for outcome in result.finished)
