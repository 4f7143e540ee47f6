"""File formats and what each can hold (frames, sound). Plain values: importing this loads no library."""

from __future__ import annotations

import shlex
from pathlib import Path

from diffusion_runtime.errors import ConfigError, nearest, shown

# Of the latents beside a media file (generation/saved_latents.py).
LATENTS_SUFFIX = ".latents.safetensors"
FORMATS = ("mp4", "gif", "webp", "png", "npy")
IMAGE_FORMATS = ("png",)
# Written by ffmpeg; Pillow and numpy write the others.
FORMATS_BY_FFMPEG = ("mp4",)
# Formats that carry the sound of a video with its pictures; with the others it is a separate file.
FORMATS_WITH_SOUND = ("mp4",)
# Sound alone, for models that generate sound.
SOUND_FORMATS = ("wav",)
MAX_GIF_FPS = 50


# Formats of others.
_OTHER_PICTURES = ("jpg", "jpeg", "bmp", "tif", "tiff", "avif", "heic")
_OTHER_VIDEOS = ("mov", "mkv", "webm", "avi", "m4v", "mpg", "mpeg")


def format_of(path: str | Path) -> str:
    """Return the format of a file name's extension. Raises ConfigError if it is not in FORMATS or SOUND_FORMATS."""
    suffix = Path(path).suffix.lower().removeprefix(".")
    if suffix not in (*FORMATS, *SOUND_FORMATS):
        ending = f"the extension {shown('.' + suffix)}" if suffix else "no extension"
        raise ConfigError(
            f"{shown(str(path))} has {ending}; a result ends in {', '.join('.' + name for name in FORMATS)}."
            f"{_instead(path, suffix)}"
        )
    return suffix


def _instead(path: str | Path, suffix: str) -> str:
    """Advise a name for a file of another format."""
    name = shlex.quote(Path(path).stem)
    if suffix in _OTHER_PICTURES:
        return f" One picture is a PNG here: write -o {name}.png --num-frames 1."
    if suffix in _OTHER_VIDEOS:
        return f" A video is an mp4 here: write -o {name}.mp4."
    return nearest(suffix, FORMATS) if suffix else ""


def check_format(
    name: str,
    num_frames: int | None = None,
    *,
    has_sound: bool | None = None,
    fps: float | None = None,
    multiple: int = 1,
) -> str:
    """`name`, when it is a format that holds `num_frames` frames, so many a second, and sound where has_sound is True
    (None: not known yet). multiple: frames of the file for each one of the model's. Else raises ConfigError."""
    plain = name.lower().removeprefix(".")
    if plain not in (*FORMATS, *SOUND_FORMATS):
        raise ConfigError(f"format: unknown value {shown(name)}.{nearest(plain, FORMATS)}")
    if plain in SOUND_FORMATS and has_sound is False:
        raise ConfigError(
            f"format: {plain} holds sound, and this model makes pictures alone; use one of {', '.join(FORMATS)}"
        )
    if plain in IMAGE_FORMATS and num_frames is not None and num_frames > 1:
        others = ", ".join(other for other in FORMATS if other not in IMAGE_FORMATS)
        raise ConfigError(
            f"format: {plain} holds one image, this is a video of {num_frames} frames; "
            f"use one of {others}, or ask for one frame (num_frames=1)"
        )
    if plain == "gif" and fps is not None and fps > MAX_GIF_FPS and num_frames != 1:
        raise ConfigError(
            f"format: gif counts in hundredths of a second, and players show frames of less than two at a tenth of "
            f"their speed: expected at most {MAX_GIF_FPS} frames per second, got {fps}; use webp or mp4, or --fps "
            f"{MAX_GIF_FPS // multiple}"
        )
    return plain


def check_writable(name: str, num_frames: int | None = None) -> None:
    """Check that this machine can write a format that `check_format` passed, for so many frames (None: not known yet).
    Raises MissingPackageError if ffmpeg writes it and is missing."""
    if name not in FORMATS_BY_FFMPEG:
        return
    from diffusion_runtime.media.ffmpeg import find_ffmpeg

    without = without_ffmpeg(num_frames)
    find_ffmpeg(f"format: {name}", f"choose a format without it: {', '.join(without)} (--format {without[0]})")


def without_ffmpeg(num_frames: int | None = None) -> list[str]:
    """Return the formats of pictures that hold so many frames and need no ffmpeg, the most widely played first."""
    is_image = num_frames == 1
    return [name for name in FORMATS if name not in FORMATS_BY_FFMPEG and (is_image or name not in IMAGE_FORMATS)]
