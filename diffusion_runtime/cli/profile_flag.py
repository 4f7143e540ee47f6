"""`generate --profile FILE.json`: the first request of a command under torch.profiler."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from diffusion_runtime.errors import ConfigError, OutputError

if TYPE_CHECKING:
    from diffusion_runtime.cli.terminal import Terminal
    from diffusion_runtime.core.progress import OnProgress
    from diffusion_runtime.generation.interface import GenerationPipeline
    from diffusion_runtime.media import GeneratedMedia
    from diffusion_runtime.media.file_writer import OpenSink
    from diffusion_runtime.profiling.request_profile import RequestProfile
    from diffusion_runtime.session.batch import Generate, Item
    from diffusion_runtime.session.coordinator import Coordinator

# Called with the path of each file that is complete.
_OnFile: TypeAlias = Callable[[Path], None]


def check_profile_place(path: str | None, *, dry_run: bool) -> None:
    """Raises ConfigError for a --profile that cannot be made, OutputError where its file cannot be written: before
    anything is loaded."""
    from diffusion_runtime.untrusted.files import check_place

    if path is None:
        return
    if dry_run:
        raise ConfigError("--profile: a dry run computes nothing to profile; leave out --dry-run or --profile")
    target = check_place(path, "--profile")
    if target.suffix != ".json":
        raise ConfigError(f"--profile: expected a file that ends in .json, got {target.name}")
    if not target.parent.is_dir():
        raise OutputError(f"--profile: there is no folder {target.parent}; make it, or name a file in another one")
    if target.is_dir() or not os.access(target.parent, os.W_OK | os.X_OK):
        raise OutputError(f"--profile: {target} cannot be written; name another file")


@contextmanager
def profiled(
    path: str | None,
    pipeline: GenerationPipeline,
    on_file: _OnFile | None,
    num_items: int,
    coordinator: Coordinator,
    terminal: Terminal,
) -> Iterator[tuple[Generate, _OnFile | None]]:
    """The functions that `run_batch` takes, with the first request profiled where a path says so; the trace is written
    when the block ends. Raises OutputError where that fails."""

    def make(item: Item, on_progress: OnProgress, open_sink: OpenSink | None, /) -> GeneratedMedia:
        if item.begin is None:
            return pipeline(item.request, on_progress=on_progress, open_sink=open_sink)
        native = pipeline.inspectable
        assert native is not None, "its rules have resolved the request"
        return native.finish(
            item.begin,
            item.request,
            allow_changes=item.allow_changes,
            on_progress=on_progress,
            open_sink=open_sink,
        )

    if path is None or not coordinator.is_first:
        yield make, on_file
        return
    from diffusion_runtime.profiling.request_profile import RequestProfile

    for remark in _remarks(pipeline, num_items, coordinator):
        terminal.say(f"profile: {remark}")
    first: list[RequestProfile] = []

    def make_profiled(item: Item, on_progress: OnProgress, open_sink: OpenSink | None, /) -> GeneratedMedia:
        if first:
            return make(item, on_progress, open_sink)
        first.append(RequestProfile(pipeline))
        with first[0] as profile:
            media = make(item, profile.watching(on_progress), open_sink)
        profile.begin_stage("write")
        return media

    def finish(file: Path) -> None:
        first[0].end_stage()
        if on_file is not None:
            on_file(file)

    yield make_profiled, finish
    _save(first[0] if first else None, path, terminal)


def _remarks(pipeline: GenerationPipeline, num_items: int, coordinator: Coordinator) -> Iterator[str]:
    if num_items > 1:
        yield f"of the first of {num_items} requests alone"
    if coordinator.world is not None:
        yield f"of rank 0 of {coordinator.world.size} alone"
    yield from pipeline.profile_remarks
    yield "the seconds of this request hold the profiler's own"


def _save(profile: RequestProfile | None, path: str, terminal: Terminal) -> None:
    if profile is None or not profile.is_complete:
        terminal.warn(f"profile: {path} was not written: no request came past the steps to be recorded")
        return
    written = profile.save(path)
    steps = profile.recorded_steps
    which = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    terminal.say(
        f"wrote {written} ({written.stat().st_size / 1e6:.1f} MB): operators and kernels of {which} of "
        f"{profile.num_steps}, counted from 0; open it at https://ui.perfetto.dev"
    )
