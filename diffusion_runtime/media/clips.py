"""Reads control videos and their masks: the frames of a video file, an animation, an array or a still image.

Files may be untrusted: ffmpeg is told which container to expect and opens no other file; frames of any size are counted
before one is decoded to memory, and scaled one by one.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import subprocess
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy
import numpy.typing

from diffusion_runtime.errors import MissingPackageError, RequestError, first_line
from diffusion_runtime.media.ffmpeg import find_ffmpeg
from diffusion_runtime.media.images import FORMATS, MAX_PIXELS, WHITE, UnfitPicture, frame_in_srgb
from diffusion_runtime.untrusted.files import check_file, named

MAX_CLIP_BYTES = 16 * 1024**3
# Of a frame of a video: twice 8K.
MAX_FRAME_PIXELS = 2 * 7680 * 4320
# More than any video has: for all of its frames.
MAX_FRAMES = 1_000_000
# Seconds for the frames of a clip; decoding 81 frames of 4K takes 5 on two cores.
_TIMEOUT = 600

# Frames of a video that are counted for one of another rate: 30 s at 240 a second.
_MAX_PACED = 7200

# By suffix: what ffmpeg is to expect. A playlist, which names other files, is none of them.
CONTAINERS = {".mp4": "mov", ".m4v": "mov", ".mov": "mov", ".mkv": "matroska", ".webm": "matroska", ".avi": "avi"}
_PICTURES = (".gif", ".webp", ".png", ".apng", ".jpg", ".jpeg")
SUFFIXES = (*CONTAINERS, *_PICTURES, ".npy")


@dataclass(frozen=True)
class ClipFacts:
    """A file's frames. width, height: in pixels, upright; num_frames: at most one more than was asked for, so that a
    longer file is noticed. fps: None if the file does not give it, or has one frame. remarks: what is not used as it is
    in the file."""

    width: int
    height: int
    num_frames: int
    fps: float | None
    remarks: tuple[str, ...] = ()

    @property
    def is_still(self) -> bool:
        return self.num_frames == 1


def inspect_clip(path: str, field: str, most: int) -> ClipFacts:
    """Return the facts of a file, of which at most `most` frames and one more are decoded and none is kept. field: of
    the request, for messages.

    Raises RequestError for a file that is missing, damaged, of no known format or too large, and MissingPackageError
    for a video where there is no ffmpeg.
    """
    source = check_file(path, field, max_bytes=MAX_CLIP_BYTES, error=RequestError)
    state = os.stat(source)
    return _facts(path, field, most, (state.st_ino, state.st_size, state.st_mtime_ns))


def read_clip(
    path: str, field: str, num_frames: int, height: int, width: int, *, grey: bool = False
) -> numpy.typing.NDArray[numpy.uint8]:
    """Read the first frames of a file that `inspect_clip` passed, scaled by Lanczos' filter: uint8, [num_frames,
    height, width, 3], or [num_frames, height, width] of brightness. Raises what it raises, and for fewer frames."""
    from PIL import Image

    facts = inspect_clip(path, field, num_frames)
    frames = []
    with contextlib.closing(_frames(path, field, facts, num_frames)) as pictures:
        for picture in pictures:
            scaled = (picture.convert("L") if grey else picture).resize((width, height), Image.Resampling.LANCZOS)
            frames.append(numpy.asarray(scaled, dtype=numpy.uint8))
    if len(frames) < num_frames:
        raise RequestError(f"{named(field, path)}: expected {num_frames} frames, got {len(frames)}")
    return numpy.stack(frames)


def read_paced(
    path: str, field: str, num_frames: int, fps: float, height: int, width: int
) -> numpy.typing.NDArray[numpy.uint8]:
    """Read a video at another frame rate, at most num_frames: each frame stays until the next one's place, as ffmpeg's
    filter `fps` has it, and those that no place is left for are dropped. Returns uint8, [frames, height, width, 3],
    scaled by Lanczos' filter. Raises what `inspect_clip` raises."""
    from PIL import Image

    facts, repeats = paced(path, field, num_frames, fps)
    size, frames = (width, height), list[numpy.typing.NDArray[numpy.uint8]]()
    with contextlib.closing(_frames(path, field, facts, len(repeats))) as pictures:
        for picture, times in zip(pictures, repeats, strict=False):
            if times:
                scaled = picture if picture.size == size else picture.resize(size, Image.Resampling.LANCZOS)
                frames += [numpy.asarray(scaled, dtype=numpy.uint8)] * times
    return numpy.stack(frames[:num_frames])


def paced(path: str, field: str, num_frames: int, fps: float) -> tuple[ClipFacts, tuple[int, ...]]:
    """Return the facts of a file, and how often each of its first frames comes in its first num_frames at another frame
    rate. A file without a rate has that one. Raises what `inspect_clip` raises."""
    facts = inspect_clip(path, field, num_frames)
    scale = 1.0 if facts.fps is None else fps / facts.fps
    if scale < 1:
        # It takes more of its frames for the same time.
        facts = inspect_clip(path, field, min(math.ceil((num_frames + 1) / scale), _MAX_PACED))
        scale = fps / (facts.fps or fps)
    slots = [math.floor(index * scale + 0.5) for index in range(facts.num_frames + 1)]
    return facts, tuple(stop - start for start, stop in itertools.pairwise(slots) if start < num_frames)


def each_picture(path: str, field: str, most: int) -> Iterator[Any]:
    """Yield the first frames of a file as Pillow's RGB images of its own size, `most` or as many as there are. Raises
    what `inspect_clip` raises."""
    facts = inspect_clip(path, field, most)
    with contextlib.closing(_frames(path, field, facts, most)) as pictures:
        yield from pictures


def read_pictures(path: str, field: str, most: int) -> list[Any]:
    """Return the frames that each_picture yields."""
    return list(each_picture(path, field, most))


class FrameCursor:
    """The frames of one file, read from one place to the next without decoding it again: of a video that is used piece
    by piece. Frames before the last start are dropped.

    Raises what `inspect_clip` raises, and RequestError for a file that has fewer frames.
    """

    def __init__(self, path: str, field: str) -> None:
        self.path = path
        self._field = field
        self._facts = inspect_clip(path, field, MAX_FRAMES)
        self._pictures: Generator[Any, None, None] | None = None
        # Frames that were read, the first of which is _first.
        self._first = 0
        self._kept: list[numpy.typing.NDArray[numpy.uint8]] = []

    def read(self, start: int, count: int) -> numpy.typing.NDArray[numpy.uint8]:
        """Return frames of the file's own size, uint8, [count, height, width, 3]."""
        if self._pictures is None or start < self._first:
            self.close()
            self._pictures = _frames(self.path, self._field, self._facts, self._facts.num_frames)
        while self._first + len(self._kept) < start + count:
            picture = next(self._pictures, None)
            if picture is None:
                found = self._first + len(self._kept)
                self.close()
                raise RequestError(
                    f"{named(self._field, self.path)}: expected {start + count} frames, got {found}: it is damaged, "
                    "or has changed meanwhile"
                )
            self._kept.append(numpy.asarray(picture, dtype=numpy.uint8))
            self._drop(start)
        self._drop(start)
        return numpy.stack(self._kept[:count])

    def close(self) -> None:
        """End the reading; a later one begins again."""
        if self._pictures is not None:
            self._pictures.close()
        self._pictures, self._first, self._kept = None, 0, []

    def _drop(self, start: int) -> None:
        dropped = min(start - self._first, len(self._kept))
        if dropped > 0:
            del self._kept[:dropped]
            self._first += dropped


def is_black(path: str, field: str, most: int) -> bool:
    """Return True if no pixel of the first frames, at most `most`, is white. Raises what `inspect_clip` raises."""
    facts, state = inspect_clip(path, field, most), os.stat(path)
    return _is_black(path, field, facts, most, (state.st_ino, state.st_size, state.st_mtime_ns))


@functools.lru_cache(maxsize=64)
def _is_black(path: str, field: str, facts: ClipFacts, most: int, _state: tuple[int, ...]) -> bool:
    with contextlib.closing(_frames(path, field, facts, most)) as pictures:
        return all(picture.convert("L").getextrema()[1] < WHITE for picture in pictures)


# A dry run, the checks of every prompt and the report ask again and again; a changed file is another entry.
@functools.lru_cache(maxsize=64)
def _facts(path: str, field: str, most: int, _state: tuple[int, ...]) -> ClipFacts:
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise RequestError(f"{named(field, path)}: expected a file that ends in {', '.join(SUFFIXES)}")
    with _readable(path, field):
        if suffix in CONTAINERS:
            find_ffmpeg(named(field, path), "give its frames as a .gif, .webp or .npy")
            return _video_facts(path, most)
        if suffix == ".npy":
            array = _array(path)
            return ClipFacts(array.shape[2], array.shape[1], min(array.shape[0], most + 1), None)
        return _animation_facts(path, most)


@contextlib.contextmanager
def _readable(path: str, field: str) -> Iterator[None]:
    try:
        yield
    except UnfitPicture as error:
        raise RequestError(f"{named(field, path)} {error}") from error
    except (RequestError, MissingPackageError):
        raise
    # Any exception: a decoder may raise anything on untrusted bytes.
    except Exception as error:
        kind = Path(path).suffix.lower().removeprefix(".")
        raise RequestError(f"{named(field, path)}: is not a readable {kind}: {first_line(error)}") from error


def _frames(path: str, field: str, facts: ClipFacts, most: int) -> Generator[Any, None, None]:
    """Yield the first frames as Pillow's RGB images."""
    from PIL import Image

    suffix = Path(path).suffix.lower()
    with _readable(path, field):
        if suffix in CONTAINERS:
            yield from _video_frames(path, facts, most)
        elif suffix == ".npy":
            yield from (Image.fromarray(numpy.array(frame)) for frame in itertools.islice(_array(path), most))
        else:
            yield from (frame for frame, _, _ in itertools.islice(_animation(path), most))


def _command(path: str, most: int, *output: str) -> list[str]:
    container = CONTAINERS[Path(path).suffix.lower()]
    return [
        find_ffmpeg(), "-nostdin", "-v", "error", "-protocol_whitelist", "file",
        "-max_pixels", str(MAX_FRAME_PIXELS), "-f", container, "-i", f"file:{Path(path).resolve()}",
        # Every frame once, whatever its time.
        "-map", "0:v:0", "-fps_mode", "passthrough", "-frames:v", str(most),
        "-sws_flags", "bicubic+accurate_rnd+full_chroma_int", "-pix_fmt", "rgb24", *output, "pipe:1",
    ]  # fmt: skip


def _video_facts(path: str, most: int) -> ClipFacts:
    """Read the facts from ffmpeg's list of decoded frames: a header, then each one's stream, times, size, checksum."""
    done = subprocess.run(
        _command(path, most + 1, "-f", "framecrc"), capture_output=True, timeout=_TIMEOUT, start_new_session=True
    )
    lines = done.stdout.decode("ascii", errors="replace").splitlines()
    header = dict(line[1:].split(": ", 1) for line in lines if line.startswith("#") and ": " in line)
    times = [int(line.split(",")[2]) for line in lines if line and not line.startswith("#")]
    if not times or "dimensions 0" not in header:
        messages = done.stderr.decode(errors="replace").strip().splitlines()
        raise ValueError(messages[-1] if messages else "it has no frames")
    width, height = map(int, header["dimensions 0"].split("x"))
    fps = None
    if len(times) > 1 and times[-1] > times[0]:
        fps = float((len(times) - 1) / ((times[-1] - times[0]) * Fraction(header.get("tb 0", "1/1"))))
    # What could not be decoded is missing; frames before it may be enough.
    cut = ("it is damaged: the frames up to there are used",) if done.returncode else ()
    return ClipFacts(width, height, len(times), fps, cut)


def _video_frames(path: str, facts: ClipFacts, most: int) -> Iterator[Any]:
    from PIL import Image

    size = facts.width * facts.height * 3
    command = _command(path, most, "-f", "rawvideo")
    # A session of its own: Ctrl-C reaches this process alone, which then ends ffmpeg.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        assert process.stdout is not None
        try:
            while len(frame := process.stdout.read(size)) == size:
                yield Image.frombytes("RGB", (facts.width, facts.height), frame)
        finally:
            process.kill()


def _animation_facts(path: str, most: int) -> ClipFacts:
    count, milliseconds, size, remarks = 0, 0.0, (0, 0), dict[str, None]()
    for frame, duration, notes in itertools.islice(_animation(path), most + 1):
        count, milliseconds, size = count + 1, milliseconds + duration, frame.size
        remarks.update(dict.fromkeys(notes))
    fps = 1000 * count / milliseconds if count > 1 and milliseconds > 0 else None
    return ClipFacts(*size, count, fps, tuple(remarks))


def _animation(path: str) -> Iterator[tuple[Any, float, tuple[str, ...]]]:
    """Yield every frame of a file that Pillow reads, how long each is shown in milliseconds, and remarks."""
    from PIL import Image, ImageSequence

    with Image.open(path, formats=FORMATS) as image:
        if image.width * image.height > min(MAX_PIXELS, MAX_FRAME_PIXELS):
            raise ValueError(f"{image.width} x {image.height} pixels, more than {min(MAX_PIXELS, MAX_FRAME_PIXELS)}")
        for frame in ImageSequence.Iterator(image):
            converted, remarks = frame_in_srgb(frame)
            yield converted, float(frame.info.get("duration", 0)), remarks


def _array(path: str) -> numpy.typing.NDArray[numpy.uint8]:
    # Memory-mapped, so that a header that claims terabytes costs nothing; never a pickle.
    array = numpy.load(path, mmap_mode="r", allow_pickle=False)
    if not isinstance(array, numpy.ndarray) or array.dtype != numpy.uint8 or array.ndim != 4 or array.shape[3] != 3:
        raise ValueError("expected uint8 frames [num_frames, height, width, 3]")
    if not math.prod(array.shape[:3]) or array.shape[1] * array.shape[2] > MAX_FRAME_PIXELS:
        raise ValueError(f"frames of {array.shape[2]} x {array.shape[1]}, {array.shape[0]} of them")
    return array
