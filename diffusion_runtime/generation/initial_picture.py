"""Initial latents of a request: the files of init_path and mask_path, read and encoded."""

from __future__ import annotations

import numpy
import torch

from diffusion_runtime.core.latent_geometry import ClipSize, LatentGeometry
from diffusion_runtime.decoders.interface import LatentEncoder
from diffusion_runtime.denoising.initial_latents import InitialLatents
from diffusion_runtime.media.clips import inspect_clip, read_clip
from diffusion_runtime.media.images import WHITE
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.request.strength import starts_from_noise


def reads_initial(request: GenerationRequest) -> bool:
    """Return whether a resolved request needs the latents of its init_path: not at a strength of 1 without a mask."""
    return request.init_path is not None and not (starts_from_noise(request) and request.mask_path is None)


def initial_latents(
    request: GenerationRequest, size: ClipSize, geometry: LatentGeometry, encoder: LatentEncoder
) -> InitialLatents:
    """Read and encode what a resolved request starts from, which its rules have seen."""
    assert request.init_path is not None
    frames = torch.from_numpy(_frames(request.init_path, "init_path", size))
    # [frames, height, width, 3] to [1, 3, frames, height, width].
    clean = encoder.encode(frames.to(torch.float32).div(127.5).sub(1.0).permute(3, 0, 1, 2)[None])
    mask = None
    if request.mask_path is not None:
        white = torch.from_numpy(_frames(request.mask_path, "mask_path", size, grey=True)) >= WHITE
        mask = latent_mask(white, geometry)
    return InitialLatents(clean, mask, starts_from_noise(request))


def latent_mask(white: torch.Tensor, geometry: LatentGeometry) -> torch.Tensor:
    """Return which latents are made anew, [1, 1, latent frames, height, width]: as the first pixel of a latent's square
    says, in any of a latent frame's frames. white: [frames, height, width], bool."""
    sides = white[:, :: geometry.spatial_factor, :: geometry.spatial_factor]
    first, later = sides[:1], sides[1:]
    if len(later):
        later = later.view(-1, geometry.temporal_factor, *later.shape[1:]).any(dim=1)
    return torch.cat([first, later])[None, None]


def _frames(path: str, field: str, size: ClipSize, *, grey: bool = False) -> numpy.typing.NDArray[numpy.uint8]:
    """Read uint8 [frames, height, width, 3], or without the last axis; one frame is repeated for the clip."""
    count = 1 if inspect_clip(path, field, size.num_frames).is_still else size.num_frames
    read = read_clip(path, field, count, size.height, size.width, grey=grey)
    return numpy.repeat(read, size.num_frames, axis=0) if count < size.num_frames else read
