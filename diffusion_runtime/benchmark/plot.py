"""Plots of benchmarks. Attention: one panel per shape, one bar per backend, and the rate of a matrix product as a line;
a step and a generation: one bar per row, stacked by where the time goes."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from diffusion_runtime.benchmark.generation_result import STAGES, GenerationBenchmark
from diffusion_runtime.benchmark.measurement import AttentionBenchmark, Measurement
from diffusion_runtime.benchmark.shapes import AttentionShape
from diffusion_runtime.benchmark.step_result import StepBenchmark, StepRow
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.media.publish import published

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ENDINGS = (".png", ".svg", ".pdf", ".jpg", ".webp")
_COLUMNS = 2
_BAR_INCHES = 0.32


def check_plotting(path: Path) -> None:
    """Raises ConfigError for an extension that is no picture's, and without matplotlib; the message names the extra."""
    if path.suffix.lower() not in _ENDINGS:
        raise ConfigError(f"--plot: expected a file that ends in {', '.join(_ENDINGS)}, got {str(path)!r}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib; type: pip install 'diffusion-runtime[plot]'")


def plot_benchmark(benchmark: AttentionBenchmark, path: Path) -> None:
    """Write the picture to `path`; its extension selects the format. Raises ConfigError as check_plotting does,
    OSError."""
    check_plotting(path)
    # Not pyplot, which keeps global state and may look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shapes = [shape for shape in benchmark.shapes if any(row.samples for row in benchmark.of_shape(shape))]
    num_rows = max(1, -(-len(shapes) // _COLUMNS))
    columns = min(_COLUMNS, max(1, len(shapes)))
    most_bars = max((len(_bars(benchmark, shape)) for shape in shapes), default=1)
    height = num_rows * (1.1 + _BAR_INCHES * most_bars) + 0.6
    figure = Figure(figsize=(6.2 * columns, height), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"Attention, {benchmark.dtype}: {benchmark.device}")
    backends = list(dict.fromkeys(row.backend for row in benchmark.measurements))
    axes = list(figure.subplots(num_rows, columns, squeeze=False).flat)
    for axis, shape in zip(axes, shapes, strict=False):
        _draw(axis, shape, _bars(benchmark, shape), backends)
    for axis in axes[len(shapes) :]:
        axis.set_visible(False)
    save_figure(figure, path)


def save_figure(figure: Figure, path: Path) -> None:
    """Write a picture, whole or not at all; its extension selects the format. Raises OutputError."""
    with published(path, "--plot") as partial:
        figure.savefig(partial, dpi=120, format=path.suffix.lower().removeprefix("."))


def _bars(benchmark: AttentionBenchmark, shape: AttentionShape) -> list[Measurement]:
    return [row for row in benchmark.of_shape(shape) if row.samples]


def _draw(axis: Axes, shape: AttentionShape, rows: list[Measurement], backends: list[str]) -> None:
    names = [row.backend for row in rows]
    rates = [row.tflops or 0.0 for row in rows]
    colours = [f"C{backends.index(name) % 10}" for name in names]
    bars = axis.barh(range(len(rows)), rates, color=colours)
    times = axis.bar_label(bars, [f"{row.milliseconds:.3g} ms" for row in rows], padding=3, fontsize=8)
    for time in times:
        # The line may run behind it.
        time.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})
    axis.set_yticks(range(len(rows)), names)
    axis.invert_yaxis()
    axis.set_title(f"{shape.name}: {shape.describe()}", fontsize=8)
    axis.set_xlabel("TF/s, over the pairs of exact attention", fontsize=8)
    right = max(rates)
    if rows[0].matmul_tflops is not None:
        axis.axvline(rows[0].matmul_tflops, color="grey", linestyle="--", linewidth=1)
        right = max(right, rows[0].matmul_tflops)
        label = "matrix product"
        axis.text(rows[0].matmul_tflops, 0.02, label, rotation=90, fontsize=7, color="grey", ha="right",
                  transform=axis.get_xaxis_transform())  # fmt: skip
    axis.set_xlim(0, 1.18 * right)
    axis.grid(axis="x", alpha=0.3)


class _Bar(NamedTuple):
    """widths: of its parts; label: behind it."""

    name: str
    widths: Sequence[float]
    label: str


def plot_generation(benchmark: GenerationBenchmark, path: Path) -> None:
    """Write the picture to `path`; its extension selects the format. Raises ConfigError as check_plotting does,
    OSError."""
    runs = [
        (f"{row.name}, {when}", run)
        for row in benchmark.rows
        for when, run in (("cold", row.cold), ("warm", row.warm))
        if run
    ]
    known = [stage for stage in STAGES if any(run.get(stage, 0.0) for _, run in runs)]
    stages = {stage: f"C{STAGES.index(stage)}" for stage in known}
    widths = [(name, [run.get(stage, 0.0) for stage in known]) for name, run in runs]
    bars = [_Bar(name, values, f" {sum(values):.2f} s") for name, values in widths]
    title = f"One generation, {benchmark.dtype}: {benchmark.device}"
    _plot_bars(bars, stages, path, (title, benchmark.model, "\n".join(["seconds", *benchmark.remarks])), 1.2)


# Part of a step -> its colour.
_PARTS = {"attention": "C0", "linear products": "C1", "rest": "C2", "idle": "lightgrey"}


def plot_step(benchmark: StepBenchmark, path: Path) -> None:
    """Write the picture to `path`; its extension selects the format. Raises ConfigError as check_plotting does,
    OSError."""
    bars = []
    for row in benchmark.rows:
        if row.samples:
            share = row.share_of_matmul(benchmark.operations)
            label = f" {row.milliseconds:.1f} ms" + ("" if share is None else f", {share:.2f} of matmul")
            bars.append(_Bar(row.name, _parts(row), label))
    title = f"One denoising step, {benchmark.dtype}: {benchmark.device}"
    _plot_bars(bars, _PARTS, path, (title, benchmark.model, "milliseconds of one forward"), 1.3)


def _plot_bars(
    bars: Sequence[_Bar], parts: Mapping[str, str], path: Path, titles: tuple[str, str, str], room: float
) -> None:
    """Draw one stacked bar per row. parts: their colours. titles: of the figure, of the axes, below them. room: of the
    longest bar and its label, in lengths of that bar."""
    check_plotting(path)
    # Not pyplot, which keeps global state and may look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 1.9 + 0.45 * max(1, len(bars))), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(titles[0], fontsize=10)
    axis = figure.subplots()
    left = [0.0] * len(bars)
    for index, (name, colour) in enumerate(parts.items()):
        widths = [bar.widths[index] for bar in bars]
        axis.barh(range(len(bars)), widths, left=left, color=colour, label=name)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for number, bar in enumerate(bars):
        axis.text(left[number], number, bar.label, va="center", fontsize=8)
    axis.set_yticks(range(len(bars)), [bar.name for bar in bars])
    axis.invert_yaxis()
    axis.set_xlim(0, room * max(left, default=1.0))
    axis.set_title(titles[1], fontsize=8)
    axis.set_xlabel(titles[2], fontsize=8)
    axis.grid(axis="x", alpha=0.3)
    if bars:
        figure.legend(loc="outside lower center", ncols=max(1, len(parts)), fontsize=8)
    save_figure(figure, path)


def _parts(row: StepRow) -> tuple[float, ...]:
    """Milliseconds of each part; together the median. A profiled forward may take longer: its parts are shares."""
    total, shares = row.milliseconds or 0.0, row.shares
    if shares is None:
        return 0.0, 0.0, 0.0, total
    scale = min(1.0, total / max(shares.total, 1e-9))
    parts = [part * scale for part in (shares.attention, shares.linear, shares.rest)]
    return *parts, max(0.0, total - sum(parts))
