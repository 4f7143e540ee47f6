"""Failure: an exception as a user sees it, with one message, one kind and one exit code, and what can be played of the
file of a stream that it ended."""

from __future__ import annotations

import dataclasses
import errno
import traceback
from dataclasses import dataclass
from pathlib import Path

from diffusion_runtime.errors import Cancelled, ConfigError, DeviceMemoryError, DiffusionRuntimeError, shown
from diffusion_runtime.parallel.failure import RankFailure

INTERRUPTED = 130
_WHAT_NEEDS_LESS = "try --preset draft, fewer frames, a smaller size, or --guidance-mode two_pass"


class Interrupted(Exception):
    """A command that a signal ended, as an exception that the parser does not turn into a bare exit. finished: what is
    finished, where it is, and how to go on."""

    def __init__(self, finished: str = "nothing was finished") -> None:
        super().__init__(f"interrupted: {finished}")


@dataclass(frozen=True)
class Failure:
    """kind: the error's class name, for programs; message: for people; trace: where it happened."""

    kind: str
    message: str
    exit_code: int
    trace: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        trace = "".join(traceback.format_exception(error))
        if isinstance(error, DiffusionRuntimeError | Cancelled):
            return cls(type(error).__name__, str(error), error.exit_code, trace)
        if isinstance(error, Interrupted | KeyboardInterrupt):
            interrupted = error if isinstance(error, Interrupted) else Interrupted()
            return cls(Interrupted.__name__, str(interrupted), INTERRUPTED, trace)
        if isinstance(error, MemoryError) or _is_device_memory_error(error):
            message = f"out of memory: {_first_line(error)}; {_WHAT_NEEDS_LESS}"
            return cls(DeviceMemoryError.__name__, message, DeviceMemoryError.exit_code, trace)
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            # A path was checked as every file system bounds it; some bound it further (eCryptfs: 143 bytes per name).
            message = f"{shown(error.filename)}: expected a shorter path; this file system takes no name so long"
            return cls(ConfigError.__name__, message, ConfigError.exit_code, trace)
        message = f"unexpected {type(error).__name__}: {_first_line(error)}; run again with --verbose to see where"
        return cls(type(error).__name__, message, 1, trace)

    def to_dict(self) -> dict[str, str | int]:
        return {"error": self.message, "kind": self.kind, "exit_code": self.exit_code}


def _is_device_memory_error(error: BaseException) -> bool:
    """torch's own error, by name: an error may come before torch is loaded, and must not load it."""
    return any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "no message")


def kept_frames(num_frames: int, path: Path) -> str:
    """Return a phrase for the number of frames that a file kept."""
    return f"the {num_frames} frames made so far are in {path}" if num_frames else f"no frame of {path} can be played"


def with_kept_frames(failure: RankFailure, path: Path) -> RankFailure:
    """Return the failure with what a player finds in the file, unless its message speaks of the file."""
    from diffusion_runtime.media.ffmpeg import num_frames_in

    # Of another machine, where rank 0 is.
    if str(path) in failure.message or not path.is_file():
        return failure
    first, *rest = failure.message.split("\n")
    # Before the last output of a process.
    message = "\n".join([f"{first.removesuffix(':')}; {kept_frames(num_frames_in(path), path)}", *rest])
    return dataclasses.replace(failure, message=message)
