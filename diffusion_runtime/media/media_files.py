"""Media files of any kind: whether one is an image, a video or a sound, by its content, and the facts of each.

Files may be untrusted: ffmpeg, which lists the streams of a container, is told which one to expect and opens no other
file.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from diffusion_runtime.errors import RequestError
from diffusion_runtime.media.audio import CONTAINERS as SOUND_CONTAINERS
from diffusion_runtime.media.clips import CONTAINERS as CLIP_CONTAINERS
from diffusion_runtime.media.clips import MAX_CLIP_BYTES, inspect_clip
from diffusion_runtime.media.ffmpeg import find_ffmpeg
from diffusion_runtime.media.images import inspect_picture
from diffusion_runtime.untrusted.files import check_file, named, open_file
from diffusion_runtime.untrusted.media_kinds import ALIKE, HEAD_BYTES, PICTURES, SOUNDS, container_of

IMAGE, VIDEO, SOUND = KINDS = ("image", "video", "sound")
# Nouns of several files of a kind.
PLURALS = {IMAGE: "images", VIDEO: "videos", SOUND: "sounds"}
_TIMEOUT = 60
# A line of ffmpeg's list of streams: "  Stream #0:1[0x2](und): Audio: aac (LC), 22050 Hz, mono, fltp (default)". Lines
# of a file's own texts go on behind a colon.
_STREAM = re.compile(r"\s+Stream #0:\d+[^:]*: (?P<kind>Video|Audio): (?P<facts>.*)")
_RATE = re.compile(r"\b(\d{3,7}) Hz\b")


@dataclass(frozen=True)
class MediaFile:
    """A file of a known kind. path: as it was given. sound_rate: samples a second of its sound, None without one;
    is_mono: whether that has one channel."""

    path: str
    kind: str
    sound_rate: int | None = None
    is_mono: bool = False


def media_file(path: str, field: str) -> MediaFile:
    """Return the kind of a file by its content, and the rate of its sound; a picture of several frames is a video.
    field: of the request, for messages.

    Raises RequestError for a file that is missing, damaged, of no known container, or under the name of another
    one, and MissingPackageError for a container of streams where there is no ffmpeg.
    """
    source = check_file(path, field, max_bytes=MAX_CLIP_BYTES, error=RequestError)
    state = os.stat(source)
    return _media_file(path, field, (state.st_ino, state.st_size, state.st_mtime_ns))


# The rules, the plan of memory, the text encoder and the conditioner ask for the same; a changed file is another entry.
@functools.lru_cache(maxsize=256)
def _media_file(path: str, field: str, _state: tuple[int, ...]) -> MediaFile:
    with open_file(path, field, max_bytes=MAX_CLIP_BYTES, error=RequestError) as file:
        found = container_of(file.read(HEAD_BYTES))
    if found is None:
        raise RequestError(
            f"{named(field, path)}: expected an image (PNG, JPEG, WebP, GIF), a video (mp4, mov, mkv, webm, avi) or a "
            "sound (wav, flac, mp3, ogg, m4a); its content is none of them"
        )
    suffix = Path(path).suffix.lower()
    if found in PICTURES:
        if found != ".jpg" and _moves(path, field, suffix):
            return MediaFile(path, VIDEO)
        inspect_picture(path, field)
        return MediaFile(path, IMAGE)
    # The readers of videos and sounds go by the name.
    if ALIKE.get(suffix, suffix) != found:
        raise RequestError(f"{named(field, path)}: its content is that of a {found} file; expected its name to end so")
    if found == ".npy":
        return MediaFile(path, VIDEO)
    return _of_streams(path, field, is_sound=found in SOUNDS)


def _moves(path: str, field: str, suffix: str) -> bool:
    """Return whether a picture has several frames; of a file without the name of a picture, the first one counts."""
    is_named = ALIKE.get(suffix, suffix) in PICTURES
    return is_named and not inspect_clip(path, field, 1).is_still


def _of_streams(path: str, field: str, *, is_sound: bool) -> MediaFile:
    """Return the kind of a container by its streams; the picture of a cover is no video. is_sound: it holds sound
    alone."""
    suffix = Path(path).suffix.lower()
    container = SOUND_CONTAINERS[suffix] if is_sound else CLIP_CONTAINERS.get(suffix) or SOUND_CONTAINERS[suffix]
    command = [
        find_ffmpeg(named(field, path)), "-hide_banner", "-nostdin", "-protocol_whitelist", "file",
        "-f", container, "-i", f"file:{Path(path).resolve()}",
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT, start_new_session=True)
    except subprocess.TimeoutExpired as error:
        raise RequestError(f"{named(field, path)}: was not read within {_TIMEOUT} seconds") from error
    lines = done.stderr.decode(errors="replace").splitlines()
    streams = [(found["kind"], found["facts"]) for found in map(_STREAM.match, lines) if found]
    videos = [facts for kind, facts in streams if kind == "Video" and "(attached pic)" not in facts]
    sounds = [facts for kind, facts in streams if kind == "Audio"]
    rate = _RATE.search(sounds[0]) if sounds else None
    if (is_sound or not videos) and rate is None:
        why = lines[-1] if lines and not streams else "it has neither pictures nor sound"
        raise RequestError(f"{named(field, path)}: is not readable as a video or a sound: {why}")
    kind = SOUND if is_sound or not videos else VIDEO
    if rate is None:
        return MediaFile(path, kind)
    return MediaFile(path, kind, int(rate[1]), is_mono=" mono," in f" {sounds[0]},")
