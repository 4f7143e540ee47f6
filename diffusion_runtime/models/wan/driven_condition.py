"""Conditioner of images and a driving video that are encoded with Wan's autoencoder, and seen by CLIP, segment by
segment."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Self

import numpy
import numpy.typing
import torch
import torch.nn.functional as F

from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.core.model_folder import AnyFolder
from diffusion_runtime.denoising.segments import Segment
from diffusion_runtime.models.interface import ImageCondition, ImageConditioner
from diffusion_runtime.models.wan.codec import WanImageConditioner, as_pixels, load_image_conditioner
from diffusion_runtime.report.attention_report import LibraryAttention
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.text_encoders.clip import ClipImageEncoder, load_clip_image_encoder

# Of CLIP's image encoders.
_MEAN, _STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


class DrivenConditioner(ImageConditioner):
    """Conditioner of images and a driving video. encoder: of clips. tokens: the image encoder, None in a model without
    one. segment, before: as of ImageConditioner.of_segment, of a longer video."""

    def __init__(
        self,
        encoder: WanImageConditioner,
        temporal_factor: int,
        tokens: ClipImageEncoder | None = None,
        *,
        segment: Segment | None = None,
        before: torch.Tensor | None = None,
    ) -> None:
        self.encoder = encoder
        self.temporal_factor = temporal_factor
        self.image_encoder = tokens
        self.segment = segment
        self.before = before

    @classmethod
    def load(
        cls,
        folder: AnyFolder,
        device: torch.device,
        dtype: torch.dtype,
        *,
        temporal_factor: int,
        has_tokens: bool = True,
    ) -> Self:
        """Load a model folder's `vae` encoder, and with has_tokens its `image_encoder`. Raises ModelLoadError."""
        tokens = load_clip_image_encoder(folder, device, dtype, prepares=False) if has_tokens else None
        return cls(load_image_conditioner(folder, device, dtype, one_frame=False), temporal_factor, tokens)

    @property
    def libraries(self) -> tuple[LibraryAttention, ...]:
        own = self.image_encoder
        mine = () if own is None else (LibraryAttention("image_encoder", own.library, own.implementation),)
        return (*self.encoder.libraries, *mine)

    def fast(self) -> Self:
        return type(self)(self.encoder.fast(), self.temporal_factor, self.image_encoder)

    def of_segment(self, segment: Segment, before: torch.Tensor | None) -> Self:
        return type(self)(self.encoder, self.temporal_factor, self.image_encoder, segment=segment, before=before)

    def condition(self, request: GenerationRequest, size: ClipSize) -> ImageCondition:
        segment = Segment(0, 0, size.num_frames, 0, size.num_frames) if self.segment is None else self.segment
        return self.condition_of(request, size, segment)

    @abstractmethod
    def condition_of(self, request: GenerationRequest, size: ClipSize, segment: Segment) -> ImageCondition:
        """Return the condition of one segment, which is the clip where that is made at once."""

    def known_frames(self, latents: torch.Tensor, num_known: int) -> torch.Tensor:
        """Return a mask, [1, temporal_factor, latent frames, height, width], that is 1 where a frame is known. latents:
        of these sizes; num_known: the first frames, in pixels, that are known."""
        factor, (_, _, num_latents, height, width) = self.temporal_factor, latents.shape
        # The first latent frame is one frame, which fills all of its channels.
        places = torch.arange(num_latents * factor, device=latents.device) - (factor - 1)
        known = (places.clamp_min(0) < num_known).to(latents.dtype).view(num_latents, factor)
        return known.t()[None, :, :, None, None].expand(1, factor, num_latents, height, width)

    def embed(self, *pictures: torch.Tensor) -> torch.Tensor | None:
        """Return the image encoder's tokens of pictures, one after the other, [1, tokens, dim]; None without one.
        pictures: [3, height, width] in [-1, 1]."""
        encoder = self.image_encoder
        if encoder is None:
            return None
        return torch.cat([encoder.tokens(_prepared(each)) for each in pictures], dim=1)


def as_video(frames: Sequence[numpy.typing.NDArray[numpy.uint8]]) -> torch.Tensor:
    """Return frames [height, width, 3] as the encoder takes them, [3, frames, height, width] in [-1, 1]."""
    return as_pixels(torch.from_numpy(numpy.stack(frames)))


def _prepared(pixels: torch.Tensor) -> torch.Tensor:
    """Return [1, 3, 224, 224] of CLIP, from [3, height, width] in [-1, 1]. Without antialiasing, as in training."""
    scaled = F.interpolate(pixels[None], size=(224, 224), mode="bicubic", align_corners=False)
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (_MEAN, _STD))
    return (scaled * 0.5 + 0.5 - mean) / std
