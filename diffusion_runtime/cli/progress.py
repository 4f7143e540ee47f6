"""Progress of one generation on standard error: redrawn on a terminal, a few plain lines anywhere else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bars

    from diffusion_runtime.core.progress import Progress

# Without a terminal: a line for every step of a short run, about this many for a long one.
PLAIN_LINES_PER_STAGE = 8


class View(ABC):
    """Shows the progress of one item."""

    @abstractmethod
    def update(self, progress: Progress) -> None:
        """One report of the pipeline."""


@contextmanager
def show_progress(title: str, say: Callable[[str], None], live: Console | None) -> Iterator[View]:
    """A view for one item, below a line with its title; a redrawn one is gone afterwards, so that lines can follow.

    say: writes a line. live: where lines can be redrawn; None where they cannot.
    """
    say(title)
    if live is None:
        yield _PlainView(say)
    else:
        bars = _make_bars(live)
        with bars:
            yield _LiveView(bars)


def step_text(progress: Progress) -> str:
    """`step 3/12, 0.35 s per step, about 3 s left`, of clips without the word; nothing for a stage of one
    step."""
    if progress.num_steps <= 1:
        return ""
    is_of_clips = progress.stage == "clips"
    text = ("" if is_of_clips else "step ") + f"{progress.step}/{progress.num_steps}"
    num_made = progress.step - progress.num_kept
    if num_made < 1:
        return text
    each = progress.seconds / num_made
    left = each * (progress.num_steps - progress.step)
    unit = "each" if is_of_clips else "per step"
    return f"{text}, {each:.2f} s {unit}" + (f", about {_duration(left)} left" if left > 0 else "")


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{max(1, round(seconds))} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


class _PlainView(View):
    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._reported: set[tuple[str, int]] = set()

    def update(self, progress: Progress) -> None:
        every = max(1, -(-progress.num_steps // PLAIN_LINES_PER_STAGE))
        finished = progress.step >= progress.num_steps
        key = (progress.stage, progress.step)
        if progress.step < 1 or key in self._reported or not (finished or progress.step % every == 0):
            return
        self._reported.add(key)
        detail = step_text(progress)
        self._say(f"  {progress.stage}: " + (detail or f"{progress.seconds:.2f} s"))


class _LiveView(View):
    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._task = bars.add_task("", total=None, stage="", detail="")

    def update(self, progress: Progress) -> None:
        several = progress.num_steps > 1
        self._bars.update(
            self._task,
            total=progress.num_steps if several else None,
            completed=progress.step if several else 0,
            stage=progress.stage,
            detail=step_text(progress),
        )


def _make_bars(console: Console) -> Bars:
    from rich.progress import BarColumn, SpinnerColumn, TextColumn
    from rich.progress import Progress as Bars

    # Narrow enough for 80 columns with the longest detail; rich would drop what does not fit.
    return Bars(
        SpinnerColumn("dots" if console.encoding.startswith("utf") else "line"),
        TextColumn("{task.fields[stage]}", markup=False, style="bold"),
        BarColumn(bar_width=16),
        TextColumn("{task.fields[detail]}", markup=False),
        console=console,
        transient=True,
        # Lines of other libraries go above the bars; standard output is left alone, it may be a pipe.
        redirect_stdout=False,
    )
