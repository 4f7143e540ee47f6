"""Input of VACE's control blocks: the kept part of a control video, the regenerated part, and the mask.

Channels: the latents of the video with the regenerated part in grey; those with the kept part in grey; and one channel
of the mask for each pixel of a latent's square, at the frame in the middle of a latent frame. Reference images come
before, on white, with a second half of zeros and an empty mask; the last image comes first, as in diffusers.
"""

from __future__ import annotations

import numpy
import torch
import torch.nn.functional as F

from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.media.clips import inspect_clip, read_clip
from diffusion_runtime.media.images import open_picture
from diffusion_runtime.models.interface import ImageCondition, ImageConditioner
from diffusion_runtime.models.video_control import VideoControl
from diffusion_runtime.models.wan.codec import WanImageConditioner, as_pixels
from diffusion_runtime.report.attention_report import LibraryAttention
from diffusion_runtime.request.generation_request import GenerationRequest, image_paths


class WanControlConditioner(ImageConditioner):
    """Conditioner of control videos. encoder: of clips."""

    def __init__(self, encoder: WanImageConditioner, control: VideoControl) -> None:
        self._encoder = encoder
        self._control = control

    @property
    def libraries(self) -> tuple[LibraryAttention, ...]:
        return self._encoder.libraries

    def fast(self) -> WanControlConditioner:
        return WanControlConditioner(self._encoder.fast(), self._control)

    def condition(self, request: GenerationRequest, size: ClipSize) -> ImageCondition:
        """Return the condition. Without a control video everything is regenerated."""
        latents, mask = self._video(request, size)
        for path in image_paths(request, "image_path"):
            reference = self._encoder.encode_frames(self._on_white(path, size)[:, None])
            empty = mask.new_zeros(*mask.shape[:2], 1, *mask.shape[3:])
            latents = torch.cat([torch.cat([reference, torch.zeros_like(reference)], dim=1), latents], dim=2)
            mask = torch.cat([empty, mask], dim=2)
        return ImageCondition(torch.cat([latents, mask.to(latents.device)], dim=1))

    def _video(self, request: GenerationRequest, size: ClipSize) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the two encoded parts [1, 2 * channels, frames, height, width], and the mask's channels."""
        sides = size.num_frames, size.height, size.width
        mask = torch.ones(sides)
        if request.video_path is None:
            # Both parts are grey.
            latents = self._encoder.encode_frames(torch.zeros(3, *sides))
            return torch.cat([latents, latents], dim=1), self._packed(mask)
        pixels = as_pixels(_read(request.video_path, "video_path", sides))
        if request.mask_path is not None:
            mask = _read(request.mask_path, "mask_path", sides, grey=True).float().div(255)
        anew = (mask > 0.5).float()
        parts = [self._encoder.encode_frames(pixels * part) for part in (1 - anew, anew)]
        return torch.cat(parts, dim=1), self._packed(mask)

    def _packed(self, mask: torch.Tensor) -> torch.Tensor:
        """Map [frames, height, width] in pixels to [1, factor * factor, latent frames, latent height, latent width]."""
        geometry = self._control.geometry
        frames, height, width = mask.shape
        factor = geometry.spatial_factor
        squares = mask.view(frames, height // factor, factor, width // factor, factor).permute(2, 4, 0, 1, 3)
        latent_frames = (frames - 1) // geometry.temporal_factor + 1
        sides = latent_frames, height // factor, width // factor
        return F.interpolate(squares.flatten(0, 1)[None], size=sides, mode="nearest-exact")

    def _on_white(self, path: str, size: ClipSize) -> torch.Tensor:
        """Return a reference image in the middle of the clip's size, [3, height, width] in [-1, 1]."""
        from PIL import Image

        picture = open_picture(path)
        whole, inside = self._control.scaled_sizes(picture.size, path, size)
        pixels = as_pixels(torch.from_numpy(numpy.array(picture.resize(whole, Image.Resampling.LANCZOS))))
        canvas = torch.ones(3, size.height, size.width)
        top, left = (size.height - inside[0]) // 2, (size.width - inside[1]) // 2
        scaled = F.interpolate(pixels[None], size=inside, mode="bilinear", align_corners=False)[0]
        canvas[:, top : top + inside[0], left : left + inside[1]] = scaled
        return canvas


def _read(path: str, field: str, sides: tuple[int, int, int], *, grey: bool = False) -> torch.Tensor:
    """Read uint8 [frames, height, width, 3], or without the last axis; one frame is repeated for the clip."""
    frames, height, width = sides
    count = 1 if inspect_clip(path, field, frames).is_still else frames
    read = torch.from_numpy(read_clip(path, field, count, height, width, grey=grey))
    return read.expand(frames, *read.shape[1:])
