"""`bench`: how fast this machine is. `bench attention`: every usable backend at the shapes of real models."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar

import typer

from diffusion_runtime.cli import options
from diffusion_runtime.cli.consoles import console_on_stdout
from diffusion_runtime.cli.flag_syntax import CheckedCommand
from diffusion_runtime.cli.interruptible import run_interruptibly
from diffusion_runtime.cli.options import OUTPUT, option
from diffusion_runtime.cli.tables import plain_table
from diffusion_runtime.cli.terminal import Terminal, json_text, put_on_stdout

if TYPE_CHECKING:
    from diffusion_runtime.benchmark.attention import Effort
    from diffusion_runtime.benchmark.measurement import AttentionBenchmark, Measurement
    from diffusion_runtime.core.hardware import Hardware


class BenchResult(Protocol):
    """A result that JSON can hold."""

    @property
    def exit_code(self) -> int: ...

    def to_dict(self) -> dict[str, Any]: ...


_Result = TypeVar("_Result", bound=BenchResult)

HELP = "Measure how fast this machine is."
EPILOG = """[bold]Examples[/]

diffusion-runtime bench attention

diffusion-runtime bench attention --shapes flux-1024,wan-1.3b-480p

diffusion-runtime bench attention --backends fa,torch_sdpa --json

diffusion-runtime bench attention --output-path r.json --plot r.png
"""
WHAT, HOW = "What to measure", "How it is computed"

bench = typer.Typer(help=HELP, rich_markup_mode="rich", context_settings={"help_option_names": ["-h", "--help"]})


@bench.callback()
def _bench() -> None:
    """Measure how fast this machine is."""


def model_parameter(text: str) -> inspect.Parameter:
    """Return the argument MODEL of a verb. text: its help."""
    annotation = Annotated[str, typer.Argument(metavar="MODEL", help=text)]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Parameter("model", kind, default="shapes", annotation=annotation)


@dataclass(frozen=True)
class SizeFlags:
    """The size of what is made."""

    height: Annotated[int | None, option(WHAT, "Pixels. Default: the model's.", "--height", metavar="N", min=1)] = None
    width: Annotated[int | None, option(WHAT, "Pixels. Default: the model's.", "--width", metavar="N", min=1)] = None
    num_frames: Annotated[
        int | None, option(WHAT, "Frames. Default: the model's.", "--num-frames", metavar="N", min=1)
    ] = None


@dataclass(frozen=True)
class RunFlags:
    """Flags of every benchmark: the device, the files that are written, and the report."""

    import_files: options.ImportFiles = None
    device: Annotated[str | None, options.runtime_flag("device")] = None
    dtype: Annotated[str | None, options.runtime_flag("dtype")] = None
    output_path: Annotated[
        Path | None, option(OUTPUT, "Write the results as JSON.", "--output-path", "-o", metavar="FILE.json")
    ] = None
    plot: Annotated[
        Path | None,
        option(
            OUTPUT, "Plot the results. Needs: pip install 'diffusion-runtime\\[plot]'", "--plot", metavar="FILE.png"
        ),
    ] = None
    as_json: options.Json = False
    quiet: options.Quiet = False
    log_format: options.LogFormat = None


@dataclass(frozen=True)
class AttentionBenchFlags:
    """Flags of `bench attention`: the backends, the shapes, and how long."""

    backends: Annotated[
        str | None,
        option(
            WHAT,
            "Backends, sparse ones too: fa,torch_sdpa. Default: usable dense ones; those left out are listed.",
            "--backends",
            metavar="NAMES",
        ),
    ] = None
    shapes: Annotated[
        str | None,
        option(WHAT, "Names of shapes, small or all. Default: all, on a CPU small.", "--shapes", metavar="NAMES"),
    ] = None
    repeats: Annotated[
        int | None,
        option(WHAT, "Samples per backend and shape. Default: 11, on a CPU 5.", "--repeats", metavar="N", min=1),
    ] = None
    time_limit: Annotated[
        float,
        typer.Option(
            "--time-limit",
            help="Seconds after which no further shape begins.",
            metavar="SECONDS",
            min=0,
            rich_help_panel=WHAT,
        ),
    ] = 300.0


def attention(**given: Any) -> None:
    """Attention backends side by side at the shapes of real models.

    Milliseconds, TF/s, share of a matrix product's rate, error against float64.
    Exit code 1 when a backend is wrong or fails.
    """
    flags, run = options.taken(AttentionBenchFlags, given), options.taken(RunFlags, given)

    def draw(result: AttentionBenchmark, path: Path) -> None:
        from diffusion_runtime.benchmark.plot import plot_benchmark

        plot_benchmark(result, path)

    report(run, lambda terminal, on_progress: _measure(flags, run, terminal, on_progress), draw, show)


options.set_parameters(attention, [*options.parameters_of(AttentionBenchFlags), *options.parameters_of(RunFlags)])
bench.command("attention", cls=CheckedCommand, epilog=EPILOG)(attention)


def report(
    run: RunFlags,
    measure: Callable[[Terminal, Callable[[str], None]], _Result],
    draw: Callable[[_Result, Path], None],
    show: Callable[[_Result], None],
) -> None:
    """Measure, write the files that were asked for, and put the result on standard output. Raises the parser's Exit.

    measure: called with what to call with what is under way. draw: writes the picture. show: prints the tables.
    """
    terminal = Terminal(quiet=run.quiet, log_format=run.log_format)
    with terminal.log():
        from diffusion_runtime.benchmark.plot import check_plotting

        if run.plot is not None:
            check_plotting(run.plot)
        for path in (run.output_path, run.plot):
            _check_result_place(path)
        with _progress_line(terminal) as on_progress:
            result = measure(terminal, on_progress)
        _write_results(result, run, draw, terminal)
    if run.as_json:
        put_on_stdout(json_text(result.to_dict()))
    else:
        show(result)
    raise typer.Exit(result.exit_code)


def _effort(hardware: Hardware, flags: AttentionBenchFlags) -> Effort:
    from diffusion_runtime.benchmark.attention import Effort

    on_cpu = hardware.platform == "cpu"
    return Effort(
        num_rounds=flags.repeats or (5 if on_cpu else 11),
        deadline=time.monotonic() + flags.time_limit,
        matmul_size=1024 if on_cpu else 8192,
    )


def _measure(
    flags: AttentionBenchFlags, run: RunFlags, terminal: Terminal, on_progress: Callable[[str], None]
) -> AttentionBenchmark:
    """Raises ConfigError for unknown names, BackendUnavailableError for a backend that cannot run here at all."""
    from diffusion_runtime.attention.config import AttentionSpec
    from diffusion_runtime.benchmark.attention import benchmark_attention, check_backends, default_backends
    from diffusion_runtime.benchmark.shapes import find_shapes
    from diffusion_runtime.core.hardware import detect_hardware, resolve_device, resolve_dtype
    from diffusion_runtime.explanation.estimate import estimate_text

    device = resolve_device(run.device or "auto")
    hardware = detect_hardware(str(device))
    effort = _effort(hardware, flags)
    wanted = () if flags.shapes is None else [name.strip().lower() for name in flags.shapes.split(",") if name.strip()]
    chosen = find_shapes(wanted, small_by_default=hardware.platform == "cpu")
    names = () if flags.backends is None else AttentionSpec(flags.backends).candidates
    left_out: tuple[tuple[str, str], ...] = ()
    if names:
        check_backends(names, hardware)
    else:
        names, left_out = default_backends(hardware)
    torch_dtype = resolve_dtype(run.dtype or "auto", device)

    def measure() -> AttentionBenchmark:
        return benchmark_attention(
            chosen, names, device, torch_dtype, effort, left_out=left_out, on_progress=on_progress
        )

    if device.type != "cpu":
        return measure()
    # Two calls of each to check it, then the samples.
    num_calls = len(names) * (2 + effort.num_rounds)
    operations = num_calls * sum(shape.num_operations for shape in chosen)
    what = f"shapes: {len(chosen)}, backends: {len(names)}, calls of each shape: {num_calls}"
    terminal.say(f"{what}; {estimate_text(operations, torch_dtype)}")
    return run_interruptibly(measure)


def _check_result_place(path: Path | None) -> None:
    """Raises OutputError before minutes of measuring when the file could not be written after them."""
    from diffusion_runtime.session.outputs import prepare_result

    if path is not None:
        prepare_result(path, "--output-path or --plot")


def _write_results(result: _Result, run: RunFlags, draw: Callable[[_Result, Path], None], terminal: Terminal) -> None:
    """Write the JSON and the picture that were asked for. Raises OutputError."""
    from diffusion_runtime.media.publish import publish_text

    if run.output_path is not None:
        publish_text(run.output_path, json_text(result.to_dict()) + "\n", "--output-path")
        terminal.say(f"wrote {run.output_path}")
    if run.plot is not None:
        draw(result, run.plot)
        terminal.say(f"wrote {run.plot}")


@contextmanager
def _progress_line(terminal: Terminal) -> Iterator[Callable[[str], None]]:
    """Yield a function that redraws one line of a terminal, or writes separate lines anywhere else."""
    from rich.text import Text

    if not terminal.is_live:
        yield terminal.say
        return
    with terminal.console.status("") as status:
        yield lambda text: status.update(Text(text))


def show(result: AttentionBenchmark) -> None:
    """Print a table a shape: the fastest first, what did not run below."""
    from rich.text import Text

    console = console_on_stdout()
    console.print(Text(f"{result.device}, {result.dtype}"))
    columns = ("backend", "ms", "from to", "TF/s", "of matmul", "error", "computed by")
    for shape in result.shapes:
        rows = [_cells(row) for row in result.of_shape(shape)]
        console.print(plain_table(columns, rows, f"\n{shape.name}: {shape.describe()}"))
        rates = {row.matmul_tflops for row in result.of_shape(shape) if row.matmul_tflops is not None}
        for rate in rates:
            console.print(Text(f"a matrix product of {result.matmul_size}^3 beside it: {rate:.4g} TF/s"))
    if result.left_out:
        console.print(Text(f"\nNot timed: {', '.join(name for name, _ in result.left_out)}; --json has the reasons."))


def _cells(row: Measurement) -> tuple[str, ...]:
    error = "-" if row.error is None else f"{row.error:.1e}"
    if row.milliseconds is None:
        return row.backend, "-", "-", "-", "-", error, f"{row.state}: {row.reason}"
    share = "-" if row.share_of_matmul is None else f"{row.share_of_matmul:.2f}"
    spread = f"{min(row.samples):.3g} {max(row.samples):.3g}"
    return row.backend, f"{row.milliseconds:.4g}", spread, f"{row.tflops:.3g}", share, error, row.implementation
