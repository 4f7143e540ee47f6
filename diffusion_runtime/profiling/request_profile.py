"""Profile of one generation by torch.profiler: a trace in Chrome's format, which Perfetto and chrome://tracing open.

Operators and kernels of a few steps are recorded: a whole run's trace has gigabytes. Stages and steps are ranges over
the whole generation, read off its progress.
"""

from __future__ import annotations

import errno
import json
import os
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from diffusion_runtime.core.progress import OnProgress, Progress
from diffusion_runtime.errors import OutputError
from diffusion_runtime.generation.interface import GenerationPipeline
from diffusion_runtime.media.publish import cannot_write, publish_numbered, temporary_file
from diffusion_runtime.profiling.instruments import named_ranges

if TYPE_CHECKING:
    import torch

SCHEMA = "diffusion_runtime.profile/1"
# The first step computes what later ones reuse, and compiles; it is no step to look at where there are others.
NUM_WARM_UP_STEPS = 1
NUM_RECORDED_STEPS = 2
_STAGES, _STEPS = "stages", "steps"
# What both tracks stand under in a viewer, above the process and its devices.
_PROCESS = "generation"


class RequestProfile:
    """The profile of one generation: a context manager around it.

        with RequestProfile(pipeline) as profile:
            pipeline(request, on_progress=profile.watching())
        profile.save("trace.json")

    num_recorded: steps to be recorded. recorded_steps: whose operators and kernels are in the trace, once they have
    begun; num_steps: of the generation.
    """

    def __init__(self, pipeline: GenerationPipeline, num_recorded: int = NUM_RECORDED_STEPS) -> None:
        self._pipeline = pipeline
        self._num_recorded = num_recorded
        self._begun: dict[str, tuple[str, int]] = {}
        # (track, name, first and last nanosecond)
        self._ranges: list[tuple[str, str, int, int]] = []
        self._profiler: Any = None
        self._recording = ExitStack()
        self._step = ExitStack()
        self._is_recorded = False
        self._saved: Path | None = None
        self.recorded_steps = range(0)
        self.num_steps = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._step.close()
        self._recording.close()
        for track in tuple(self._begun):
            self._end(track)

    @property
    def is_complete(self) -> bool:
        """True once the steps to be recorded have run."""
        return self._is_recorded

    def watching(self, on_progress: OnProgress = lambda _: None) -> OnProgress:
        """Return an on_progress that records, and passes everything on."""

        def watch(progress: Progress) -> None:
            if progress.step:
                self._after(progress)
            on_progress(progress)
            if progress.step < progress.num_steps:
                self._before(progress)

        return watch

    def begin_stage(self, name: str) -> None:
        """Begin a stage that no progress reports; it ends with the next one, or with the profile."""
        self._begin(_STAGES, name)

    def end_stage(self) -> None:
        self._end(_STAGES)

    def save(self, path: str | Path) -> Path:
        """Write the trace, whole or not at all; returns its path, which has a number where the name was taken.

        Raises OutputError where it cannot be written, where the steps to be recorded have not run, and after the first
        call that wrote it.
        """
        target = Path(path)
        if self._saved is not None:
            raise OutputError(
                f"{target}: the trace is written already, to {self._saved}: torch gives it once; copy that file"
            )
        if not self._is_recorded:
            raise OutputError(f"{target}: there is no trace: the generation ended before the steps to be recorded had")
        try:
            # torch writes files of its own beside the one that it is given, and says nothing of a full disk.
            with tempfile.TemporaryDirectory(prefix=".trace-", dir=target.parent) as folder:
                exported = Path(folder) / "trace.json"
                self._profiler.export_chrome_trace(str(exported))
                trace = self._with_ranges(_read_trace(exported))
            with temporary_file(target.parent) as file:
                file.write_text(json.dumps({**trace, "traceName": target.name}))
                self._saved = publish_numbered(file, target)
                return self._saved
        except OSError as error:
            raise cannot_write(target, error) from error

    def _after(self, progress: Progress) -> None:
        is_last = progress.step >= progress.num_steps
        # A pipeline of diffusers tells of the end of its last step, and of decoding, when it has returned.
        ended = self._end_of_stage(progress) if is_last else time.time_ns()
        if progress.stage == "denoise":
            self._step.close()
            self._end(_STEPS, ended)
            if progress.step >= self.recorded_steps.stop:
                self._recording.close()
        if is_last:
            self._end(_STAGES, ended)

    def _before(self, progress: Progress) -> None:
        if progress.step == 0:
            self._begin(_STAGES, progress.stage)
        if progress.stage == "denoise":
            if progress.step == 0 and not self.num_steps:
                self.num_steps = progress.num_steps
                first = min(NUM_WARM_UP_STEPS, progress.num_steps - 1)
                self.recorded_steps = range(first, min(first + self._num_recorded, progress.num_steps))
            if progress.step in self.recorded_steps and self._profiler is None:
                self._record()
            self._begin(_STEPS, f"step {progress.step}")
            if progress.step in self.recorded_steps:
                self._name_step(f"step {progress.step}")

    def _record(self) -> None:
        """Until the recording is closed."""
        from torch.profiler import profile

        # Below it, the library reports each start and stop on stderr.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self._profiler = profile(activities=_activities(self._pipeline.device))
        self._profiler.start()
        self._recording.callback(self._stop)
        self._recording.enter_context(named_ranges(self._pipeline))

    def _name_step(self, name: str) -> None:
        """Among the operators, and from there on the device: which of its kernels are this step's."""
        from torch.profiler import record_function

        self._step.enter_context(record_function(name))

    def _stop(self) -> None:
        self._profiler.stop()
        # It is closed too where the generation fails in between.
        last = self.recorded_steps[-1]
        self._is_recorded = any(track == _STEPS and name == f"step {last}" for track, name, *_ in self._ranges)

    def _end_of_stage(self, progress: Progress) -> int:
        """Return when a stage of known duration ends, in nanoseconds; one not reported as begun begins now."""
        duration = round(progress.seconds * 1e9)
        name, begun = self._begun.get(_STAGES, ("", 0))
        if name != progress.stage:
            # Both are durations measured elsewhere: a stage begins where the one before it ended, not within it.
            ended = max((end for track, *_, end in self._ranges if track == _STAGES), default=0)
            begun = max(time.time_ns() - duration, ended)
            self._begun[_STAGES] = progress.stage, begun
        return begun + duration

    def _begin(self, track: str, name: str) -> None:
        self._end(track)
        self._begun[track] = name, time.time_ns()

    def _end(self, track: str, at: int | None = None) -> None:
        """at: in nanoseconds; None is now."""
        if track in self._begun:
            self._ranges.append((track, *self._begun.pop(track), time.time_ns() if at is None else at))

    def _with_ranges(self, trace: dict[str, Any]) -> dict[str, Any]:
        """Return the trace with tracks for stages and steps. Its clock counts microseconds from its base."""
        base = int(trace.get("baseTimeNanoseconds", 0))
        tracks = (_STAGES, _STEPS)
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": _PROCESS, "tid": 0, "args": {"name": _PROCESS}},
            {"ph": "M", "name": "process_sort_index", "pid": _PROCESS, "tid": 0, "args": {"sort_index": -1}},
        ]
        for number, track in enumerate(tracks):
            events.append({"ph": "M", "name": "thread_name", "pid": _PROCESS, "tid": number, "args": {"name": track}})
        events += [
            {
                "ph": "X",
                "cat": track,
                "name": name,
                "pid": _PROCESS,
                "tid": tracks.index(track),
                "ts": (begin - base) / 1000,
                "dur": (end - begin) / 1000,
            }
            for track, name, begin, end in self._ranges
        ]
        described = {"schema": SCHEMA, "recorded_steps": list(self.recorded_steps), "num_steps": self.num_steps}
        return {**trace, "diffusion_runtime": described, "traceEvents": [*trace["traceEvents"], *events]}


def _activities(device: torch.device) -> list[Any]:
    """Operators, and the kernels of the device where the profiler knows them."""
    from torch.profiler import ProfilerActivity, supported_activities

    of_device = {"cuda": "CUDA", "xpu": "XPU"}.get(device.type)
    known = supported_activities()  # type: ignore[no-untyped-call]
    return [each for each in ProfilerActivity.__members__.values() if each in known and each.name in ("CPU", of_device)]


def _read_trace(path: Path) -> dict[str, Any]:
    """Read the trace that torch has written. Raises OSError for one that is not whole."""
    try:
        trace: dict[str, Any] = json.loads(path.read_text(errors="replace"))
    except (ValueError, FileNotFoundError) as error:
        raise OSError(errno.ENOSPC, "torch could not write its trace, most likely for want of room") from error
    return trace
