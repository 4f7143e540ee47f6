"""`generate --attention-plot FILE.png`: the density of attention of a command's first clip, as a picture."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from diffusion_runtime.errors import ConfigError, OutputError

if TYPE_CHECKING:
    from diffusion_runtime.cli.terminal import Terminal
    from diffusion_runtime.generation.interface import GenerationPipeline
    from diffusion_runtime.session.batch import BatchResult


def check_plot_place(path: str | None, output: Path | None, *, dry_run: bool) -> None:
    """Raises ConfigError for an --attention-plot that cannot be made, OutputError where its file cannot be written:
    before anything is loaded. output: the file that the clip is written to, where it was named."""
    from diffusion_runtime.untrusted.files import check_place

    if path is None:
        return
    if dry_run:
        raise ConfigError(
            "--attention-plot: a dry run computes nothing to count; `explain --html FILE.html` draws what would run"
        )
    target = check_place(path, "--attention-plot")
    if target.suffix.lower() != ".png":
        raise ConfigError(f"--attention-plot: expected a file that ends in .png, got {target.name}")
    if output is not None and target.absolute() == output.absolute():
        raise ConfigError(f"--attention-plot and --output-path both name {target}; give one of them another name")
    if not target.parent.is_dir():
        raise OutputError(f"--attention-plot: there is no folder {target.parent}; make it, or name a file elsewhere")
    if target.is_dir() or not os.access(target.parent, os.W_OK | os.X_OK):
        raise OutputError(f"--attention-plot: {target} cannot be written; name another file")


def counting_density(path: str | None, pipeline: GenerationPipeline) -> AbstractContextManager[None]:
    """Context manager: the pipeline counts what the picture is drawn of, where there is to be one."""
    if path is None:
        return nullcontext()
    from diffusion_runtime.profiling.instruments import counted_density

    return counted_density(pipeline)


def write_plot(path: str | None, result: BatchResult, terminal: Terminal) -> None:
    """Draw the first clip that was made. Raises OutputError where the file cannot be written."""
    if path is None:
        return
    if not result.finished:
        terminal.warn(f"attention plot: {path} was not written: nothing was made")
        return
    from diffusion_runtime.media.attention_plot import save_attention_plot

    first = result.finished[0]
    num_frames, height, width = first.frames_shape[:3]
    size = f"{num_frames} frame{'s' if num_frames > 1 else ''} of {width} x {height}, seed {first.request.seed}"
    written = save_attention_plot(first.attention_report, path, size)
    which = "" if len(result.finished) == 1 else f" of the first of {len(result.finished)} clips"
    terminal.say(f"wrote {written}: density of attention{which}")
