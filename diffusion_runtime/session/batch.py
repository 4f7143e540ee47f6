"""Batch runner: items one after another; a failed one does not stop the others, Ctrl-C keeps what is finished."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffusion_runtime.errors import BatchFailedError, DiskFullError
from diffusion_runtime.parallel.failure import RunEnded
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.session.coordinator import Coordinator, SingleProcessCoordinator
from diffusion_runtime.session.failures import INTERRUPTED, Failure
from diffusion_runtime.session.latents_files import LatentsFiles
from diffusion_runtime.session.outputs import Outputs
from diffusion_runtime.session.reporter import Reporter, seconds_text

if TYPE_CHECKING:
    from diffusion_runtime.core.progress import OnProgress
    from diffusion_runtime.generation.saved_latents import SavedLatents
    from diffusion_runtime.media import GeneratedMedia
    from diffusion_runtime.media.file_writer import OpenSink

MAX_TITLE_CHARACTERS = 40


@dataclass(frozen=True)
class Item:
    """One generation of a batch: its resolved request, or why it cannot be made. begin: what it goes on from, None for
    the first step; allow_changes: although the steps before were made with other values. expected: seconds by stage,
    without those that nothing is known of."""

    request: GenerationRequest
    failure: Failure | None = None
    begin: SavedLatents | None = None
    allow_changes: bool = False
    expected: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """Result of one item. Without a failure `path` is written and every other field is filled.

    seconds: of the whole item; timings: by stage; expected: as of Item. peak_memory: as of GeneratedMedia. latents: the
    file of its latents.
    """

    request: GenerationRequest
    failure: Failure | None = None
    path: Path | None = None
    seconds: float = 0.0
    timings: dict[str, float] = field(default_factory=dict)
    expected: Mapping[str, float] = field(default_factory=dict)
    peak_memory: dict[str, int] = field(default_factory=dict)
    frames_shape: tuple[int, ...] = ()
    attention_report: dict[str, Any] = field(default_factory=dict)
    latents: Path | None = None

    def to_dict(self) -> dict[str, Any]:
        known: dict[str, Any] = {"prompt": self.request.prompt, "seed": self.request.seed}
        if self.latents is not None:
            known["latents"] = str(self.latents)
        if self.failure is not None:
            return {**known, **self.failure.to_dict()}
        assert self.path is not None
        num_frames, height, width = self.frames_shape[:3]
        return {
            "path": str(self.path),
            "sidecar": str(self.path.with_suffix(".json")),
            **known,
            "num_frames": num_frames,
            "height": height,
            "width": width,
            "seconds": round(self.seconds, 4),
            "timings": {name: round(seconds, 4) for name, seconds in self.timings.items()},
            "expected_timings": {name: round(seconds, 4) for name, seconds in self.expected.items()},
            "peak_memory": self.peak_memory,
            "request": self.request.recorded(),
            "attention_report": self.attention_report,
        }


@dataclass(frozen=True)
class Done:
    """An item that an earlier run made, at `path`."""

    request: GenerationRequest
    path: Path

    def to_dict(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "sidecar": str(self.path.with_suffix(".json")),
            "prompt": self.request.prompt,
            "seed": self.request.seed,
            "done_already": True,
            "request": self.request.recorded(),
        }


@dataclass(frozen=True)
class BatchResult:
    """num_items: all of this run; done: those of the command that an earlier run made. disk_is_full: the last outcome's
    failure ended the batch, and was reported with what was left of it."""

    outcomes: tuple[Outcome, ...]
    num_items: int
    interrupted: bool = False
    done: tuple[Done, ...] = ()
    disk_is_full: bool = False

    @property
    def finished(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.failure is None]

    @property
    def failures(self) -> list[Failure]:
        return [outcome.failure for outcome in self.outcomes if outcome.failure is not None]

    @property
    def exit_code(self) -> int:
        if self.interrupted:
            return INTERRUPTED
        if not self.failures:
            return 0
        return BatchFailedError.exit_code if self.finished else self.failures[0].exit_code


# Makes one item; the second argument receives its progress, the third one its frames as they are decoded.
Generate = Callable[[Item, "OnProgress", "OpenSink | None"], "GeneratedMedia"]


def run_batch(
    items: Sequence[Item],
    generate: Generate,
    outputs: Outputs,
    reporter: Reporter,
    on_file: Callable[[Path], None] | None,
    coordinator: Coordinator | None = None,
    latents: LatentsFiles | None = None,
) -> BatchResult:
    """Make every item, until one fails for a full disk. on_file: called with each file's path once it is complete.
    coordinator: of the processes that make them; None for one alone. latents: files of what each has left."""
    coordinator = SingleProcessCoordinator() if coordinator is None else coordinator
    latents = LatentsFiles(is_asked=False, is_first=coordinator.is_first) if latents is None else latents
    outcomes: list[Outcome] = []
    num_reported = 0

    def report_files() -> None:
        nonlocal num_reported
        for outcome in outcomes[num_reported:]:
            # Before the call: a reader may interrupt at once, and must not get the path twice.
            num_reported += 1
            if outcome.path is not None and on_file is not None:
                on_file(outcome.path)

    interrupted = disk_is_full = False
    try:
        for number, item in enumerate(items, start=1):
            _run_item(item, number, len(items), generate, outputs, reporter, coordinator, outcomes, latents)
            report_files()
            disk_is_full = _disk_is_full(outcomes[-1].failure)
            if disk_is_full:
                break
    except KeyboardInterrupt:
        interrupted = True
        # What was published before the interruption is finished.
        report_files()
    return BatchResult(tuple(outcomes), len(items), interrupted, disk_is_full=disk_is_full)


def _disk_is_full(failure: Failure | None) -> bool:
    """Compare by name, since a failure may be another process's."""
    return failure is not None and failure.kind == DiskFullError.__name__


def _run_item(
    item: Item,
    number: int,
    num_items: int,
    generate: Generate,
    outputs: Outputs,
    reporter: Reporter,
    coordinator: Coordinator,
    outcomes: list[Outcome],
    latents: LatentsFiles,
) -> None:
    """outcomes: where this one's is added, for a file as soon as it has its name."""
    request = item.request

    def report(failure: Failure, rest: str = "") -> None:
        """Print one error line per cause; the next item that fails for the same cause refers to it."""
        title = title_of(request, number, num_items)
        if any(each.failure is not None and each.failure.message == failure.message for each in outcomes):
            reporter.say(f"{title}: failed alike")
        else:
            reporter.error(f"{title}: {failure.message}{rest}", failure.trace)
        outcomes.append(Outcome(request, failure, latents=latents.path))

    latents.begin(None)
    if item.failure is not None:
        report(item.failure)
        return
    from diffusion_runtime.media import FileWriter

    started = time.perf_counter()
    target = outputs.target(request)
    latents.begin(target)
    path = None
    # One process alone stops decoding when its file cannot be written; several must stay in step.
    writer = FileWriter(target, stops_decoding=coordinator.world is None)
    with reporter.progress(title_of(request, number, num_items)) as view, writer:
        open_sink = writer.open if coordinator.is_first else None
        try:
            media, failure = coordinator.attempt(lambda: generate(item, view.update, open_sink))
        except RunEnded:
            # Another process has failed, and reports why.
            if latents.are_rescued():
                reporter.say(latents.way_on)
            raise
        write_started = time.perf_counter()
        if media is not None:
            finish = functools.partial(_finish, outcomes, item, media, started, write_started)
            save = functools.partial(
                media.save, target, overwrite=False, on_published=finish, writer=writer, signer=outputs.signer
            )
            path, failure = coordinator.attempt(lambda: coordinator.path_from_first(save))
    if failure is not None:
        failure = latents.after(failure)
        left = num_items - number
        rest = f"; {left} of {num_items} were not begun: make room, and --resume goes on"
        report(failure, rest if left and _disk_is_full(failure) else "")
        return
    assert media is not None
    assert path is not None
    if not coordinator.is_first:
        finish(path)
    if latents.path is not None:
        latents.name_after(path)
        outcomes[-1] = dataclasses.replace(outcomes[-1], latents=latents.path)
        reporter.say(latents.way_on)
    if (remark := outputs.explain_number(request, path)) is not None:
        reporter.say(remark)
    reporter.say(f"wrote {path}" + (f" ({seconds_text(outcomes[-1].timings)})" if num_items > 1 else ""))


def _finish(
    outcomes: list[Outcome],
    item: Item,
    media: GeneratedMedia,
    started: float,
    write_started: float,
    path: Path,
) -> None:
    """Add the outcome of an item whose file has just got its name."""
    now = time.perf_counter()
    outcome = Outcome(
        item.request,
        path=path,
        seconds=now - started,
        timings={**media.timings, "write": now - write_started},
        expected=item.expected,
        peak_memory=dict(media.peak_memory),
        frames_shape=media.frames.shape,
        attention_report=media.attention_report.to_dict(),
    )
    outcomes.append(outcome)


def title_of(request: GenerationRequest, number: int = 1, num_items: int = 1) -> str:
    """`[2/4] a red circle moving left, seed 7`."""
    prompt = " ".join(request.prompt.split())
    shown = prompt if len(prompt) <= MAX_TITLE_CHARACTERS else prompt[: MAX_TITLE_CHARACTERS - 1] + "…"
    count = f"[{number}/{num_items}] " if num_items > 1 else ""
    return f"{count}{shown}, seed {request.seed}"
