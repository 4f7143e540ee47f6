"""Cases of hostile input, one after another in one process: each must end in a typed error or be right, in time.

A case is known by its kind, a seed and its number; the same three make the same case again.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

# Before anything imports the hub's client.
os.environ["HF_HUB_OFFLINE"] = "1"
# The command tunes the allocator of its process unless the user did; this process is not the command's.
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", "134217728")

MAX_GROWTH_BYTES = 200 * 1024**2
# What waits without computing, on a FIFO for example, is found by the clock: far more than any case takes.
MAX_WALL_SECONDS = 120


class Case(Protocol):
    """What is done, and how it is said in a report."""

    def __str__(self) -> str: ...

    def run(self) -> str | None:
        """What was wrong; None when the case ended as it should."""


class Kind(Protocol):
    """One kind of cases. folder: for files that all its cases share; is_quick: whether few of these do."""

    def __init__(self, folder: Path, *, is_quick: bool) -> None: ...

    def warm_up(self) -> None:
        """Import and do once what no case is to be measured by."""

    def case(self, random: random.Random, folder: Path) -> Case:
        """A case whose files are in `folder`, which is empty."""


@dataclass(frozen=True)
class FuzzFailure:
    index: int
    what: str
    case: str


@dataclass(frozen=True)
class FuzzReport:
    """failures: of `num_cases` cases; outcomes: how often each exit code or class came; seconds: CPU time of the
    slowest case; growth: bytes of the case that took most."""

    num_cases: int
    failures: tuple[FuzzFailure, ...]
    seconds: float
    growth: int
    outcomes: Counter[str] = field(default_factory=Counter)


class OutOfTimeError(BaseException):
    """Not an Exception: nothing that a case runs may catch it."""


def kinds() -> dict[str, Callable[..., Kind]]:
    from fuzz.command_lines import CommandLines
    from fuzz.configs import Configs
    from fuzz.files import Files
    from fuzz.model_folders import ModelFolders
    from fuzz.workflows import Workflows

    return {
        "command-lines": CommandLines,
        "configs": Configs,
        "model-folders": ModelFolders,
        "files": Files,
        "workflows": Workflows,
    }


def run_cases(
    kind: str,
    seed: int,
    indexes: Sequence[int],
    folder: Path,
    max_seconds: float,
    say: Callable[[str], None] = lambda _: None,
    *,
    is_quick: bool = False,
) -> FuzzReport:
    """Run cases by their numbers. max_seconds: CPU time that a case may take. say: told of failures as they come."""
    maker = kinds()[kind](folder, is_quick=is_quick)
    with contextlib.chdir(folder), _quiet():
        maker.warm_up()
    failures, outcomes, slowest, largest = [], Counter[str](), 0.0, 0
    for index in indexes:
        what, case, seconds, growth = _run_one(maker, kind, seed, index, folder, max_seconds)
        slowest, largest = max(slowest, seconds), max(largest, growth)
        if what is None and growth > MAX_GROWTH_BYTES:
            what = f"memory grew by {growth // 1024**2} MB"
        if what is None and seconds > max_seconds:
            what = f"took {seconds:.1f} s"
        outcomes["failed" if what else "as it should"] += 1
        if what is not None:
            failures.append(FuzzFailure(index, what, case))
            say(f"--kind {kind} --seed {seed} --only {index}: {what}\n    {case}")
    return FuzzReport(len(indexes), tuple(failures), slowest, largest, outcomes)


def _run_one(
    maker: Kind, kind: str, seed: int, index: int, folder: Path, max_seconds: float
) -> tuple[str | None, str, float, int]:
    """(what was wrong, the case, CPU seconds, bytes that memory grew by at most)."""
    chance = random.Random(f"{kind} {seed} {index}")
    place = folder / f"case-{index}"
    place.mkdir()
    before_folder, before_bytes = Path.cwd(), _start_peak()
    os.chdir(place)
    started = time.process_time()
    case: Case | str = "while it was made"
    try:
        with _limits(max_seconds), _quiet():
            case = maker.case(chance, place)
            started = time.process_time()
            what = case.run()
    except OutOfTimeError as error:
        what = f"out of time ({error}): {_where(error)}"
    except Exception as error:
        what = f"escaped: {type(error).__name__}: {str(error)[:200]}: {_where(error)}"
    finally:
        os.chdir(before_folder)
    seconds = time.process_time() - started
    growth = _peak() - before_bytes
    shutil.rmtree(place, ignore_errors=True)
    return what, str(case)[:600], seconds, growth


@contextlib.contextmanager
def _limits(max_seconds: float) -> Iterator[None]:
    """OutOfTimeError after so many seconds of CPU time, or MAX_WALL_SECONDS of the clock."""

    def stop(number: int, frame: object) -> None:
        raise OutOfTimeError(signal.Signals(number).name)

    before = [signal.signal(number, stop) for number in (signal.SIGPROF, signal.SIGALRM)]
    signal.setitimer(signal.ITIMER_PROF, 2 * max_seconds)
    signal.setitimer(signal.ITIMER_REAL, MAX_WALL_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in zip((signal.SIGPROF, signal.SIGALRM), before, strict=True):
            signal.signal(number, handler)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Standard input is empty; what libraries say is not shown."""
    before = sys.stdin
    sys.stdin = io.StringIO("")
    try:
        with contextlib.redirect_stdout(_text()), contextlib.redirect_stderr(_text()):
            yield
    finally:
        sys.stdin = before


def _text() -> io.TextIOWrapper:
    """As strict as a pipe: what cannot be encoded raises."""
    return io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)


def _start_peak() -> int:
    """The memory of this process now; its peak is counted from here on where the system can."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def _where(error: BaseException) -> str:
    """The last lines of our own code, innermost last."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "diffusion_runtime" in frame.filename]
    return " > ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in ours[-3:])


def command(arguments: Sequence[str], allowed: Sequence[int] = (0, 1, 2, 3)) -> str | None:
    """Run a command line in this process; what was wrong with how it ended."""
    from diffusion_runtime.cli.app import run

    out, err = _text(), _text()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(list(arguments))
    said = err.buffer.getvalue().decode()
    if "unexpected " in said and "run again with --verbose" in " ".join(said.split()):
        return f"untyped: {' '.join(said[said.index('unexpected ') :].split())[:300]}"
    if code not in allowed:
        return f"exit code {code}: {' '.join(said.split())[:300]}"
    if code and "error: " not in said:
        return f"exit code {code} without a word"
    if code and len(said) > 8000:
        return f"{len(said)} characters of messages: {' '.join(said.split())[:200]}"
    return None


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--kind", choices=tuple(kinds()), required=True)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of one case")
    parser.add_argument("--max-seconds", type=float, default=5.0, help="CPU time of a case")
    given = parser.parse_args(arguments)
    indexes = range(given.cases) if given.only is None else (given.only,)
    real_out = sys.stdout

    def say(text: str) -> None:
        print(text.encode("unicode_escape").decode().replace("\\n", "\n"), file=real_out, flush=True)

    with tempfile.TemporaryDirectory(prefix="diffusion-runtime-fuzz-") as folder:
        report = run_cases(given.kind, given.seed, indexes, Path(folder), given.max_seconds, say)
    print(
        f"{given.kind}, seed {given.seed}: {report.num_cases} cases, {len(report.failures)} failed; slowest "
        f"{report.seconds:.2f} s of CPU time, largest growth {report.growth / 1024**2:.0f} MB"
    )
    return 1 if report.failures else 0
