"""Audio: the sound of a video, the .wav file that holds it alone, and sound files as samples of a wanted rate.

ffmpeg reads these: it is told what to expect, opens no other file, and decodes no more than the seconds asked for.
"""

from __future__ import annotations

import functools
import os
import subprocess
import wave
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from diffusion_runtime.errors import MissingPackageError, OutputError, RequestError
from diffusion_runtime.media.ffmpeg import find_ffmpeg
from diffusion_runtime.untrusted.files import check_file, named

# The largest 16-bit sample.
_FULL_SCALE = 32767


@dataclass(frozen=True, eq=False)
class Audio:
    """samples: float32 [channels, num_samples] in [-1, 1]; sample_rate: samples per second.

    Raises OutputError when the samples have another shape or type, or are not finite.
    """

    samples: numpy.ndarray
    sample_rate: int

    def __post_init__(self) -> None:
        shape = self.samples.shape
        if self.samples.dtype != numpy.float32 or len(shape) != 2 or 0 in shape:
            raise OutputError(
                f"audio: expected float32 [channels, num_samples], got {self.samples.dtype} {list(shape)}"
            )
        if not numpy.isfinite(self.samples).all():
            raise OutputError("audio: the samples are not finite: numbers overflowed, or the weights are damaged")
        if type(self.sample_rate) is not int or self.sample_rate < 1:
            raise OutputError(f"sample_rate: expected a whole number of 1 or more, got {self.sample_rate!r}")

    @property
    def num_channels(self) -> int:
        return int(self.samples.shape[0])

    @property
    def seconds(self) -> float:
        return float(self.samples.shape[1]) / self.sample_rate

    def describe(self) -> dict[str, Any]:
        """Plain values, as a sidecar holds them."""
        return {
            "sample_rate": self.sample_rate,
            "num_channels": self.num_channels,
            "seconds": round(self.seconds, 4),
        }

    def interleaved(self) -> numpy.ndarray:
        """int16 [num_samples, channels]: interleaved, as players and encoders read it. Values beyond 1 are clipped."""
        scaled = (self.samples.clip(-1.0, 1.0) * _FULL_SCALE).round().astype(numpy.int16)
        return numpy.ascontiguousarray(scaled.T)


def crossfaded(sounds: Sequence[Audio], starts: Sequence[float], overlap: float, seconds: float) -> Audio:
    """Return sounds of one rate as one of a length, each from its start on, in seconds; over the overlap at its start
    the one before fades out."""
    rate, (num_channels, _) = sounds[0].sample_rate, sounds[0].samples.shape
    whole = numpy.zeros((num_channels, round(seconds * rate)), dtype=numpy.float32)
    num_shared = round(overlap * rate)
    for index, (sound, start) in enumerate(zip(sounds, starts, strict=True)):
        place = whole[:, round(start * rate) :][:, : sound.samples.shape[1]]
        weights = numpy.ones(place.shape[1], dtype=numpy.float32)
        if index:
            rising = numpy.linspace(0, 1, num_shared + 2, dtype=numpy.float32)[1:-1]
            weights[:num_shared] = rising[: len(weights)]
        place[:] = place * (1 - weights) + sound.samples[:, : place.shape[1]] * weights
    return Audio(whole, rate)


def write_wav(audio: Audio, path: Path) -> None:
    """16-bit PCM. Raises OSError."""
    with path.open("wb") as file, wave.open(file, "wb") as out:
        out.setnchannels(audio.num_channels)
        out.setsampwidth(2)
        out.setframerate(audio.sample_rate)
        out.writeframes(audio.interleaved().astype("<i2").tobytes())


MAX_SOUND_BYTES = 2 * 1024**3
# Longer than any clip; 1 minute of two channels at 48 kHz takes 23 MB.
MAX_SECONDS = 600.0
NUM_CHANNELS = 2
_TIMEOUT = 300
# By suffix: what ffmpeg is to expect. A playlist, which names other files, is none of them.
CONTAINERS = {
    **{".wav": "wav", ".flac": "flac", ".mp3": "mp3", ".ogg": "ogg", ".oga": "ogg", ".opus": "ogg", ".aac": "aac"},
    **dict.fromkeys((".m4a", ".mp4", ".m4v", ".mov"), "mov"),
    **dict.fromkeys((".mkv", ".webm"), "matroska"),
}


def check_sound(path: str, field: str, seconds: float) -> None:
    """Raises RequestError for a file that is missing, damaged, of no known format, or shorter than `seconds`, and
    MissingPackageError where there is no ffmpeg. field: of the request, for messages."""
    source = check_file(path, field, max_bytes=MAX_SOUND_BYTES, error=RequestError)
    state = os.stat(source)
    found = _seconds(path, field, min(seconds + 1.0, MAX_SECONDS), (state.st_ino, state.st_size, state.st_mtime_ns))
    # A latent of sound is 40 ms; what is missing of one is silence.
    if found < seconds - 0.04:
        raise RequestError(
            f"{named(field, path)}: expected at least {seconds:.2f} seconds, those of the clip, got {found:.2f}; use a "
            "longer file, fewer num_frames or a larger fps"
        )


def sound_seconds(path: str, field: str, most: float) -> float:
    """Return the seconds of sound in a file, `most` or as many as there are. Raises what `check_sound` raises."""
    state = os.stat(check_file(path, field, max_bytes=MAX_SOUND_BYTES, error=RequestError))
    return min(most, _seconds(path, field, most, (state.st_ino, state.st_size, state.st_mtime_ns)))


def read_sound_as_it_is(path: str, field: str, seconds: float, sample_rate: int, num_channels: int) -> Audio:
    """Read the first `seconds` of a file, or as many as there are, at its own rate and in its own channels, which are
    two where it has more. Raises what `check_sound` raises."""
    check_file(path, field, max_bytes=MAX_SOUND_BYTES, error=RequestError)
    # ffmpeg rounds the length to packets of the container.
    samples = _decoded(path, field, min(seconds + 0.1, MAX_SECONDS), sample_rate, num_channels=num_channels)
    return Audio(numpy.ascontiguousarray(samples[:, : int(seconds * sample_rate)]), sample_rate)


def read_sound(path: str, field: str, seconds: float, sample_rate: int) -> Audio:
    """Read the first `seconds` of a file that `check_sound` passed, in two channels (one is both), resampled by
    ffmpeg's filter where the file has another rate; silence where it ends before. Raises what it raises."""
    check_file(path, field, max_bytes=MAX_SOUND_BYTES, error=RequestError)
    samples, count = _decoded(path, field, seconds, sample_rate), round(seconds * sample_rate)
    missing = max(0, count - samples.shape[1])
    return Audio(numpy.ascontiguousarray(numpy.pad(samples, ((0, 0), (0, missing)))[:, :count]), sample_rate)


def has_sound(path: str, field: str) -> bool:
    """Return whether a file that can be read as a video has sound; False where there is no ffmpeg."""
    if Path(path).suffix.lower() not in CONTAINERS:
        return False
    try:
        check_file(path, field, max_bytes=None, error=RequestError)
        return _decoded(path, field, 0.1, 8000).size > 0
    except (RequestError, MissingPackageError):
        return False


def read_long_sound(path: str, field: str, start: float, seconds: float, sample_rate: int) -> Audio:
    """Read `seconds` from `start` on as `read_sound` does, however many; silence where the file has none. Raises
    RequestError for a file that is not readable as sound."""
    count, parts, position = round(seconds * sample_rate), list[numpy.ndarray](), 0.0
    while position < seconds:
        length = min(MAX_SECONDS, seconds - position)
        try:
            parts.append(_decoded(path, field, length, sample_rate, start + position))
        except RequestError:
            # The sound is shorter than the pictures.
            if not parts and start == 0:
                raise
            break
        position += length
    samples = numpy.concatenate(parts, axis=1) if parts else numpy.zeros((NUM_CHANNELS, 0), numpy.float32)
    missing = max(0, count - samples.shape[1])
    return Audio(numpy.ascontiguousarray(numpy.pad(samples, ((0, 0), (0, missing)))[:, :count]), sample_rate)


# A dry run, the checks of every prompt and the pipeline ask again and again; a changed file is another entry.
@functools.lru_cache(maxsize=64)
def _seconds(path: str, field: str, most: float, _state: tuple[int, ...]) -> float:
    rate = 8000
    return float(_decoded(path, field, most, rate).shape[1]) / rate


def _decoded(
    path: str, field: str, seconds: float, sample_rate: int, start: float = 0.0, num_channels: int = NUM_CHANNELS
) -> numpy.ndarray:
    """float32 [channels, samples]. start: in seconds."""
    container = CONTAINERS.get(Path(path).suffix.lower())
    if container is None:
        raise RequestError(f"{named(field, path)}: expected a file that ends in {', '.join(CONTAINERS)}")
    if seconds > MAX_SECONDS:
        raise RequestError(f"{named(field, path)}: expected at most {MAX_SECONDS:g} seconds, got {seconds:g}")
    # AAC's first frames behind a place that is sought are lost.
    lead = min(start, 1.0)
    command = [
        find_ffmpeg(named(field, path)), "-nostdin", "-v", "error", "-protocol_whitelist", "file",
        "-f", container, *(("-ss", f"{start - lead:.6f}") if start else ()), "-i", f"file:{Path(path).resolve()}",
        # A sound that begins after the pictures begins with silence.
        "-map", "0:a:0", "-af", "aresample=first_pts=0", *(("-ss", f"{lead:.6f}") if start else ()),
        "-t", f"{seconds:.6f}",
        "-ac", str(num_channels), "-ar", str(sample_rate), "-f", "f32le", "pipe:1",
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT, start_new_session=True)
    except subprocess.TimeoutExpired as error:
        raise RequestError(f"{named(field, path)}: was not decoded within {_TIMEOUT} seconds") from error
    size = 4 * num_channels
    samples = numpy.frombuffer(done.stdout[: len(done.stdout) // size * size], "<f4").reshape(-1, num_channels).T
    if not samples.size or not numpy.isfinite(samples).all():
        messages = done.stderr.decode(errors="replace").strip().splitlines()
        has_none = not messages or any("matches no streams" in each for each in messages)
        why = "it has no sound" if has_none else messages[-1]
        raise RequestError(f"{named(field, path)}: is not readable as sound: {why}")
    return samples.astype(numpy.float32).clip(-1.0, 1.0)
