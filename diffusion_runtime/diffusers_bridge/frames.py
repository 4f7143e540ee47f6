"""Converts the result of a diffusers pipeline to uint8 frames and sound."""

from __future__ import annotations

from typing import Any

import numpy
import numpy.typing
import torch

from diffusion_runtime.errors import DiffusionRuntimeError
from diffusion_runtime.media.audio import Audio

# The result fields of pipelines, in the order in which they are tried.
VIDEO_FIELDS = ("frames", "video", "videos")
PICTURE_FIELDS = (*VIDEO_FIELDS, "images", "image")


def frames_of(result: Any, pipeline_class: str) -> numpy.typing.NDArray[numpy.uint8]:
    """Return uint8 [num_frames, height, width, 3], of the first sample.

    Raises DiffusionRuntimeError when the pipeline made neither images nor a video, or numbers that are not finite.
    """
    returned = {field: getattr(result, field, None) for field in PICTURE_FIELDS}
    field = next((field for field, value in returned.items() if value is not None), None)
    if field is None:
        raise DiffusionRuntimeError(
            f"{pipeline_class} returned {type(result).__name__} with none of {', '.join(PICTURE_FIELDS)}; it cannot be "
            "saved here"
        )
    array = _array(_sample(returned[field]) if field in VIDEO_FIELDS else returned[field])
    if array.ndim == 5:
        array = array[0]
    if array.ndim == 3:
        array = array[None]
    if array.ndim != 4:
        raise DiffusionRuntimeError(f"{pipeline_class} returned frames of shape {list(array.shape)}; cannot save them")
    if array.shape[-1] not in (1, 3, 4) and array.shape[1] in (1, 3, 4):
        array = array.transpose(0, 2, 3, 1)
    if array.shape[-1] == 1:
        array = array.repeat(3, axis=-1)
    return _bytes(array[..., :3], pipeline_class)


def _sample(frames: Any) -> Any:
    """Return the first video: a list of lists, or one dimension more than a video has."""
    if isinstance(frames, list | tuple) and frames and isinstance(frames[0], list | tuple | numpy.ndarray):
        return frames[0]
    return frames


def _array(frames: Any) -> numpy.typing.NDArray[Any]:
    if isinstance(frames, torch.Tensor):
        return frames.detach().float().cpu().numpy()
    if isinstance(frames, list | tuple):
        return numpy.stack([_picture(picture) for picture in frames])
    return numpy.asarray(frames)


def _picture(picture: Any) -> numpy.typing.NDArray[Any]:
    from PIL import Image

    if isinstance(picture, Image.Image):
        return numpy.asarray(picture.convert("RGB"))
    return _array(picture)


def _bytes(array: numpy.typing.NDArray[Any], pipeline_class: str) -> numpy.typing.NDArray[numpy.uint8]:
    """Convert frames in [0, 1] or uint8 to uint8."""
    if array.dtype == numpy.uint8:
        return numpy.ascontiguousarray(array)
    if not numpy.isfinite(array).all():
        raise DiffusionRuntimeError(
            f"{pipeline_class} made numbers that are not finite: they overflowed, or the weights are damaged. Use "
            "dtype float32 or bfloat16, or copy the model again"
        )
    return numpy.ascontiguousarray((array.astype(numpy.float32) * 255).round().clip(0, 255).astype(numpy.uint8))


def sound_of(result: Any, pipeline: Any) -> tuple[Audio | None, list[str]]:
    """Return the sound of the first sample, None when there is none or it cannot be written, and remarks about that.

    Pipelines return samples alone; the sample rate is known where a vocoder has one.
    """
    audio = getattr(result, "audio", None)
    if audio is None:
        return None, []
    vocoder = getattr(pipeline, "vocoder", None)
    sample_rate = None if vocoder is None else vocoder.config.get("output_sampling_rate")
    samples = audio.detach().float().cpu().numpy() if isinstance(audio, torch.Tensor) else numpy.asarray(audio)
    if samples.ndim == 3:
        samples = samples[0]
    if type(sample_rate) is not int or samples.ndim != 2:
        return None, ["the pipeline made sound as well, which is not written: its sample rate is unknown"]
    return Audio(numpy.ascontiguousarray(samples.astype(numpy.float32).clip(-1.0, 1.0)), sample_rate), []
