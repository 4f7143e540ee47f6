"""Plot of a step benchmark: one bar per row, stacked by where the time goes."""

from __future__ import annotations

from pathlib import Path

from diffusion_runtime.benchmark.plot import check_plotting, save_figure
from diffusion_runtime.benchmark.step_result import StepBenchmark, StepRow

# (what, colour)
_PARTS = (("attention", "C0"), ("linear products", "C1"), ("rest", "C2"), ("idle", "lightgrey"))


def plot_step(benchmark: StepBenchmark, path: Path) -> None:
    """Write the picture to `path`; its extension selects the format. Raises ConfigError as check_plotting does,
    OSError."""
    check_plotting(path)
    # Not pyplot, which keeps global state and may look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in benchmark.rows if row.samples]
    figure = Figure(figsize=(9.0, 1.9 + 0.45 * max(1, len(rows))), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"One denoising step, {benchmark.dtype}: {benchmark.device}", fontsize=10)
    axis = figure.subplots()
    left = [0.0] * len(rows)
    for place, (name, colour) in enumerate(_PARTS):
        widths = [_parts(row)[place] for row in rows]
        axis.barh(range(len(rows)), widths, left=left, color=colour, label=name)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for number, row in enumerate(rows):
        share = row.share_of_matmul(benchmark.operations)
        label = f" {row.milliseconds:.1f} ms" + ("" if share is None else f", {share:.2f} of matmul")
        axis.text(left[number], number, label, va="center", fontsize=8)
    axis.set_yticks(range(len(rows)), [row.name for row in rows])
    axis.invert_yaxis()
    axis.set_xlim(0, 1.3 * max(left, default=1.0))
    axis.set_title(benchmark.model, fontsize=8)
    axis.set_xlabel("milliseconds of one forward", fontsize=8)
    axis.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside lower center", ncols=len(_PARTS), fontsize=8)
    save_figure(figure, path)


def _parts(row: StepRow) -> tuple[float, ...]:
    """Milliseconds of each part; together the median. A profiled forward may take longer: its parts are shares."""
    total, shares = row.milliseconds or 0.0, row.shares
    if shares is None:
        return 0.0, 0.0, 0.0, total
    scale = min(1.0, total / max(shares.total, 1e-9))
    parts = [part * scale for part in (shares.attention, shares.linear, shares.rest)]
    return *parts, max(0.0, total - sum(parts))
