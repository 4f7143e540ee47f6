"""`bench`: how fast this machine is. `bench attention`: every usable backend at the shapes of real models."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from diffusion_runtime.cli import options
from diffusion_runtime.cli.consoles import console_on_stdout
from diffusion_runtime.cli.flag_syntax import CheckedCommand
from diffusion_runtime.cli.interruptible import run_interruptibly
from diffusion_runtime.cli.tables import plain_table
from diffusion_runtime.cli.terminal import Terminal, json_text, put_on_stdout

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from diffusion_runtime.benchmark.attention import Effort
    from diffusion_runtime.benchmark.measurement import AttentionBenchmark, Measurement
    from diffusion_runtime.core.hardware import Hardware


class HasDict(Protocol):
    """A result that JSON can hold."""

    def to_dict(self) -> dict[str, Any]: ...


HELP = "Measure how fast this machine is."
EPILOG = """[bold]Examples[/]

diffusion-runtime bench attention

diffusion-runtime bench attention --shapes flux-1024,wan-1.3b-480p

diffusion-runtime bench attention --backends fa,torch_sdpa --json

diffusion-runtime bench attention --output-path r.json --plot r.png
"""
_WHAT = "What to measure"

bench = typer.Typer(help=HELP, rich_markup_mode="rich", context_settings={"help_option_names": ["-h", "--help"]})


@bench.callback()
def _bench() -> None:
    """Measure how fast this machine is."""


@bench.command("attention", cls=CheckedCommand, epilog=EPILOG)
def attention(
    backends: Annotated[
        str | None,
        typer.Option(
            "--backends",
            help="Backends, sparse ones too: fa,torch_sdpa. Default: usable dense ones; those left out are listed.",
            metavar="NAMES",
            show_default=False,
            rich_help_panel=_WHAT,
        ),
    ] = None,
    shapes: Annotated[
        str | None,
        typer.Option(
            "--shapes",
            help="Names of shapes, small or all. Default: all, on a CPU small.",
            metavar="NAMES",
            show_default=False,
            rich_help_panel=_WHAT,
        ),
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(
            "--repeats",
            help="Samples per backend and shape. Default: 11, on a CPU 5.",
            metavar="N",
            min=1,
            show_default=False,
            rich_help_panel=_WHAT,
        ),
    ] = None,
    time_limit: Annotated[
        float,
        typer.Option(
            "--time-limit",
            help="Seconds after which no further shape begins.",
            metavar="SECONDS",
            min=0,
            rich_help_panel=_WHAT,
        ),
    ] = 300.0,
    import_files: options.ImportFiles = None,  # noqa: ARG001 - run by the parser
    device: options.Device = None,
    dtype: options.Dtype = None,
    output_path: Annotated[
        Path | None,
        typer.Option(
            "--output-path",
            "-o",
            help="Write the results as JSON.",
            metavar="FILE.json",
            show_default=False,
            rich_help_panel=options.OUTPUT,
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            help="Plot the results. Needs: pip install 'diffusion-runtime\\[plot]'",
            metavar="FILE.png",
            show_default=False,
            rich_help_panel=options.OUTPUT,
        ),
    ] = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    log_format: options.LogFormat = None,
) -> None:
    """Attention backends side by side at the shapes of real models.

    Milliseconds, TF/s, share of a matrix product's rate, error against float64.
    Exit code 1 when a backend is wrong or fails.
    """
    terminal = Terminal(quiet=quiet, log_format=log_format)
    with terminal.log():
        from diffusion_runtime.benchmark.plot import check_plotting, plot_benchmark
        from diffusion_runtime.core.hardware import detect_hardware, resolve_device

        if plot is not None:
            check_plotting(plot)
        for path in (output_path, plot):
            check_result_place(path)
        torch_device = resolve_device(device or "auto")
        hardware = detect_hardware(str(torch_device))
        with progress_line(terminal) as on_progress:
            result = _measure(
                hardware,
                torch_device,
                dtype or "auto",
                backends,
                shapes,
                _effort(hardware, repeats, time_limit),
                on_progress,
                terminal.say,
            )
        write_results(result, output_path, plot, lambda path: plot_benchmark(result, path), terminal)
    if as_json:
        put_on_stdout(json_text(result.to_dict()))
    else:
        show(result)
    raise typer.Exit(result.exit_code)


def _effort(hardware: Hardware, repeats: int | None, time_limit: float) -> Effort:
    from diffusion_runtime.benchmark.attention import Effort

    on_cpu = hardware.platform == "cpu"
    return Effort(
        num_rounds=repeats or (5 if on_cpu else 11),
        deadline=time.monotonic() + time_limit,
        matmul_size=1024 if on_cpu else 8192,
    )


def _measure(
    hardware: Hardware,
    device: torch.device,
    dtype: str,
    backends: str | None,
    shapes: str | None,
    effort: Effort,
    on_progress: Callable[[str], None],
    say: Callable[[str], None],
) -> AttentionBenchmark:
    """Raises ConfigError for unknown names, BackendUnavailableError for a backend that cannot run here at all."""
    from diffusion_runtime.attention.config import AttentionSpec
    from diffusion_runtime.benchmark.attention import benchmark_attention, check_backends, default_backends
    from diffusion_runtime.benchmark.shapes import find_shapes
    from diffusion_runtime.core.hardware import resolve_dtype
    from diffusion_runtime.explanation.estimate import estimate_text

    wanted = () if shapes is None else [name.strip().lower() for name in shapes.split(",") if name.strip()]
    chosen = find_shapes(wanted, small_by_default=hardware.platform == "cpu")
    names = () if backends is None else AttentionSpec(backends).candidates
    left_out: tuple[tuple[str, str], ...] = ()
    if names:
        check_backends(names, hardware)
    else:
        names, left_out = default_backends(hardware)
    torch_dtype = resolve_dtype(dtype, device)

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
    say(f"{what}; {estimate_text(operations, torch_dtype)}")
    return run_interruptibly(measure)


def check_result_place(path: Path | None) -> None:
    """Raises OutputError before minutes of measuring when the file could not be written after them."""
    from diffusion_runtime.session.outputs import prepare_result

    if path is not None:
        prepare_result(path, "--output-path or --plot")


def write_results(
    result: HasDict,
    output_path: Path | None,
    plot: Path | None,
    draw: Callable[[Path], None],
    terminal: Terminal,
) -> None:
    """The JSON and the picture that were asked for. draw: writes the picture. Raises OutputError."""
    from diffusion_runtime.media.publish import publish_text

    if output_path is not None:
        publish_text(output_path, json_text(result.to_dict()) + "\n", "--output-path")
        terminal.say(f"wrote {output_path}")
    if plot is not None:
        draw(plot)
        terminal.say(f"wrote {plot}")


@contextmanager
def progress_line(terminal: Terminal) -> Iterator[Callable[[str], None]]:
    """One line that is redrawn on a terminal, separate lines anywhere else."""
    from rich.text import Text

    if not terminal.is_live:
        yield terminal.say
        return
    with terminal.console.status("") as status:
        yield lambda text: status.update(Text(text))


def show(result: AttentionBenchmark) -> None:
    """A table a shape: the fastest first, what did not run below."""
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
