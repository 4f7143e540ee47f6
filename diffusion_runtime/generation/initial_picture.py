"""Initial latents of a request: the files of init_path and mask_path, and its sound, read and encoded."""

from __future__ import annotations

import numpy
import torch

from diffusion_runtime.core.latent_geometry import ClipSize, LatentGeometry
from diffusion_runtime.core.sound_geometry import SoundGeometry
from diffusion_runtime.decoders.interface import LatentEncoder, SampleEncoder
from diffusion_runtime.denoising.initial_latents import InitialLatents
from diffusion_runtime.media.audio import NUM_CHANNELS, read_sound
from diffusion_runtime.media.clips import inspect_clip, read_clip
from diffusion_runtime.media.images import WHITE
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.request.strength import starts_from_noise
from diffusion_runtime.rules.initial_picture import initial_sound


def initial_latents(
    request: GenerationRequest, size: ClipSize, geometry: LatentGeometry, encoder: LatentEncoder
) -> InitialLatents:
    """Read and encode what a resolved request starts from, which its rules have seen."""
    assert request.init_path is not None
    frames = torch.from_numpy(_frames(request.init_path, "init_path", size))
    # [frames, height, width, 3] to [1, 3, frames, height, width].
    video = encoder.encode(frames.to(torch.float32).div(127.5).sub(1.0).permute(3, 0, 1, 2)[None])
    mask = white = None
    if request.mask_path is not None:
        white = torch.from_numpy(_frames(request.mask_path, "mask_path", size, grey=True)) >= WHITE
        mask = latent_mask(white, geometry)
    if encoder.sound is None:
        return InitialLatents(video, mask, starts_from_noise(request))
    assert isinstance(geometry, SoundGeometry)
    _, length, _ = geometry.audio_shape(size)
    sound = encoder.sound.encode(_samples(request, encoder.sound, length)).to(video.device)
    if mask is not None and white is not None:
        of_sound = sound_mask(white, length).expand(sound.shape)
        mask = geometry.join(mask.expand(video.shape), of_sound)
    return InitialLatents(geometry.join(video, sound), mask, starts_from_noise(request))


def latent_mask(white: torch.Tensor, geometry: LatentGeometry) -> torch.Tensor:
    """Return which latents are made anew, [1, 1, latent frames, height, width]: as the first pixel of a latent's square
    says, in any of a latent frame's frames. white: [frames, height, width], bool."""
    sides = white[:, :: geometry.spatial_factor, :: geometry.spatial_factor]
    of_latents = torch.split(sides, list(geometry.frames_of_latents(len(sides))))
    return torch.stack([each.any(dim=0) for each in of_latents])[None, None]


def sound_mask(white: torch.Tensor, length: int) -> torch.Tensor:
    """Return which moments of the sound are made anew, [1, 1, length, 1]: those in which a frame with any white is
    seen. white: [frames, height, width], bool."""
    is_white, count = white.flatten(1).any(dim=1), len(white)
    spans = ((moment * count // length, -(-(moment + 1) * count // length)) for moment in range(length))
    return torch.stack([is_white[first:stop].any() for first, stop in spans])[None, None, :, None]


def _frames(path: str, field: str, size: ClipSize, *, grey: bool = False) -> numpy.typing.NDArray[numpy.uint8]:
    """Read uint8 [frames, height, width, 3], or without the last axis; one frame is repeated for the clip."""
    count = 1 if inspect_clip(path, field, size.num_frames).is_still else size.num_frames
    read = read_clip(path, field, count, size.height, size.width, grey=grey)
    return numpy.repeat(read, size.num_frames, axis=0) if count < size.num_frames else read


def _samples(request: GenerationRequest, encoder: SampleEncoder, length: int) -> torch.Tensor:
    """Return the samples of the sound that a request starts from, [2, number], float32: silence where there is none."""
    source, count = initial_sound(request), encoder.num_samples(length)
    if source is None:
        return torch.zeros(NUM_CHANNELS, count)
    field, path = source
    return torch.from_numpy(read_sound(path, field, count / encoder.sample_rate, encoder.sample_rate).samples)
