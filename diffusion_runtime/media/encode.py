"""Encoders: frames to file bytes, one function per format. Frames are uint8 RGB [num_frames, height, width, 3].

Frames may come in chunks, as they are decoded. Each function writes to a path that exists already and raises OSError
when that fails, a full disk included.
"""

from __future__ import annotations

import contextlib
import errno
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy

from diffusion_runtime.media.audio import Audio
from diffusion_runtime.media.publish import temporary_file
from diffusion_runtime.media.sidecar import RECIPE_KEY

if TYPE_CHECKING:
    from PIL import Image

# x264's constant rate factor: 16 is visually lossless for most material, at about twice the size of the usual 23.
MP4_RATE_FACTOR = 16
# AAC in stereo: a higher bit rate makes no audible difference.
AUDIO_BIT_RATE = "192k"
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
        """All of them at once."""
        num_frames, height, width = frames.shape[:3]
        return cls(num_frames, height, width, [frames])

    def images(self) -> Iterator[Image.Image]:
        from PIL import Image

        return (Image.fromarray(frame) for chunk in self.chunks for frame in numpy.ascontiguousarray(chunk))


def encode(
    file_format: str, frames: FrameChunks, fps: int, recipe: str | None, path: Path, audio: Audio | None = None
) -> None:
    """Write `frames` to `path` in a format of FORMATS; `recipe` is ASCII text to carry along, None for none.

    audio: for the formats of FORMATS_WITH_SOUND alone.
    """
    if audio is None:
        _ENCODERS[file_format](frames, fps, recipe, path)
    else:
        _ENCODERS_WITH_SOUND[file_format](frames, fps, recipe, path, audio)


def _write_mp4(frames: FrameChunks, fps: int, recipe: str | None, path: Path, audio: Audio | None = None) -> None:
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
        layout = ["-f", "s16le", "-ar", str(audio.sample_rate), "-ac", str(audio.num_channels)]
        yield (
            [*layout, "-i", str(samples)],
            ["-map", "0:v", "-map", "1:a", "-c:a", "aac", "-b:a", AUDIO_BIT_RATE],
        )


def _run_ffmpeg(
    frames: FrameChunks, fps: int, recipe: str | None, path: Path, sound: list[str], sound_track: list[str]
) -> None:
    """sound, sound_track: of _sound_arguments."""
    import imageio_ffmpeg

    height, width = frames.height + frames.height % 2, frames.width + frames.width % 2
    comment = [] if recipe is None else ["-metadata", f"comment={recipe}"]
    # The conversion and the three tags name the same colour matrix; without them players guess one by the picture's
    # size.
    colour = ["-vf", "scale=out_color_matrix=bt709:out_range=tv"]
    colour += ["-colorspace", "bt709", "-color_primaries", "bt709", "-color_trc", "bt709"]
    command = [
        imageio_ffmpeg.get_ffmpeg_exe(), "-y", "-nostdin", "-v", "error",
        "-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", str(fps), "-i", "pipe:0",
        *sound, *colour, *sound_track,
        "-c:v", "libx264", "-preset", "medium", "-crf", str(MP4_RATE_FACTOR), "-pix_fmt", "yuv420p",
        "-movflags", "+faststart+use_metadata_tags", *comment, "-f", "mp4", str(path),
    ]  # fmt: skip
    # A session of its own: Ctrl-C reaches this process alone, which then ends ffmpeg and removes the file.
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )
    messages: list[bytes] = []
    assert process.stdin is not None
    assert process.stderr is not None
    # Read meanwhile: a program whose messages nobody reads stops in the middle.
    reader = threading.Thread(target=_read_all, args=(process.stderr, messages), daemon=True)
    reader.start()
    with process:
        try:
            # What ended ffmpeg early stands in its messages.
            with contextlib.suppress(BrokenPipeError):
                for chunk in frames.chunks:
                    process.stdin.write(_even(chunk).data)
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            process.wait()
        except BaseException:
            process.kill()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            raise
        finally:
            reader.join()
    if process.returncode != 0:
        lines = b"".join(messages).decode(errors="replace").strip().splitlines()
        if any("No space left" in line for line in lines):
            raise OSError(errno.ENOSPC, "no space left on the disk")
        message = f": {lines[-1]}" if lines else ", without a message"
        raise OSError(errno.EIO, f"ffmpeg {_ended_by(process.returncode)}{message}")


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


def _write_gif(frames: FrameChunks, fps: int, recipe: str | None, path: Path) -> None:
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


def _write_webp(frames: FrameChunks, fps: int, recipe: str | None, path: Path) -> None:
    """An animated WebP, or a still one for a single frame. Times are in thousandths of a second."""
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


def _write_png(frames: FrameChunks, _fps: int, recipe: str | None, path: Path) -> None:
    from PIL.PngImagePlugin import PngInfo

    texts = PngInfo()
    if recipe is not None:
        texts.add_text(RECIPE_KEY, recipe)
    next(frames.images()).save(path, format="PNG", pnginfo=texts)


def _write_npy(frames: FrameChunks, _fps: int, _recipe: str | None, path: Path) -> None:
    """The frames as they are. The format has no room for a recipe; the sidecar has it."""
    shape = (frames.num_frames, frames.height, frames.width, 3)
    with path.open("wb") as file:
        # Header and bytes are written by hand: numpy.save hides why a write failed.
        header = {"descr": "|u1", "fortran_order": False, "shape": shape}
        numpy.lib.format.write_array_header_1_0(file, header)
        for chunk in frames.chunks:
            file.write(numpy.ascontiguousarray(chunk).data)


_ENCODERS: dict[str, Callable[[FrameChunks, int, str | None, Path], None]] = {
    "mp4": _write_mp4,
    "gif": _write_gif,
    "webp": _write_webp,
    "png": _write_png,
    "npy": _write_npy,
}
_ENCODERS_WITH_SOUND: dict[str, Callable[[FrameChunks, int, str | None, Path, Audio], None]] = {"mp4": _write_mp4}


def _durations(num_frames: int, fps: int, per_second: int) -> list[int]:
    """How long each frame is shown, in 1/per_second seconds: rounded so that the total has the right length."""
    ends = [round((index + 1) * per_second / fps) for index in range(num_frames)]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]
