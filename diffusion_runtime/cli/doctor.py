"""`doctor`: diagnosis of this machine (torch, driver, packages, disk, model, backends), with a fix per problem."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diffusion_runtime.cli import options
from diffusion_runtime.cli.backends import SHORT_DTYPES
from diffusion_runtime.cli.consoles import console_on_stdout
from diffusion_runtime.cli.tables import facts_table, plain_table
from diffusion_runtime.cli.terminal import Terminal, json_text, put_on_stdout
from diffusion_runtime.session.outputs import DEFAULT_FOLDER
from diffusion_runtime.untrusted.printable import printable

if TYPE_CHECKING:
    from rich.console import Console

    from diffusion_runtime.attention.self_test import SelfTestResult
    from diffusion_runtime.diagnosis.examination import Diagnosis
    from diffusion_runtime.diagnosis.packages import PackageCheck
    from diffusion_runtime.diagnosis.problems import LeftOut

# Without a terminal: seconds between two lines of one stage.
_QUIET_SECONDS = 10
SCHEMA = "diffusion_runtime.doctor/1"
EPILOG = """[bold]Examples[/]

diffusion-runtime doctor

diffusion-runtime doctor --full

diffusion-runtime doctor --attention-backend fa,torch_sdpa

diffusion-runtime doctor --device cuda:1 --json
"""


def doctor(
    attention_backend: Annotated[
        str | None,
        typer.Option(
            "--attention-backend",
            help="Backends that must work here: fa,torch_sdpa. Without it: every one that is usable.",
            metavar="NAMES",
            show_default=False,
            rich_help_panel=options.ATTENTION,
        ),
    ] = None,
    full: Annotated[
        bool,
        typer.Option(
            "--full",
            help="Every check, also those that compile kernels: minutes. Without it: what fits in 20 s, and what did "
            "not is said. Backends that are asked for are tested in full.",
            rich_help_panel=options.ATTENTION,
        ),
    ] = False,
    import_files: options.ImportFiles = None,  # noqa: ARG001 - run by the parser
    device: Annotated[str | None, options.runtime_flag("device")] = None,
    as_json: options.Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.", rich_help_panel=options.OUTPUT)] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Every single test.", rich_help_panel=options.OUTPUT)
    ] = False,
    log_format: options.LogFormat = None,
) -> None:
    """Check this machine: torch, driver, packages, disk, model, backends.

    Each backend computes small inputs and is compared with float64.
    Exit code 1 when a backend that was asked for, or any test, fails.
    """
    # Importing torch is part of what one waits for: 7 s on a machine that has just started.
    started = time.monotonic()
    terminal = Terminal(quiet=quiet, verbose=verbose, log_format=log_format)
    with terminal.log():
        from diffusion_runtime.attention.config import AttentionSpec
        from diffusion_runtime.diagnosis.examination import examine
        from diffusion_runtime.diagnosis.problems import USUAL_SECONDS, TimeBudget

        asked = () if attention_backend is None else AttentionSpec(attention_backend).candidates
        with _progress(terminal) as on_progress:
            budget = TimeBudget(None if full else USUAL_SECONDS, started=started)
            diagnosis = examine(device or "auto", asked, Path(DEFAULT_FOLDER), on_progress, budget)
    if as_json:
        put_on_stdout(json_text({"schema": SCHEMA, **diagnosis.to_dict()}))
    else:
        _show(diagnosis, verbose=verbose)
    raise typer.Exit(diagnosis.exit_code)


@contextmanager
def _progress(terminal: Terminal) -> Iterator[Callable[[str, str], None]]:
    """One line that is redrawn on a terminal; anywhere else a line per stage, and more while one takes long."""
    from rich.text import Text

    if terminal.is_live:
        with terminal.console.status("") as status:
            yield lambda stage, detail: status.update(Text(f"{stage} {detail}"))
        return
    reported: set[str] = set()
    last = 0.0

    def report(stage: str, detail: str) -> None:
        nonlocal last
        if stage not in reported:
            terminal.say(stage)
        elif time.monotonic() - last > _QUIET_SECONDS:
            terminal.say(f"  {detail}")
        else:
            return
        reported.add(stage)
        last = time.monotonic()

    yield report


def _show(diagnosis: Diagnosis, *, verbose: bool) -> None:

    console = console_on_stdout()
    console.print(facts_table(_machine_facts(diagnosis), "Machine"))
    installed = [check for check in diagnosis.packages if check.version is not None]
    rows = [(check.name, check.version, _package_state(check)) for check in installed]
    console.print(plain_table(("package", "version", "state"), rows, "\nPackages"))
    absent = [check.name for check in diagnosis.packages if check.version is None]
    console.print(f"Not installed: {', '.join(absent) or 'nothing'}.")
    if diagnosis.self_tests:
        _show_self_tests(console, diagnosis.self_tests, verbose=verbose)
    _show_problems(console, diagnosis)
    if diagnosis.left_out:
        _show_left_out(console, diagnosis.left_out)


def _package_state(check: PackageCheck) -> str:
    return f"BROKEN: {check.error}" if check.error else check.detail or check.state


def _machine_facts(diagnosis: Diagnosis) -> list[tuple[str, object]]:
    machine, model = diagnosis.machine, diagnosis.model
    memory = "" if machine.memory is None else f", {_gib(machine.memory)} memory"
    driver = "none found"
    if machine.driver is not None:
        driver = f"{machine.driver.version or 'unknown version'}, serves CUDA up to {_dotted(machine.driver.cuda)}"
    facts: list[tuple[str, object]] = [
        ("python", f"{machine.python}  {machine.executable}"),
        ("system", f"{machine.system}, {machine.num_cpus} CPUs{memory}"),
        ("torch", f"{machine.torch_version}, built for {machine.torch_build}"),
        ("NVIDIA driver", driver),
    ]
    for index, gpu in enumerate(machine.gpus):
        chip = f"sm_{gpu.capability[0]}{gpu.capability[1]}" if machine.cuda_build else _dotted(gpu.capability)
        memory = f"{_gib(gpu.free_memory)} of {_gib(gpu.total_memory)} free"
        facts.append((f"GPU {index}", f"{gpu.name}, {chip}, {memory}"))
    if not machine.gpus:
        facts.append(("GPU", "none that torch can use; the CPU runs everything, slowly"))
    hardware = diagnosis.hardware
    tested = "cannot be used" if hardware is None else f"{diagnosis.device} ({hardware.describe()})"
    facts += [
        ("device", tested),
        ("outputs", f"{diagnosis.disk.folder}, {_gib(diagnosis.disk.free)} free"),
        ("embedded model", f"whole, {model.num_parameters:,} parameters" if model.state == "whole" else model.state),
    ]
    return facts


def _show_self_tests(console: Console, results: Sequence[SelfTestResult], *, verbose: bool) -> None:
    title = "\nSelf-tests: the error against float64, and what it may be"
    if verbose:
        rows: list[Sequence[object]] = [
            (result.test.backend, *_error_cells(result), _verdict(result)) for result in results
        ]
        console.print(plain_table(("backend", "error", "bound", "test"), rows, title))
        return
    columns = ("backend", "dtype", "passed", "error", "bound", "computed by")
    console.print(plain_table(columns, [_summary_row(group) for group in _groups(results)], title))


def _groups(results: Sequence[SelfTestResult]) -> list[list[SelfTestResult]]:
    """The results of one backend and dtype together."""
    groups: dict[tuple[str, str], list[SelfTestResult]] = {}
    for result in results:
        groups.setdefault((result.test.backend, result.test.dtype), []).append(result)
    return list(groups.values())


def _summary_row(group: Sequence[SelfTestResult]) -> Sequence[object]:
    """One line for a group: how many passed, and the error that comes nearest to its bound or is furthest above it."""
    worst = max(group, key=lambda result: float("inf") if result.error is None else result.error / result.bound)
    passed = sum(result.passed for result in group)
    names = dict.fromkeys(result.implementation for result in group if result.implementation)
    return (
        worst.test.backend,
        SHORT_DTYPES[worst.test.dtype],
        f"{passed}/{len(group)}" + ("" if passed == len(group) else " FAILED"),
        *_error_cells(worst),
        ", ".join(names),
    )


def _error_cells(result: SelfTestResult) -> tuple[str, str]:
    return "-" if result.error is None else f"{result.error:.0e}", f"{result.bound:.0e}"


def _verdict(result: SelfTestResult) -> str:
    if result.passed:
        return f"{result.test.title} ({result.implementation})"
    return f"FAILED {result.test.title}: {result.problem}"


def _show_problems(console: Console, diagnosis: Diagnosis) -> None:
    from rich.text import Text

    if not diagnosis.problems:
        console.print(Text("\nNo problems found" + (" in what was looked at." if diagnosis.left_out else ".")))
        return
    console.print(Text("\nProblems", style="bold"))
    for number, problem in enumerate(diagnosis.problems, 1):
        console.print(Text(printable(f"{number}. {problem.what}"), style="red" if problem.is_failure else "yellow"))
        # In one piece, so that it can be copied.
        console.print(Text(printable(f"   fix: {problem.fix}")), soft_wrap=True)


def _show_left_out(console: Console, left_out: Sequence[LeftOut]) -> None:
    from rich.text import Text

    console.print(Text("\nLeft out", style="bold"))
    whats_by_why: dict[str, list[str]] = {}
    for each in left_out:
        whats_by_why.setdefault(each.why, []).append(each.what)
    for why, whats in whats_by_why.items():
        console.print(Text(printable(f"{', '.join(whats)}: {why}")))
    console.print(Text("All of it, in minutes: diffusion-runtime doctor --full"), soft_wrap=True)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
