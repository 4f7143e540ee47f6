"""Condition of SCAIL-2: images, a driving video of half the clip's size and their masks, and the frames that a segment
begins with.

A mask becomes a channel for white and each colour at each frame of a latent frame: the share of the pixels of a latent.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import numpy
import torch
import torch.nn.functional as F

from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.denoising.segments import Segment
from diffusion_runtime.media.clips import each_picture
from diffusion_runtime.media.images import open_picture
from diffusion_runtime.models.character_masks import CLASSES, ON, covering
from diffusion_runtime.models.interface import ImageCondition
from diffusion_runtime.models.reference_images import Size
from diffusion_runtime.models.wan.driven_condition import DrivenConditioner, as_video
from diffusion_runtime.request.generation_request import GenerationRequest, image_paths

# Height and width of the published model's clips, of an image that is not higher than wide.
_SIDES = (512, 896)
_ON = (ON - 127.5) / 127.5


def size_of_image(size: Size) -> Size:
    """Return the height and width of the clip that is made of an image of another size: upright or lying."""
    return _SIDES if size[0] <= size[1] else (_SIDES[1], _SIDES[0])


class Scail2Conditioner(DrivenConditioner):
    """Conditioner of images and a driving video with their masks.

    The condition's latents are those of the known frames behind a mask of these; further are the driving video and the
    images, the first image last, each behind it the latents of its mask.
    """

    def condition_of(self, request: GenerationRequest, size: ClipSize, segment: Segment) -> ImageCondition:
        driving = [
            F.avg_pool2d(_read(str(path), field, segment, size), 2)
            for field, path in (("video_path", request.video_path), ("mask_path", request.mask_path))
        ]
        images, masks = (
            [_pictures([open_picture(path, field)], size) for path in image_paths(request, field)]
            for field in ("image_path", "image_mask_path")
        )
        encoded = [self.encoder.encode_frames(each) for each in images]
        latents = self.encoder.encode_frames(driving[0])
        given = [self._with_mask(image, mask) for image, mask in zip(encoded, masks, strict=True)]
        known = encoded[0].new_zeros(1, encoded[0].shape[1], latents.shape[2], *encoded[0].shape[3:])
        if self.before is not None:
            before = self.encoder.encode_frames(self.before)
            known[:, :, : before.shape[2]] = before
        return ImageCondition(
            torch.cat([self.known_frames(known, segment.num_shared), known], dim=1),
            self.embed(images[0][:, 0]),
            # Further images are earlier in time than the first.
            further=(self._with_mask(latents, driving[1]), torch.cat([*given[1:], given[0]], dim=2)),
        )

    def _with_mask(self, latents: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return latents [1, channels, frames, height, width] before those of their mask, whose pixels are [3, frames,
        height, width] in [-1, 1]."""
        on = mask > _ON
        classes = torch.tensor(CLASSES, dtype=torch.bool)[:, :, None, None, None]
        shares = F.interpolate((on == classes).all(dim=1).float(), size=latents.shape[-2:], mode="area")
        # The first latent frame is one frame, which fills all of its channels.
        whole = torch.cat([shares[:, :1].expand(-1, self.temporal_factor - 1, -1, -1), shares], dim=1)
        packed = torch.unflatten(whole, 1, (-1, self.temporal_factor)).permute(2, 0, 1, 3, 4).flatten(0, 1)
        return torch.cat([latents, packed[None].to(latents)], dim=1)


def _read(path: str, field: str, segment: Segment, size: ClipSize) -> torch.Tensor:
    """Return a segment's frames of a video, [3, frames, height, width] in [-1, 1]."""
    stop = segment.start + segment.num_frames
    return _pictures(itertools.islice(each_picture(path, field, stop), segment.start, stop), size)


def _pictures(pictures: Iterable[Any], size: ClipSize) -> torch.Tensor:
    return as_video([numpy.asarray(covering(picture, size.height, size.width)) for picture in pictures])
