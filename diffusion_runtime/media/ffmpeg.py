"""ffmpeg as a process that takes raw frames, and one that changes the container of a file; where its program is."""

from __future__ import annotations

import contextlib
import errno
import signal
import subprocess
import threading
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy

from diffusion_runtime.errors import MissingPackageError, first_line

# x264's constant rate factor: 16 is visually lossless for most material, at about twice the size of the usual 23.
MP4_RATE_FACTOR = 16
# As many threads on every machine: by default as many as it has cores, and their number is seen in the file's bytes.
_THREADS = 8
H264 = (
    *("-c:v", "libx264", "-preset", "medium", "-crf", str(MP4_RATE_FACTOR), "-pix_fmt", "yuv420p"),
    *("-threads", str(_THREADS)),
)
# Conversion and tags name the same colours; without tags players guess them by the picture's size. ffmpeg 9 takes the
# tags from the filter's frames and not from the encoder's options: `scale` writes its matrix and its range there alone.
_COLOUR = ("-vf", "scale=out_color_matrix=bt709:out_range=tv,setparams=color_primaries=bt709:color_trc=bt709")


class VideoEncoder:
    """ffmpeg, which is given frames of one size as they come. A context manager: it never outlives its block.

    Odd edges are repeated once, never cropped: H.264 in 4:2:0 needs even sizes. output: ffmpeg's arguments from the
    codec on; inputs: of further inputs, before the colours. stdout: where it writes with `pipe:1` as its output; a file
    descriptor.
    """

    def __init__(
        self,
        height: int,
        width: int,
        fps: float,
        output: Sequence[str],
        *,
        inputs: Sequence[str] = (),
        stdout: int = subprocess.DEVNULL,
    ) -> None:
        size = f"{width + width % 2}x{height + height % 2}"
        # 29.97 frames per second are 30000/1001.
        rate = str(Fraction(fps).limit_denominator(1001))
        raw = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", size, "-r", rate, "-i", "pipe:0"]
        # A session of its own: Ctrl-C reaches this process alone, which then ends ffmpeg and removes the file.
        self._process = subprocess.Popen(
            [*_program(), *raw, *inputs, *_COLOUR, *output],
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stderr is not None
        self._stdin: IO[bytes] = self._process.stdin
        self._messages: list[bytes] = []
        # Read meanwhile: a program whose messages are not read blocks in the middle.
        self._reader = threading.Thread(
            target=_read_all, args=(self._process.stderr, self._messages), daemon=True, name="messages of ffmpeg"
        )
        self._reader.start()

    def __enter__(self) -> VideoEncoder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        self._process.wait()
        self._reader.join()
        assert self._process.stderr is not None
        self._process.stderr.close()

    def write(self, frames: numpy.ndarray) -> bool:
        """Write the next frames, uint8 RGB [frames, height, width, 3]. Returns False if ffmpeg ended: see `finish`."""
        try:
            self._stdin.write(_even(frames).data)
            self._stdin.flush()
        except BrokenPipeError:
            return False
        return True

    def finish(self) -> None:
        """No frames follow: waits until everything is written. Raises OSError when it is not."""
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        self._process.wait()
        self._reader.join()
        _check(self._process.returncode, b"".join(self._messages))


def run_on_bytes(arguments: Sequence[str], given: bytes) -> bytes:
    """Return what ffmpeg writes to `pipe:1` when `given` is its `pipe:0`. Raises OSError when it fails."""
    done = subprocess.run(
        [*_program(), *arguments], input=given, capture_output=True, start_new_session=True, check=False
    )
    _check(done.returncode, done.stderr)
    return done.stdout


def copy_with_index_first(source: Path, target: Path, recipe: str | None) -> None:
    """Copy the streams of an mp4 into an mp4 whose index comes first, with a recipe as its comment. Raises OSError."""
    output = ["-c", "copy", "-movflags", "+faststart+use_metadata_tags", *comment_arguments(recipe), "-f", "mp4"]
    done = subprocess.run(
        [*_program(), "-i", file_argument(source), *output, file_argument(target)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        check=False,
    )
    _check(done.returncode, done.stderr)


def num_frames_in(path: Path) -> int:
    """Whole frames of a video file that may end in the middle of one, by its packets: none is decoded. 0 where there
    are none to be read."""
    given = [
        "-fflags",
        "+discardcorrupt",
        "-i",
        file_argument(path),
        "-map",
        "0:v:0",
        "-c",
        "copy",
        "-f",
        "framecrc",
        "-",
    ]
    done = subprocess.run([*_program(), *given], stdin=subprocess.DEVNULL, capture_output=True, check=False)
    return sum(not line.startswith(b"#") for line in done.stdout.splitlines())


def file_argument(path: Path) -> str:
    """Return a path that ffmpeg takes for a file: it reads `-x.mp4` as an option, `tcp:x.mp4` as an address."""
    return str(path.absolute())


def comment_arguments(recipe: str | None) -> list[str]:
    """Return ffmpeg's arguments for a recipe within the file."""
    return [] if recipe is None else ["-metadata", f"comment={recipe}"]


def _program() -> list[str]:
    return [find_ffmpeg(), "-y", "-nostdin", "-v", "error"]


def _check(status: int, messages: bytes) -> None:
    if status == 0:
        return
    if status == -signal.SIGPIPE:
        raise BrokenPipeError(errno.EPIPE, "the reader of the pipe has left")
    lines = messages.decode(errors="replace").strip().splitlines()
    if any("No space left" in line for line in lines):
        raise OSError(errno.ENOSPC, "no space left on the disk")
    if any("Broken pipe" in line for line in lines):
        raise BrokenPipeError(errno.EPIPE, "the reader of the pipe has left")
    message = f": {lines[-1]}" if lines else ", without a message"
    raise OSError(errno.EIO, f"ffmpeg {_ended_by(status)}{message}")


def _ended_by(status: int) -> str:
    """`ended with status 1`, or `was ended by SIGXFSZ (File size limit exceeded)`."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name} ({signal.strsignal(-status)})"
    except ValueError:
        return f"was ended by signal {-status}"


def _read_all(stream: IO[bytes], into: list[bytes]) -> None:
    into.append(stream.read())


def _even(frames: numpy.ndarray) -> numpy.ndarray:
    """Frames whose sides are even, contiguous."""
    beyond = ((0, 0), (0, frames.shape[1] % 2), (0, frames.shape[2] % 2), (0, 0))
    return numpy.ascontiguousarray(numpy.pad(frames, beyond, mode="edge") if any(map(any, beyond)) else frames)


PACKAGE = "imageio-ffmpeg"
INSTALL = f"pip install {PACKAGE}"


def find_ffmpeg(what: str = "this", instead: str | None = None) -> str:
    """Find the program and return its path.

    what: what is read or written with it, for the message; instead: what to do without it. Raises MissingPackageError
    where the package is not installed, or has no program for this machine.
    """
    try:
        import imageio_ffmpeg

        return str(imageio_ffmpeg.get_ffmpeg_exe())
    except ImportError as error:
        cause: Exception = error
        why, fix = f"the package {PACKAGE} is not installed", INSTALL
    except RuntimeError as error:
        # The source package, which pip takes where no wheel fits the machine, brings no program.
        cause = error
        why, fix = f"the package {PACKAGE} has none for this machine", first_line(error).rstrip(".")
    otherwise = "" if instead is None else f", or {instead}"
    raise MissingPackageError(f"{what} needs ffmpeg, and {why}; to fix it: {fix}{otherwise}") from cause


def has_ffmpeg() -> bool:
    """Return True if `find_ffmpeg` finds it."""
    try:
        find_ffmpeg()
    except MissingPackageError:
        return False
    return True
