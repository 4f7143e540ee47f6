"""Condition of Wan-Animate 2: the reference image as a frame before the clip, the clip's known frames, and the driving
video.

All are scaled to the clip's size with their own ratio of the sides, on black. The condition has a channel for each
frame of a latent frame, 1 where it is known, and the encoded frames; the driving video's latents come behind it.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy
import numpy.typing
import torch

from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.denoising.segments import Segment
from diffusion_runtime.media.clips import each_picture
from diffusion_runtime.media.images import open_picture
from diffusion_runtime.models.driving_video import pasted
from diffusion_runtime.models.interface import ImageCondition
from diffusion_runtime.models.reference_images import Size
from diffusion_runtime.models.wan.driven_condition import DrivenConditioner, as_video
from diffusion_runtime.request.generation_request import GenerationRequest, image_paths

# Pixels of the published model's clips, of any ratio, and what their sides are multiples of.
_PIXELS, _MULTIPLE = 800 * 640, 16


def size_of_image(size: Size) -> Size:
    """Return the height and width of the clip that is made of an image of another size."""
    height, width = (max(1, side // _MULTIPLE) for side in size)
    sides = math.sqrt(_PIXELS * (height / width)), math.sqrt(_PIXELS / (height / width))
    return max(1, int(sides[0]) // _MULTIPLE) * _MULTIPLE, max(1, int(sides[1]) // _MULTIPLE) * _MULTIPLE


class WanAnimate2Conditioner(DrivenConditioner):
    """Conditioner of a reference image and a driving video."""

    def condition_of(self, request: GenerationRequest, size: ClipSize, segment: Segment) -> ImageCondition:
        assert request.video_path is not None, "the rules require a driving video"
        (path,) = image_paths(request, "image_path")
        image = as_video([_on_black(open_picture(path), size, "BICUBIC")])
        wanted = frames_of(segment)
        pictures = each_picture(request.video_path, "video_path", segment.num_frames_of_video)
        # One by one: a video may be long, and its frames large.
        scaled = {
            index: _on_black(picture, size, "BILINEAR")
            for index, picture in enumerate(itertools.islice(pictures, max(wanted) + 1))
            if index == 0 or index in wanted
        }
        driving = as_video([scaled[frame] for frame in wanted])
        frame, video = self.encoder.encode_frames(image), self.encoder.encode_frames(driving)
        known = torch.cat([self.known_frames(frame, 1), frame], dim=1)
        # What is not known is grey.
        frames = torch.zeros_like(driving)
        if self.before is not None:
            frames[:, : segment.num_shared] = self.before.to(frames)
        encoded = self.encoder.encode_frames(frames)
        clip = torch.cat([self.known_frames(encoded, segment.num_shared), encoded], dim=1)
        condition = torch.cat([known, clip], dim=2)
        behind = torch.cat([torch.zeros_like(frame), video], dim=2)
        # Of the reference image, then of the driving video's first frame.
        tokens = self.embed(image[:, 0], as_video([scaled[0]])[:, 0])
        return ImageCondition(torch.cat([condition, behind], dim=1), tokens)


def frames_of(segment: Segment) -> list[int]:
    """Return the frames of the driving video that a segment is driven by: beyond its end, it runs backwards."""
    frames = range(segment.start, segment.start + segment.num_frames)
    last = segment.num_frames_of_video - 1
    return [frame if frame <= last else 2 * last + 1 - frame for frame in frames]


def _on_black(picture: Any, size: ClipSize, resample: str) -> numpy.typing.NDArray[numpy.uint8]:
    """Return a picture in the middle of the clip's size, [height, width, 3]."""
    from PIL import Image

    return numpy.asarray(pasted(picture, size.height, size.width, Image.Resampling[resample]))
