"""GrowingClip: an mp4 that can be watched while frames are added to it, as a file or down a pipe.

Until the end the file consists of fragments, each with its own index, so that whatever stands in it is playable however
the process ends. At the end its streams are copied into an ordinary mp4 with the index first and the recipe inside.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy

from diffusion_runtime.errors import ConfigError, OutputError
from diffusion_runtime.media.ffmpeg import (
    H264,
    VideoEncoder,
    copy_with_index_first,
    file_argument,
    find_ffmpeg,
    num_frames_in,
)
from diffusion_runtime.media.formats import format_of, without_ffmpeg
from diffusion_runtime.media.publish import (
    cannot_write,
    numbered,
    remove_abandoned_files,
    temporary_file,
    uninterrupted,
)
from diffusion_runtime.media.sidecar import embedded_recipe, sidecar_path, to_json

# What a stream goes to standard output by.
STANDARD_OUTPUT = "-"


class GrowingClip:
    """A clip of a length that is not known yet. A context manager: ffmpeg has ended behind its block, and a file
    without frames is gone.

        with GrowingClip("out.mp4", 256, 256, fps=12, fragment_frames=8) as clip:
            for frames in ...:
                clip.write(frames)
            clip.finish(sidecar)

    target: a path that ends in .mp4, of which a taken name gets a number (`path`); `-` for standard output, a pipe
    that gets the fragments. height, width: in pixels; fps: frames per second. fragment_frames: of one fragment, the
    most that an unexpected end loses. num_frames: those written so far.

    Raises ConfigError for another extension, MissingPackageError where there is no ffmpeg, OutputError where the file
    cannot be made.
    """

    def __init__(self, target: str | Path, height: int, width: int, *, fps: float, fragment_frames: int) -> None:
        self.num_frames = 0
        self._path: Path | None = None
        self._is_finished = False
        # A group of pictures is a fragment; without look-ahead every frame is encoded when it comes.
        output = [
            "-an", *H264, "-tune", "zerolatency", "-g", str(fragment_frames), "-flush_packets", "1",
            "-movflags", "+frag_keyframe+empty_moov+default_base_moof", "-f", "mp4",
        ]  # fmt: skip
        if str(target) == STANDARD_OUTPUT:
            self._encoder = VideoEncoder(height, width, fps, [*output, "pipe:1"], stdout=_standard_output())
            return
        self._path = _take_free_name(check_streamable(target))
        try:
            self._encoder = VideoEncoder(height, width, fps, [*output, file_argument(self._path)])
        except BaseException:
            self._path.unlink(missing_ok=True)
            raise

    @property
    def path(self) -> Path | None:
        """Path of the file, with its number; None for standard output."""
        return self._path

    def __enter__(self) -> GrowingClip:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_cut = False
        if not self._is_finished:
            # What came so far is to be in the file, whatever ended the block.
            try:
                self._encoder.finish()
            except OSError:
                is_cut = True
        self._encoder.__exit__(kind, error, trace)
        if self._path is not None and (self.num_frames == 0 or (is_cut and num_frames_in(self._path) == 0)):
            self._path.unlink(missing_ok=True)

    def write(self, frames: numpy.ndarray) -> None:
        """Write the next frames, uint8 RGB [frames, height, width, 3].

        Raises OutputError when they cannot be written: the disk is full, or the reader of the pipe has left.
        """
        if self._encoder.write(frames):
            self.num_frames += len(frames)
            return
        self._finish_encoding()
        raise OutputError(f"{self._name}: ffmpeg ended after {self.num_frames} frames without an error")

    def finish(self, sidecar: Mapping[str, Any]) -> Path | None:
        """Finish after the last frames: the file becomes an ordinary mp4 with the recipe of `sidecar`, which is written
        next to it. Returns its path; None for standard output, which gets neither. Raises OutputError; the frames stay
        then."""
        self._finish_encoding()
        if self._path is None:
            return None
        try:
            with temporary_file(self._path.parent) as media, temporary_file(self._path.parent) as beside:
                copy_with_index_first(self._path, media, embedded_recipe(sidecar["recipe"]))
                beside.write_text(to_json(sidecar, indent=2) + "\n", encoding="ascii")
                with uninterrupted():
                    os.replace(media, self._path)
                    os.replace(beside, sidecar_path(self._path))
        except OSError as error:
            raise OutputError(
                f"cannot finish {self._path}: {error.strerror or error}; its {self.num_frames} frames are in it and "
                "can be played, its recipe is not"
            ) from error
        return self._path

    def _finish_encoding(self) -> None:
        self._is_finished = True
        try:
            self._encoder.finish()
        except BrokenPipeError as error:
            raise OutputError(f"{self._name}: whoever read it has left after {self.num_frames} frames") from error
        except OSError as error:
            # The encoder had taken more than it could write.
            num_kept = 0 if self._path is None else num_frames_in(self._path)
            if num_kept == 0 and self._path is not None:
                # The first fragment was cut: nothing in it can be played.
                self._path.unlink(missing_ok=True)
                raise cannot_write(self._path, error) from error
            kept = f"{num_kept} of the {self.num_frames} frames before are in it and can be played"
            if self._path is None:
                kept = "whoever reads it has what came before"
            raise OutputError(f"cannot write {self._name}: {error.strerror or error}; {kept}") from error

    @property
    def _name(self) -> str:
        return "standard output" if self._path is None else str(self._path)


def check_ffmpeg(name: str) -> None:
    """Raises MissingPackageError where there is no ffmpeg, which writes what grows. name: what asks for it."""
    find_ffmpeg(name, f"leave it out and choose a format without it: --format {without_ffmpeg()[0]}")


def check_streamable(target: str | Path) -> Path:
    """Check that a file can grow, and return its path. Raises ConfigError for another extension than .mp4."""
    path = Path(target)
    file_format = format_of(path)
    if file_format != "mp4":
        raise ConfigError(
            f"{path}: a {file_format} file cannot be watched while it grows; use a name that ends in .mp4"
        )
    return path


def _take_free_name(target: Path) -> Path:
    """Create an empty file of the target's first numbered name that is free with its sidecar. Raises OutputError."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned_files(target.parent)
        number = 1
        while True:
            path = numbered(target, number)
            if not sidecar_path(path).exists():
                with contextlib.suppress(FileExistsError):
                    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
                    return path
            number += 1
    except OSError as error:
        raise cannot_write(target, error) from error


def _standard_output() -> int:
    """Return the file descriptor of standard output. Raises ConfigError for a terminal, which cannot take an mp4."""
    if os.isatty(sys.stdout.fileno()):
        raise ConfigError("--stream -: standard output is a terminal; pipe it, as in `| ffplay -`, or name a file")
    return sys.stdout.fileno()
