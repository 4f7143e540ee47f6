"""Plot of a generation benchmark: one bar per row, cold and warm, stacked by stage."""

from __future__ import annotations

from pathlib import Path

from diffusion_runtime.benchmark.generation_result import STAGES, GenerationBenchmark
from diffusion_runtime.benchmark.plot import check_plotting, save_figure


def plot_generation(benchmark: GenerationBenchmark, path: Path) -> None:
    """Write the picture to `path`; its extension selects the format. Raises ConfigError as check_plotting does,
    OSError."""
    check_plotting(path)
    # Not pyplot, which keeps global state and may look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    bars = [
        (f"{row.name}, {when}", run)
        for row in benchmark.rows
        for when, run in (("cold", row.cold), ("warm", row.warm))
        if run
    ]
    figure = Figure(figsize=(9.0, 1.9 + 0.45 * max(1, len(bars))), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"One generation, {benchmark.dtype}: {benchmark.device}", fontsize=10)
    axis = figure.subplots()
    left = [0.0] * len(bars)
    for number, stage in enumerate(STAGES):
        widths = [run.get(stage, 0.0) for _, run in bars]
        if any(widths):
            axis.barh(range(len(bars)), widths, left=left, color=f"C{number}", label=stage)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for number, total in enumerate(left):
        axis.text(total, number, f" {total:.2f} s", va="center", fontsize=8)
    axis.set_yticks(range(len(bars)), [name for name, _ in bars])
    axis.invert_yaxis()
    axis.set_xlim(0, 1.2 * max(left, default=1.0))
    axis.set_title(benchmark.model, fontsize=8)
    axis.set_xlabel("\n".join(["seconds", *benchmark.remarks]), fontsize=8)
    axis.grid(axis="x", alpha=0.3)
    if bars:
        figure.legend(loc="outside lower center", ncols=len(STAGES), fontsize=8)
    save_figure(figure, path)
