"""An image as it is after H.264: models trained on frames of compressed videos expect one to start from to have the
same traces (LTX-2's `image_crf`; ltx_pipelines/utils/media_io.py)."""

from __future__ import annotations

import subprocess

import numpy
import numpy.typing

from diffusion_runtime.errors import RequestError
from diffusion_runtime.media.ffmpeg import find_ffmpeg, run_on_bytes

# Of H.264's largest level, pixels of a side; x264 refuses more.
MAX_SIDE = 16384
# BT.601 in the limited range and bilinear chroma, as PyAV, by which diffusers does this, converts frames by default.
_SCALING = "scale=flags=bilinear"

# A number of slices that does not follow the machine's cores: the same image gives the same pixels everywhere. PyAV
# 18.1 gives the same bytes where it has two.
_THREADS = ("-threads", "2", "-thread_type", "slice")


def check_recompression(width: int, height: int, path: str, field: str) -> None:
    """Raises RequestError for an image that H.264 cannot hold, and MissingPackageError where there is no ffmpeg. field:
    of the request, for messages."""
    if not 2 <= min(width, height) <= max(width, height) <= MAX_SIDE:
        raise RequestError(
            f"{field}: {path} is {width} x {height} (width x height); expected sides of 2 to {MAX_SIDE} pixels for "
            "the compression of images; scale it, or turn that off: --image-crf 0"
        )
    find_ffmpeg(f"{field}: {path}: the compression of images", "turn that off: --image-crf 0")


def recompress(image: numpy.typing.NDArray[numpy.uint8], crf: int) -> numpy.typing.NDArray[numpy.uint8]:
    """Return the pixels of an image [height, width, 3] after one H.264 frame at this constant rate factor, 1 (hardly
    changed) to 51; odd sides lose a row or a column. 0 gives the image itself.

    Raises RequestError, and MissingPackageError where there is no ffmpeg.
    """
    if crf == 0:
        return image
    height, width = (side // 2 * 2 for side in image.shape[:2])
    pixels = numpy.ascontiguousarray(image[:height, :width])
    raw = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", "1", "-i", "pipe:0"]
    encoder = ["-c:v", "libx264", "-preset", "veryfast", "-crf", str(crf), "-pix_fmt", "yuv420p", *_THREADS]
    try:
        stream = run_on_bytes([*raw, "-vf", _SCALING, *encoder, "-f", "h264", "pipe:1"], pixels.tobytes())
        decoded = run_on_bytes(
            [
                "-f",
                "h264",
                "-i",
                "pipe:0",
                "-vf",
                _SCALING,
                "-frames:v",
                "1",
                "-pix_fmt",
                "rgb24",
                "-f",
                "rawvideo",
                "pipe:1",
            ],
            stream,
        )
        return numpy.frombuffer(decoded, numpy.uint8).reshape(height, width, 3)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise RequestError(
            f"image_crf: the image cannot be compressed: {error}; turn that off: --image-crf 0"
        ) from error
