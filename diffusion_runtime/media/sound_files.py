"""Reads sound files, or the sound of video files, as samples of a wanted rate: by ffmpeg, which is told what to expect,
opens no other file, and decodes no more than the seconds that are asked for."""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path

import numpy

from diffusion_runtime.errors import RequestError
from diffusion_runtime.media.audio import Audio
from diffusion_runtime.media.ffmpeg_program import find_ffmpeg
from diffusion_runtime.untrusted.files import check_file, named

MAX_SOUND_BYTES = 2 * 1024**3
# Longer than any clip; 1 minute of two channels at 48 kHz takes 23 MB.
MAX_SECONDS = 600.0
NUM_CHANNELS = 2
_TIMEOUT = 300
# By suffix: what ffmpeg is to expect. A playlist, which names other files, is none of them.
_CONTAINERS = {
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


def read_sound(path: str, field: str, seconds: float, sample_rate: int) -> Audio:
    """Read the first `seconds` of a file that `check_sound` passed, in two channels (one is both), resampled by
    ffmpeg's filter where the file has another rate; silence where it ends before. Raises what it raises."""
    check_file(path, field, max_bytes=MAX_SOUND_BYTES, error=RequestError)
    samples, count = _decoded(path, field, seconds, sample_rate), round(seconds * sample_rate)
    missing = max(0, count - samples.shape[1])
    return Audio(numpy.ascontiguousarray(numpy.pad(samples, ((0, 0), (0, missing)))[:, :count]), sample_rate)


# A dry run, the checks of every prompt and the pipeline ask again and again; a changed file is another entry.
@functools.lru_cache(maxsize=64)
def _seconds(path: str, field: str, most: float, _state: tuple[int, ...]) -> float:
    rate = 8000
    return float(_decoded(path, field, most, rate).shape[1]) / rate


def _decoded(path: str, field: str, seconds: float, sample_rate: int) -> numpy.ndarray:
    """float32 [channels, samples]."""
    container = _CONTAINERS.get(Path(path).suffix.lower())
    if container is None:
        raise RequestError(f"{named(field, path)}: expected a file that ends in {', '.join(_CONTAINERS)}")
    if seconds > MAX_SECONDS:
        raise RequestError(f"{named(field, path)}: expected at most {MAX_SECONDS:g} seconds, got {seconds:g}")
    command = [
        find_ffmpeg(named(field, path)), "-nostdin", "-v", "error", "-protocol_whitelist", "file",
        "-f", container, "-i", f"file:{Path(path).resolve()}", "-map", "0:a:0", "-t", f"{seconds:.6f}",
        "-ac", str(NUM_CHANNELS), "-ar", str(sample_rate), "-f", "f32le", "pipe:1",
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT, start_new_session=True)
    except subprocess.TimeoutExpired as error:
        raise RequestError(f"{named(field, path)}: was not decoded within {_TIMEOUT} seconds") from error
    samples = numpy.frombuffer(done.stdout[: len(done.stdout) // 8 * 8], "<f4").reshape(-1, NUM_CHANNELS).T
    if not samples.size or not numpy.isfinite(samples).all():
        messages = done.stderr.decode(errors="replace").strip().splitlines()
        why = messages[-1] if messages else "it has no sound"
        raise RequestError(f"{named(field, path)}: is not readable as sound: {why}")
    return samples.astype(numpy.float32).clip(-1.0, 1.0)
