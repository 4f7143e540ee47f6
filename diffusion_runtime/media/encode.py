"""Encoders: frames to file bytes, one function per format. Frames are uint8 RGB [num_frames, height, width, 3].

Frames may come in chunks, as they are decoded. Each function writes to a path that exists already and raises OSError
when that fails, a full disk included.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy

from diffusion_runtime.media.audio import Audio
from diffusion_runtime.media.ffmpeg import H264, VideoEncoder, comment_arguments, file_argument
from diffusion_runtime.media.publish import temporary_file
from diffusion_runtime.media.sidecar import RECIPE_KEY

if TYPE_CHECKING:
    from PIL import Image

logger = logging.getLogger("diffusion_runtime")

# AAC in stereo: a higher bit rate makes no audible difference.
AUDIO_BIT_RATE = "192k"
# In Hz, of ISO/IEC 14496-3; the encoder resamples others.
AAC_RATES = (7350, 8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000, 64000, 88200, 96000)
WEBP_QUALITY = 90
# EXIF's ImageDescription: the one text field that every reader supports.
EXIF_DESCRIPTION = 0x010E


@dataclass(frozen=True)
class FrameChunks:
    """The frames of a clip in their order, to be read once. chunks: [frames, height, width, 3] each."""

    num_frames: int
    height: int
    width: int
    chunks: Iterable[numpy.ndarray]

    @classmethod
    def of(cls, frames: numpy.ndarray) -> FrameChunks:
        """Encode all frames at once."""
        num_frames, height, width = frames.shape[:3]
        return cls(num_frames, height, width, [frames])

    def images(self) -> Iterator[Image.Image]:
        from PIL import Image

        return (Image.fromarray(frame) for chunk in self.chunks for frame in numpy.ascontiguousarray(chunk))


def encode(
    file_format: str, frames: FrameChunks, fps: float, recipe: str | None, path: Path, audio: Audio | None = None
) -> None:
    """Write `frames` to `path` in a format of FORMATS; `recipe` is ASCII text to carry along, None for none.

    audio: for the formats of FORMATS_WITH_SOUND alone.
    """
    if audio is None:
        _ENCODERS[file_format](frames, fps, recipe, path)
    else:
        _ENCODERS_WITH_SOUND[file_format](frames, fps, recipe, path, audio)


def _write_mp4(frames: FrameChunks, fps: float, recipe: str | None, path: Path, audio: Audio | None = None) -> None:
    """H.264 in 4:2:0, which every player supports, and AAC. Sizes must be even: an odd edge is repeated once, never
    cropped."""
    with _sound_arguments(audio, path.parent) as (sound, sound_track):
        _run_ffmpeg(frames, fps, recipe, path, sound, sound_track)


@contextlib.contextmanager
def _sound_arguments(audio: Audio | None, folder: Path) -> Iterator[tuple[list[str], list[str]]]:
    """ffmpeg's arguments for a second input and for the audio track made from it, while the input exists."""
    if audio is None:
        yield [], ["-an"]
        return
    with temporary_file(folder) as samples:
        samples.write_bytes(audio.interleaved().astype("<i2").tobytes())
        rate = next((rate for rate in AAC_RATES if rate >= audio.sample_rate), AAC_RATES[-1])
        if rate != audio.sample_rate:
            logger.warning("mp4: AAC has no sound of %d Hz: it is resampled to %d Hz", audio.sample_rate, rate)
        layout = ["-f", "s16le", "-ar", str(audio.sample_rate), "-ac", str(audio.num_channels)]
        yield (
            [*layout, "-i", file_argument(samples)],
            ["-map", "0:v", "-map", "1:a", "-c:a", "aac", "-ar", str(rate), "-b:a", AUDIO_BIT_RATE],
        )


def _run_ffmpeg(
    frames: FrameChunks, fps: float, recipe: str | None, path: Path, sound: list[str], sound_track: list[str]
) -> None:
    """sound, sound_track: of _sound_arguments."""
    output = [
        *sound_track, *H264,
        "-movflags", "+faststart+use_metadata_tags", *comment_arguments(recipe), "-f", "mp4", file_argument(path),
    ]  # fmt: skip
    with VideoEncoder(frames.height, frames.width, fps, output, inputs=sound) as encoder:
        for chunk in frames.chunks:
            if not encoder.write(chunk):
                break
        encoder.finish()


def _write_gif(frames: FrameChunks, fps: float, recipe: str | None, path: Path) -> None:
    """256 colours, chosen per frame. Times are in hundredths of a second."""
    images = frames.images()
    comment = {} if recipe is None else {"comment": recipe.encode("ascii")}
    next(images).save(
        path,
        format="GIF",
        save_all=True,
        append_images=images,
        duration=[10 * hundredths for hundredths in _durations(frames.num_frames, fps, per_second=100)],
        loop=0,
        **comment,
    )


def _write_webp(frames: FrameChunks, fps: float, recipe: str | None, path: Path) -> None:
    """Write an animated WebP, or a still one for a single frame. Times are in thousandths of a second."""
    from PIL import Image

    images = frames.images()
    exif = Image.Exif()
    if recipe is not None:
        exif[EXIF_DESCRIPTION] = recipe
    next(images).save(
        path,
        format="WEBP",
        save_all=frames.num_frames > 1,
        append_images=images,
        duration=_durations(frames.num_frames, fps, per_second=1000),
        loop=0,
        quality=WEBP_QUALITY,
        exif=exif.tobytes(),
    )


def _write_png(frames: FrameChunks, _fps: float, recipe: str | None, path: Path) -> None:
    from PIL.PngImagePlugin import PngInfo

    texts = PngInfo()
    if recipe is not None:
        texts.add_text(RECIPE_KEY, recipe)
    next(frames.images()).save(path, format="PNG", pnginfo=texts)


def _write_npy(frames: FrameChunks, _fps: float, _recipe: str | None, path: Path) -> None:
    """Write the frames as they are. The format has no room for a recipe; the sidecar has it."""
    shape = (frames.num_frames, frames.height, frames.width, 3)
    with path.open("wb") as file:
        # Header and bytes are written by hand: numpy.save hides why a write failed.
        header = {"descr": "|u1", "fortran_order": False, "shape": shape}
        numpy.lib.format.write_array_header_1_0(file, header)
        for chunk in frames.chunks:
            file.write(numpy.ascontiguousarray(chunk).data)


_ENCODERS: dict[str, Callable[[FrameChunks, float, str | None, Path], None]] = {
    "mp4": _write_mp4,
    "gif": _write_gif,
    "webp": _write_webp,
    "png": _write_png,
    "npy": _write_npy,
}
_ENCODERS_WITH_SOUND: dict[str, Callable[[FrameChunks, float, str | None, Path, Audio], None]] = {"mp4": _write_mp4}


def _durations(num_frames: int, fps: float, per_second: int) -> list[int]:
    """Return how long each frame is shown, in 1/per_second seconds, rounded so that the total has the right length."""
    ends = [round((index + 1) * per_second / fps) for index in range(num_frames)]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]
