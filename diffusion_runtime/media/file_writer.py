"""FileWriter: a thread encodes the frames of a clip into its file while the next ones are decoded."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

import numpy

from diffusion_runtime.errors import OutputError
from diffusion_runtime.media.encode import FrameChunks, encode
from diffusion_runtime.media.formats import SOUND_FORMATS, check_format, check_writable, format_of
from diffusion_runtime.media.publish import cannot_write, remove_abandoned_files, temporary_file
from diffusion_runtime.media.sidecar import RECIPE_SCHEMA, embedded_recipe

# Chunks of frames that wait for the encoder; a decoder that is farther ahead waits. One latent frame's frames each: 32
# are a clip of 125 frames of Wan. They are views of the frames that are kept anyway, and take no memory of their own.
MAX_WAITING = 32
_SECONDS_BETWEEN_LOOKS = 0.1


@dataclass(frozen=True)
class ClipHeader:
    """Header of a clip, known before its first frame: its size in frames and pixels, fps in frames per second, and the
    recipe of GeneratedMedia, whose `schema` is added when it is missing."""

    num_frames: int
    height: int
    width: int
    fps: float
    recipe: Mapping[str, Any]

    def __post_init__(self) -> None:
        object.__setattr__(self, "recipe", {"schema": RECIPE_SCHEMA, **self.recipe})


# Takes the next frames of a clip, uint8 RGB [frames, height, width, 3], which must not be changed afterwards.
FrameSink: TypeAlias = Callable[[numpy.ndarray], object]
# Called with the index of a request and its clip's header, when its first frames are decoded.
OpenSink: TypeAlias = Callable[[int, ClipHeader], FrameSink]


class FileWriter:
    """The media file of one clip, written under a temporary name while the clip is decoded. A context manager: at its
    end the temporary file is gone, unless GeneratedMedia.save has given it its name.

        with FileWriter("clip.mp4") as writer:
            media = pipeline(request, open_sink=writer.open)
            media.save("clip.mp4", writer=writer)

    A file of sound alone (.wav) is not begun; `save` writes it. stops_decoding: a failure to write is an OutputError
    of the decoding that hands over the next frames. With False it waits for `save`: a process that decodes together
    with others must not leave them alone.

    Raises ConfigError for an extension that is no format, and MissingPackageError for an mp4 where there is no ffmpeg.
    """

    def __init__(self, path: str | Path, *, stops_decoding: bool = True) -> None:
        self._target = Path(path)
        self._format = format_of(self._target)
        check_writable(self._format)
        self._stops_decoding = stops_decoding
        self._files = contextlib.ExitStack()
        self._waiting: queue.Queue[numpy.ndarray | None] = queue.Queue(MAX_WAITING)
        self._thread: threading.Thread | None = None
        self._header: ClipHeader | None = None
        self._path: Path | None = None
        self._failure: BaseException | None = None
        self._is_abandoned = False

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._abandon()

    def open(self, _request_index: int, header: ClipHeader) -> FrameSink:
        """Open an OpenSink, for the first clip that comes. Raises OutputError where the folder cannot be written."""
        if self._header is not None or self._format in SOUND_FORMATS:
            return lambda _: None
        check_format(self._format, header.num_frames, fps=header.fps)
        self._header = header
        try:
            self._target.parent.mkdir(parents=True, exist_ok=True)
            remove_abandoned_files(self._target.parent)
            self._path = self._files.enter_context(temporary_file(self._target.parent))
        except OSError as error:
            self._fail(error)
            return lambda _: None
        self._thread = threading.Thread(target=self._encode, args=(self._path, header), name="file writer", daemon=True)
        self._thread.start()
        return self._hand_over

    def has_written(self, header: ClipHeader, file_format: str, folder: Path) -> bool:
        """Return True if the written frames, size, rate, recipe, format and folder are these, so that `finish` gives
        the file of this clip."""
        return (self._header, self._format, self._target.parent) == (header, file_format, folder)

    def finish(self) -> Path:
        """Return the temporary file, once every frame is in it. Raises OSError when writing failed."""
        self._put(None)
        if self._thread is not None:
            self._thread.join()
        if self._failure is not None:
            raise self._failure
        assert self._path is not None
        return self._path

    def _hand_over(self, frames: numpy.ndarray) -> None:
        self._put(frames)
        if self._failure is not None:
            self._fail(self._failure)

    def _put(self, frames: numpy.ndarray | None) -> None:
        while self._failure is None:
            # With a limit: the thread may fail while the queue is full.
            with contextlib.suppress(queue.Full):
                self._waiting.put(frames, timeout=_SECONDS_BETWEEN_LOOKS)
                return

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        if self._stops_decoding:
            raise cannot_write(self._target, error) if isinstance(error, OSError) else error

    def _abandon(self) -> None:
        """End the thread, and remove the temporary file where it still has its name."""
        self._is_abandoned = True
        if self._thread is not None:
            while self._thread.is_alive():
                with contextlib.suppress(queue.Empty):
                    self._waiting.get_nowait()
                with contextlib.suppress(queue.Full):
                    self._waiting.put_nowait(None)
                self._thread.join(_SECONDS_BETWEEN_LOOKS)
        self._files.close()

    def _encode(self, path: Path, header: ClipHeader) -> None:
        frames = FrameChunks(header.num_frames, header.height, header.width, self._frames())
        try:
            encode(self._format, frames, header.fps, embedded_recipe(header.recipe), path)
        except _Abandoned:
            return
        except BaseException as error:  # whatever it is belongs to the thread that made the frames
            self._failure = error

    def _frames(self) -> Iterator[numpy.ndarray]:
        """Yield frames one at a time, so that an encoder notices soon that its file is no longer wanted."""
        num_frames = 0
        while (chunk := self._waiting.get()) is not None:
            for index in range(len(chunk)):
                if self._is_abandoned:
                    raise _Abandoned
                yield chunk[index : index + 1]
            num_frames += len(chunk)
        if self._is_abandoned:
            raise _Abandoned
        assert self._header is not None
        if num_frames != self._header.num_frames:
            raise OutputError(f"{self._target}: expected {self._header.num_frames} frames, got {num_frames}")


class _Abandoned(Exception):
    """Raised in the thread."""
