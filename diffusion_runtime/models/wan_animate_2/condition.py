"""Condition of Wan-Animate 2: the reference image as a frame before the clip, the clip's known frames, and the driving
video.

All are scaled to the clip's size with their own ratio of the sides, on black. The condition has a channel for each
frame of a latent frame, 1 where it is known, and the encoded frames; the driving video's latents come behind it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy
import numpy.typing
import torch
import torch.nn.functional as F

from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.core.model_folder import AnyFolder
from diffusion_runtime.denoising.segments import Segment
from diffusion_runtime.media.clips import each_picture
from diffusion_runtime.media.images import open_picture
from diffusion_runtime.models.driving_video import pasted
from diffusion_runtime.models.interface import ImageCondition, ImageConditioner
from diffusion_runtime.models.reference_images import Size
from diffusion_runtime.models.wan.codec import WanImageConditioner, as_pixels, load_image_conditioner
from diffusion_runtime.report.attention_report import LibraryAttention
from diffusion_runtime.request.generation_request import GenerationRequest, image_paths
from diffusion_runtime.text_encoders.clip import ClipImageEncoder, load_clip_image_encoder

# Of CLIP's image encoders.
_MEAN, _STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
# Pixels of the published model's clips, of any ratio, and what their sides are multiples of.
_PIXELS, _MULTIPLE = 800 * 640, 16


def size_of_image(size: Size) -> Size:
    """Return the height and width of the clip that is made of an image of another size."""
    height, width = (max(1, side // _MULTIPLE) for side in size)
    sides = math.sqrt(_PIXELS * (height / width)), math.sqrt(_PIXELS / (height / width))
    return max(1, int(sides[0]) // _MULTIPLE) * _MULTIPLE, max(1, int(sides[1]) // _MULTIPLE) * _MULTIPLE


class WanAnimate2Conditioner(ImageConditioner):
    """Conditioner of a reference image and a driving video. encoder: of clips. tokens: the image encoder, None in a
    model without one. segment, before: as of ImageConditioner.of_segment, of a longer video."""

    def __init__(
        self,
        encoder: WanImageConditioner,
        temporal_factor: int,
        tokens: ClipImageEncoder | None = None,
        *,
        segment: Segment | None = None,
        before: torch.Tensor | None = None,
    ) -> None:
        self._encoder = encoder
        self._temporal_factor = temporal_factor
        self._tokens = tokens
        self._segment = segment
        self._before = before

    @property
    def libraries(self) -> tuple[LibraryAttention, ...]:
        own = self._tokens
        mine = () if own is None else (LibraryAttention("image_encoder", own.library, own.implementation),)
        return (*self._encoder.libraries, *mine)

    def fast(self) -> WanAnimate2Conditioner:
        return WanAnimate2Conditioner(self._encoder.fast(), self._temporal_factor, self._tokens)

    def of_segment(self, segment: Segment, before: torch.Tensor | None) -> WanAnimate2Conditioner:
        return WanAnimate2Conditioner(
            self._encoder, self._temporal_factor, self._tokens, segment=segment, before=before
        )

    def condition(self, request: GenerationRequest, size: ClipSize) -> ImageCondition:
        assert request.video_path is not None, "the rules require a driving video"
        (path,) = image_paths(request, "image_path")
        image = _as_video([_on_black(open_picture(path), size, "BICUBIC")])
        segment = Segment(0, 0, size.num_frames, 0, size.num_frames) if self._segment is None else self._segment
        wanted = frames_of(segment)
        pictures = each_picture(request.video_path, "video_path", segment.num_frames_of_video)
        # One by one: a video may be long, and its frames large.
        scaled = {
            index: _on_black(picture, size, "BILINEAR")
            for index, picture in enumerate(itertools.islice(pictures, max(wanted) + 1))
            if index == 0 or index in wanted
        }
        driving = _as_video([scaled[frame] for frame in wanted])
        frame, video = self._encoder.encode_frames(image), self._encoder.encode_frames(driving)
        known = self._with_mask(frame, 1)
        # What is not known is grey.
        frames = torch.zeros_like(driving)
        if self._before is not None:
            frames[:, : segment.num_shared] = self._before.to(frames)
        clip = self._with_mask(self._encoder.encode_frames(frames), segment.num_shared)
        condition = torch.cat([known, clip], dim=2)
        behind = torch.cat([torch.zeros_like(frame), video], dim=2)
        return ImageCondition(torch.cat([condition, behind], dim=1), self._embed(image, _as_video([scaled[0]])))

    def _with_mask(self, latents: torch.Tensor, num_known: int) -> torch.Tensor:
        """Return latents behind their mask, [1, factor + channels, frames, height, width]. num_known: the first frames,
        in pixels, that are known."""
        factor, (_, _, num_latents, height, width) = self._temporal_factor, latents.shape
        # The first latent frame is one frame, which fills all of its channels.
        places = torch.arange(num_latents * factor, device=latents.device) - (factor - 1)
        known = (places.clamp_min(0) < num_known).to(latents.dtype).view(num_latents, factor)
        mask = known.t()[None, :, :, None, None].expand(1, factor, num_latents, height, width)
        return torch.cat([mask, latents], dim=1)

    def _embed(self, image: torch.Tensor, driving: torch.Tensor) -> torch.Tensor | None:
        """Return the image encoder's tokens of the reference image, then of the driving video's first frame."""
        encoder = self._tokens
        if encoder is None:
            return None
        return torch.cat([encoder.tokens(_prepared(each[:, 0])) for each in (image, driving)], dim=1)


def frames_of(segment: Segment) -> list[int]:
    """Return the frames of the driving video that a segment is driven by: beyond its end, it runs backwards."""
    frames = range(segment.start, segment.start + segment.num_frames)
    last = segment.num_frames_of_video - 1
    return [frame if frame <= last else 2 * last + 1 - frame for frame in frames]


def _on_black(picture: Any, size: ClipSize, resample: str) -> numpy.typing.NDArray[numpy.uint8]:
    """Return a picture in the middle of the clip's size, [height, width, 3]."""
    from PIL import Image

    return numpy.asarray(pasted(picture, size.height, size.width, Image.Resampling[resample]))


def _as_video(frames: Sequence[numpy.typing.NDArray[numpy.uint8]]) -> torch.Tensor:
    """Return frames as the encoder takes them, [3, frames, height, width] in [-1, 1]."""
    return as_pixels(torch.from_numpy(numpy.stack(frames)))


def _prepared(pixels: torch.Tensor) -> torch.Tensor:
    """Return [1, 3, 224, 224] of CLIP, from [3, height, width] in [-1, 1]. Without antialiasing, as in training."""
    scaled = F.interpolate(pixels[None], size=(224, 224), mode="bicubic", align_corners=False)
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (_MEAN, _STD))
    return (scaled * 0.5 + 0.5 - mean) / std


def load_conditioner(
    folder: AnyFolder, device: torch.device, dtype: torch.dtype, *, temporal_factor: int, has_tokens: bool
) -> WanAnimate2Conditioner:
    """Load a diffusers folder's `vae` encoder, and with has_tokens its `image_encoder`. Raises ModelLoadError."""
    tokens = load_clip_image_encoder(folder, device, dtype, prepares=False) if has_tokens else None
    encoder = load_image_conditioner(folder, device, dtype, one_frame=False)
    return WanAnimate2Conditioner(encoder, temporal_factor, tokens)
