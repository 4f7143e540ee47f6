"""`bench step`: one denoising step of a model at its real size, ours in each mode beside diffusers'."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diffusion_runtime.cli import options
from diffusion_runtime.cli.bench import check_result_place, progress_line, write_results
from diffusion_runtime.cli.consoles import console_on_stdout
from diffusion_runtime.cli.tables import figures, figures_table
from diffusion_runtime.cli.terminal import Terminal, json_text, put_on_stdout

if TYPE_CHECKING:
    from diffusion_runtime.benchmark.step_result import StepBenchmark, StepRow

EPILOG = """[bold]Examples[/]

diffusion-runtime bench step

diffusion-runtime bench step flux.1-dev --plot flux.png

diffusion-runtime bench step wan2.2-t2v-a14b --height 480 --width 832 --layers 4

diffusion-runtime bench step qwen-image --batch 2 --mode eager,fp8 --no-diffusers --json

diffusion-runtime bench step flux.2-dev --num-images 2
"""
_WHAT, _HOW = "What to measure", "How it is computed"
# Within 80 columns with times below a minute.
_COLUMNS = ("one step", "ms", "attention", "linear", "rest", "idle", "host", "of\nmatmul", "GB", "differs")


def _option(panel: str, text: str, name: str, metavar: str | None = None, **limits: Any) -> Any:
    return typer.Option(name, help=text, metavar=metavar, show_default=False, rich_help_panel=panel, **limits)


def step(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A name of `models`, or a folder. Its weights are not read."),
    ] = "shapes",
    height: Annotated[int | None, _option(_WHAT, "Pixels. Default: the model's.", "--height", "N", min=1)] = None,
    width: Annotated[int | None, _option(_WHAT, "Pixels. Default: the model's.", "--width", "N", min=1)] = None,
    num_frames: Annotated[
        int | None, _option(_WHAT, "Frames. Default: the model's.", "--num-frames", "N", min=1)
    ] = None,
    batch: Annotated[
        int, _option(_WHAT, "Samples per forward; 2: both branches of guidance as one batch.", "--batch", "N", min=1)
    ] = 1,
    num_images: Annotated[
        int | None, _option(_WHAT, "Images to edit. Default: 1 for models that edit.", "--num-images", "N", min=0)
    ] = None,
    layers: Annotated[
        int | None,
        _option(_WHAT, "Build N blocks of the kind with most; the figures are of this part.", "--layers", "N", min=1),
    ] = None,
    mode: Annotated[
        str | None,
        _option(
            _HOW,
            "Of ours: eager, graphs, compile, compile+graphs, fp8, fp8+graphs, fp8-all, fp8-all+graphs, int8, "
            "int8+graphs, by commas. Default: all, on a CPU eager.",
            "--mode",
            "NAMES",
        ),
    ] = None,
    no_diffusers: Annotated[bool, _option(_HOW, "Leave out diffusers' model.", "--no-diffusers")] = False,
    attention_backend: Annotated[
        str | None, _option(_HOW, "Of ours, as in generate.", "--attention-backend", "NAME")
    ] = None,
    repeats: Annotated[
        int | None, _option(_HOW, "Samples per row. Default: 7, on a CPU 3.", "--repeats", "N", min=1)
    ] = None,
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
    plot: Annotated[Path | None, _option(options.OUTPUT, "Plot where the time goes.", "--plot", "FILE.png")] = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    log_format: options.LogFormat = None,
) -> None:
    """One denoising step at a model's real size, with random weights: nothing is downloaded.

    Milliseconds of one forward, in attention, linear layers and the rest; time of the host; share of a matrix product's
    rate; memory; difference of the velocities. A step in the middle of a generation. Exit code 1 when a row is wrong or
    fails.
    """
    terminal = Terminal(quiet=quiet, log_format=log_format)
    with terminal.log():
        from diffusion_runtime.benchmark.plot import check_plotting, plot_step
        from diffusion_runtime.benchmark.step import StepChoice, StepEffort, benchmark_step
        from diffusion_runtime.benchmark.step_model import open_step_model, with_size
        from diffusion_runtime.core.hardware import resolve_device, resolve_dtype

        if plot is not None:
            check_plotting(plot)
        for path in (output_path, plot):
            check_result_place(path)
        torch_device = resolve_device(device or "auto")
        on_cpu = torch_device.type == "cpu"
        modes = None if mode is None else tuple(name.strip() for name in mode.split(","))
        choice = StepChoice(modes, not no_diffusers, attention_backend)
        effort = StepEffort(repeats or (3 if on_cpu else 7), 1024 if on_cpu else 8192)
        opened = open_step_model(model, layers)
        with progress_line(terminal) as on_progress:
            sized = with_size(
                opened, height=height, width=width, num_frames=num_frames, batch=batch, num_images=num_images
            )
            result = benchmark_step(
                sized,
                choice,
                torch_device,
                resolve_dtype(dtype or "auto", torch_device),
                effort,
                on_progress=on_progress,
            )
        write_results(result, output_path, plot, lambda path: plot_step(result, path), terminal)
    if as_json:
        put_on_stdout(json_text(result.to_dict()))
    else:
        show(result)
    raise typer.Exit(result.exit_code)


def show(result: StepBenchmark) -> None:
    """One row per way of computing the step, and what the figures are of."""
    from rich.text import Text

    console = console_on_stdout()
    console.print(Text(f"{result.device}, {result.dtype}"))
    console.print(Text(f"\n{result.model}", style="bold"))
    console.print(figures_table(_COLUMNS, _cells(result)), soft_wrap=True)
    console.print()
    for line in _remarks(result):
        console.print(Text(line))
    rates = [row.matmul_tflops for row in result.rows if row.matmul_tflops is not None]
    if rates:
        size = result.matmul_size
        console.print(
            Text(
                f"one step: {result.operations / 1e12:.4g} T operations; a matrix product of {size}^3 beside them: "
                f"{min(rates):.3g} to {max(rates):.3g} TF/s"
            )
        )
    if result.scale != 1:
        console.print(
            Text(
                f"These figures are of {result.num_blocks} of {result.whole_blocks} blocks. Times "
                f"{result.whole_blocks}/{result.num_blocks}, what stands outside of blocks as well, an upper bound:"
            )
        )
        for row in result.rows:
            if row.milliseconds is not None:
                console.print(Text(f"  {row.name}: {row.milliseconds * result.scale:.4g} ms"))


def _cells(result: StepBenchmark) -> list[tuple[str, ...]]:
    """One tuple per row. All times have as many decimals, so that they can be compared across columns too."""
    rows = result.rows
    longest = max((row.milliseconds for row in rows if row.milliseconds is not None), default=0.0)
    times = [figures(column, largest=longest) for column in zip(*(_times(row) for row in rows), strict=True) if rows]
    shares = ["-" if (share := row.share_of_matmul(result.operations)) is None else f"{share:.2f}" for row in rows]
    peaks = figures(None if row.peak_bytes is None else row.peak_bytes / 1e9 for row in rows)
    differences = [_difference(row) for row in rows]
    return list(zip((row.name for row in rows), *times, shares, peaks, differences, strict=True))


def _times(row: StepRow) -> tuple[float | None, ...]:
    shares = row.shares
    parts = (None, None, None) if shares is None else (shares.attention, shares.linear, shares.rest)
    return (row.milliseconds, *parts, row.idle_ms, row.host_ms)


def _difference(row: StepRow) -> str:
    if row.difference is None:
        return "-"
    return f"{row.difference:.0e}" if row.difference else "0"


def _remarks(result: StepBenchmark) -> list[str]:
    """What computed which rows, and what is wrong with some."""
    by: dict[str, list[str]] = {}
    for row in result.rows:
        if row.state == "measured" and row.detail:
            by.setdefault(row.detail, []).append(row.name)
    lines = [f"attention by {detail}: {'; '.join(names)}" for detail, names in by.items()]
    return lines + [f"{row.name}: {row.state}: {row.reason}" for row in result.rows if row.state != "measured"]
