"""Frames of the video or image that is restored, scaled to the size of what is made."""

from __future__ import annotations

import numpy
import torch
import torch.nn.functional as F

from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.media.clips import FrameCursor
from diffusion_runtime.media.images import open_picture
from diffusion_runtime.request.generation_request import GenerationRequest, image_paths


class SourceFrames:
    """Reader of one request's file, whose segments are read without decoding it again. It stays open as long as the
    reader is there."""

    def __init__(self) -> None:
        self._cursor: FrameCursor | None = None

    def read(self, request: GenerationRequest, start: int, count: int) -> torch.Tensor:
        """Return frames of a resolved request's file at their own size, uint8, [count, height, width, 3]. start: from
        the request's first one. Raises RequestError."""
        if request.video_path is None:
            (path,) = image_paths(request, "image_path")
            return torch.from_numpy(numpy.array(open_picture(path), dtype=numpy.uint8))[None]
        if self._cursor is None:
            self._cursor = FrameCursor(request.video_path, "video_path")
        return torch.from_numpy(self._cursor.read((request.video_first_frame or 0) + start, count))


def scaled(frames: torch.Tensor, size: ClipSize, device: torch.device) -> torch.Tensor:
    """Return frames [count, height, width, 3], uint8, in the size of what is made: float32 in [-1, 1], [count, 3,
    height, width], by a bicubic filter as in training."""
    pixels = frames.to(device).permute(0, 3, 1, 2).float().div_(255.0)
    if pixels.shape[-2:] != (size.height, size.width):
        pixels = F.interpolate(pixels, (size.height, size.width), mode="bicubic", antialias=True).clamp_(0.0, 1.0)
    return pixels.mul_(2.0).sub_(1.0)
