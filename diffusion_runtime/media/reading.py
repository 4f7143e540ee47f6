"""Reads generated files and their sidecars back. They may be untrusted: only JSON and numbers are read from them."""

from __future__ import annotations

import warnings
import wave
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from diffusion_runtime.errors import OutputError, first_line
from diffusion_runtime.media.encode import EXIF_DESCRIPTION
from diffusion_runtime.media.formats import FORMATS, SOUND_FORMATS
from diffusion_runtime.media.mp4_boxes import read_mp4
from diffusion_runtime.media.sidecar import RECIPE_KEY, RECIPE_SCHEMA, parse_recipe, read_sidecar, sidecar_path
from diffusion_runtime.untrusted.files import check_file, check_path

# An hour of video in high quality; decoding a longer one would need more memory than that.
MAX_MEDIA_BYTES = 64 * 1024**3

_KNOWN_FORMATS = (*FORMATS, *SOUND_FORMATS)
_SOUND_SUFFIXES = tuple(f".{name}" for name in SOUND_FORMATS)


@dataclass(frozen=True)
class MediaFile:
    """One generated file: its format and size, and its recipe.

    width, height, num_frames: 0 for sound alone. fps: None when neither the format nor a recipe holds it. recipe,
    attention_report, timings: None when neither the file nor its sidecar has them. audio: of a file of sound, and of
    one whose sidecar records sound in it or next to it: sample_rate, num_channels, seconds, is_beside.
    """

    path: Path
    format: str
    width: int
    height: int
    num_frames: int
    fps: float | None
    num_bytes: int
    recipe: Mapping[str, Any] | None
    attention_report: Mapping[str, Any] | None
    timings: Mapping[str, Any] | None
    audio: Mapping[str, Any] | None = None


def read_recipe(path: str | Path, key: str = "") -> dict[str, Any]:
    """Read the recipe of a generated file: the one inside it, else the one in its sidecar; `path` may be a sidecar
    itself.

    key: the flag that named it, for messages.

    Raises OutputError when the file is broken or has none, and ConfigError for one that is missing or may not be read.
    """
    source = check_path(path, key)
    if source.suffix.lower() in (".json", *_SOUND_SUFFIXES):
        check_file(source, key)
        # A sound file has no room for a recipe.
        sidecar = read_sidecar(sidecar_path(source))
        recipe = None if sidecar is None else _recipe_of(sidecar)
    else:
        recipe = None if (found := read_media_file(source, key).recipe) is None else dict(found)
    if recipe is None:
        raise OutputError(
            f"{source} carries no recipe of this program, and neither does {sidecar_path(source).name} beside it; "
            f"give a file that `diffusion-runtime generate` wrote"
        )
    return recipe


def read_media_file(path: str | Path, key: str = "", also: Sequence[str] = ()) -> MediaFile:
    """Read the metadata of a media file and its sidecar. key: the flag that named it, for messages; also: extensions of
    other files that the caller takes.

    Raises OutputError when the file is broken, and ConfigError for one that is missing or may not be read.
    """
    source = check_path(path, key)
    file_format = source.suffix.lower().removeprefix(".")
    check_file(source, key, max_bytes=None if file_format == "npy" else MAX_MEDIA_BYTES)
    if file_format not in _KNOWN_FORMATS:
        known = ", ".join((*(f".{name}" for name in _KNOWN_FORMATS), *also))
        raise OutputError(f"{source}: expected a file that ends in {known}")
    try:
        facts = _READERS[file_format](source)
    except OSError as error:
        raise OutputError(f"cannot read {source}: {error.strerror or 'it is not a ' + file_format}") from error
    except Exception as error:  # any exception: a decoder may raise anything on untrusted bytes
        raise OutputError(f"{source} is not a readable {file_format}: {first_line(error)}") from error
    sidecar = read_own_sidecar(source) or {}
    recipe = parse_recipe(facts.recipe) or _recipe_of(sidecar)
    return MediaFile(
        path=source,
        format=file_format,
        width=facts.width,
        height=facts.height,
        num_frames=facts.num_frames,
        fps=_written_fps(sidecar, facts.num_frames) or facts.fps,
        num_bytes=source.stat().st_size,
        recipe=recipe,
        attention_report=_mapping(sidecar.get("attention_report")),
        timings=_mapping(sidecar.get("timings")),
        audio=facts.audio or _mapping((_mapping(sidecar.get("file")) or {}).get("audio")),
    )


def read_own_sidecar(path: Path) -> dict[str, Any] | None:
    """Read the sidecar that was written with the media file `path`, which need not exist any more; None when there is
    none, or when it belongs to another file: all formats of a name share one. Raises OutputError when it is unreadable.
    """
    sidecar = read_sidecar(sidecar_path(path)) or {}
    written = _mapping(sidecar.get("file")) or {}
    if written.get("format") == path.suffix.lower().removeprefix("."):
        return sidecar
    return sidecar if path.suffix.lower() in _SOUND_SUFFIXES and has_sound_beside(sidecar) else None


def has_sound_beside(sidecar: Mapping[str, Any]) -> bool:
    """Return True if the sound of a sidecar's file is in a .wav of the same name."""
    audio = _mapping((_mapping(sidecar.get("file")) or {}).get("audio")) or {}
    return audio.get("is_beside") is True


@dataclass(frozen=True)
class _Facts:
    width: int
    height: int
    num_frames: int
    fps: float | None
    recipe: str | bytes | None
    audio: Mapping[str, Any] | None = None


def _read_mp4(path: Path) -> _Facts:
    facts = read_mp4(path)
    return _Facts(facts.width, facts.height, facts.num_frames, facts.fps, facts.comment)


def _read_image(path: Path) -> _Facts:
    """GIF, WebP and PNG, by Pillow; implausibly large images are refused by Pillow's own limit."""
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        with Image.open(path, formats=[path.suffix.lower().removeprefix(".").upper()]) as image:
            num_frames = getattr(image, "n_frames", 1)
            milliseconds = 0.0
            for index in range(num_frames if num_frames > 1 else 0):
                image.seek(index)
                image.load()
                milliseconds += float(image.info.get("duration", 0))
            image.seek(0)
            fps = 1000.0 * num_frames / milliseconds if milliseconds > 0 else None
            return _Facts(image.width, image.height, num_frames, fps, _image_comment(image))


def _image_comment(image: Any) -> str | bytes | None:
    if image.format == "WEBP":
        comment = image.getexif().get(EXIF_DESCRIPTION)
    else:
        comment = image.info.get(RECIPE_KEY if image.format == "PNG" else "comment")
    return comment if isinstance(comment, str | bytes) else None


def _read_npy(path: Path) -> _Facts:
    # Memory-mapped, so that a header that claims terabytes costs nothing; never a pickle.
    array = numpy.load(path, mmap_mode="r", allow_pickle=False)
    if not isinstance(array, numpy.ndarray) or array.dtype != numpy.uint8 or array.ndim != 4 or array.shape[3] != 3:
        raise ValueError("expected uint8 frames [num_frames, height, width, 3]")
    return _Facts(array.shape[2], array.shape[1], array.shape[0], None, None)


def _read_wav(path: Path) -> _Facts:
    with path.open("rb") as opened, wave.open(opened, "rb") as file:
        rate = file.getframerate()
        seconds = round(file.getnframes() / rate, 4) if rate else 0.0
        audio = {"sample_rate": rate, "num_channels": file.getnchannels(), "seconds": seconds, "is_beside": False}
        return _Facts(0, 0, 0, None, None, audio)


_READERS: dict[str, Callable[[Path], _Facts]] = {
    "mp4": _read_mp4,
    "gif": _read_image,
    "webp": _read_image,
    "png": _read_image,
    "npy": _read_npy,
    "wav": _read_wav,
}


def _mapping(value: object) -> Mapping[str, Any] | None:
    return value if isinstance(value, dict) else None


def _recipe_of(sidecar: Mapping[str, Any]) -> dict[str, Any] | None:
    recipe = sidecar.get("recipe")
    return recipe if isinstance(recipe, dict) and recipe.get("schema") == RECIPE_SCHEMA else None


def _written_fps(sidecar: Mapping[str, Any], num_frames: int) -> float | None:
    fps = (_mapping(sidecar.get("file")) or {}).get("fps")
    return float(fps) if isinstance(fps, int | float) and fps > 0 and num_frames > 1 else None
