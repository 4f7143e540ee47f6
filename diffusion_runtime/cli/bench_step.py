"""`bench step`: one denoising step of a model at its real size, ours in each mode beside diffusers'."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from diffusion_runtime.cli import options
from diffusion_runtime.cli.bench import HOW, WHAT, RunFlags, SizeFlags, model_parameter, report
from diffusion_runtime.cli.consoles import console_on_stdout
from diffusion_runtime.cli.options import option
from diffusion_runtime.cli.tables import figures, figures_table

if TYPE_CHECKING:
    from diffusion_runtime.benchmark.step_result import StepBenchmark, StepRow

EPILOG = """[bold]Examples[/]

diffusion-runtime bench step

diffusion-runtime bench step flux.1-dev --plot flux.png

diffusion-runtime bench step wan2.2-t2v-a14b --height 480 --width 832 --layers 4

diffusion-runtime bench step qwen-image --batch 2 --mode eager,fp8 --no-diffusers --json

diffusion-runtime bench step flux.2-dev --num-images 2
"""
# Within 80 columns with times below a minute.
_COLUMNS = ("one step", "ms", "attention", "linear", "rest", "idle", "host", "of\nmatmul", "GB", "differs")


@dataclass(frozen=True)
class StepFlags(SizeFlags):
    """Flags of `bench step`: the part of the model, and the ways of computing it."""

    batch: Annotated[
        int,
        option(WHAT, "Samples per forward; 2: both branches of guidance as one batch.", "--batch", metavar="N", min=1),
    ] = 1
    num_images: Annotated[
        int | None,
        option(WHAT, "Images to edit. Default: 1 for models that edit.", "--num-images", metavar="N", min=0),
    ] = None
    layers: Annotated[
        int | None,
        option(
            WHAT,
            "Build N blocks of the kind with most; the figures are of this part.",
            "--layers",
            metavar="N",
            min=1,
        ),
    ] = None
    mode: Annotated[
        str | None,
        option(
            HOW,
            "Of ours: eager, graphs, compile, compile+graphs, fp8, fp8+graphs, fp8-all, fp8-all+graphs, int8, "
            "int8+graphs, by commas. Default: all, on a CPU eager.",
            "--mode",
            metavar="NAMES",
        ),
    ] = None
    no_diffusers: Annotated[bool, option(HOW, "Leave out diffusers' model.", "--no-diffusers")] = False
    attention_backend: Annotated[
        str | None, option(HOW, "Of ours, as in generate.", "--attention-backend", metavar="NAME")
    ] = None
    repeats: Annotated[
        int | None, option(HOW, "Samples per row. Default: 7, on a CPU 3.", "--repeats", metavar="N", min=1)
    ] = None


def step(model: str, **given: Any) -> None:
    """One denoising step at a model's real size, with random weights: nothing is downloaded.

    Milliseconds of one forward, in attention, linear layers and the rest; time of the host; share of a matrix product's
    rate; memory; difference of the velocities. A step in the middle of a generation. Exit code 1 when a row is wrong or
    fails.
    """
    flags, run = options.taken(StepFlags, given), options.taken(RunFlags, given)

    def draw(result: StepBenchmark, path: Path) -> None:
        from diffusion_runtime.benchmark.plot import plot_step

        plot_step(result, path)

    report(run, lambda _, on_progress: _measure(model, flags, run, on_progress), draw, show)


def _measure(model: str, flags: StepFlags, run: RunFlags, on_progress: Callable[[str], None]) -> StepBenchmark:
    from diffusion_runtime.benchmark.step import StepChoice, StepEffort, benchmark_step
    from diffusion_runtime.benchmark.step_model import open_step_model, with_size
    from diffusion_runtime.core.hardware import resolve_device, resolve_dtype

    device = resolve_device(run.device or "auto")
    on_cpu = device.type == "cpu"
    modes = None if flags.mode is None else tuple(name.strip() for name in flags.mode.split(","))
    choice = StepChoice(modes, not flags.no_diffusers, flags.attention_backend)
    effort = StepEffort(flags.repeats or (3 if on_cpu else 7), 1024 if on_cpu else 8192)
    sized = with_size(
        open_step_model(model, flags.layers),
        height=flags.height,
        width=flags.width,
        num_frames=flags.num_frames,
        batch=flags.batch,
        num_images=flags.num_images,
    )
    dtype = resolve_dtype(run.dtype or "auto", device)
    return benchmark_step(sized, choice, device, dtype, effort, on_progress=on_progress)


options.set_parameters(
    step,
    [
        model_parameter("A name of `models`, or a folder. Its weights are not read."),
        *options.parameters_of(StepFlags),
        *options.parameters_of(RunFlags, plot="Plot where the time goes."),
    ],
)


def show(result: StepBenchmark) -> None:
    """Print one row per way of computing the step, and what the figures are of."""
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
    """Return the lines that say by what each row was computed, and what is wrong with some."""
    by: dict[str, list[str]] = {}
    for row in result.rows:
        if row.state == "measured" and row.detail:
            by.setdefault(row.detail, []).append(row.name)
    lines = [f"attention by {detail}: {'; '.join(names)}" for detail, names in by.items()]
    return lines + [f"{row.name}: {row.state}: {row.reason}" for row in result.rows if row.state != "measured"]
