"""The LTX-Video autoencoder as diffusers computes it: its decoder behind LatentDecoder, and its encoder for an image to
start from.

Since 0.9.1 the decoder finishes the denoising: it takes latents with a little noise, and the noise level as a timestep.
The decoder of 0.9.1 adds noise between its layers as well.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from diffusion_runtime.core.model_folder import AnyFolder, read_config
from diffusion_runtime.decoders.autoencoder import COMPONENT, DiffusersComponent
from diffusion_runtime.decoders.interface import FrameStream, LatentDecoder
from diffusion_runtime.decoders.sample_decoder import Tiling
from diffusion_runtime.decoders.video_decoder import Decoders, VideoDecoder, by_statistics, norm_fused
from diffusion_runtime.denoising.noise import SampleNoise
from diffusion_runtime.models.first_frame_encoder import FirstFrameConditioner
from diffusion_runtime.models.ltx_video.config import decodes_at_a_timestep
from diffusion_runtime.parallel.collectives import RankGroup
from diffusion_runtime.request.generation_request import GenerationRequest

AUTOENCODER = DiffusersComponent(COMPONENT, "diffusers.models.autoencoders.autoencoder_kl_ltx", "AutoencoderKLLTXVideo")

UPSAMPLER = DiffusersComponent(
    "latent_upsampler", "diffusers.pipelines.ltx.modeling_latent_upsampler", "LTXLatentUpsamplerModel"
)


@dataclass
class _DecodeTime:
    """The timestep at which the network decodes now, [1]; None for one that takes none."""

    value: torch.Tensor | None = None


class LTXVideoDecoder(VideoDecoder):
    """The decoder of AutoencoderKLLTXVideo, in its weights' dtype, for one request: `for_request` sets it."""

    def __init__(self, autoencoder: Any, scaling_factor: float, *, takes_timestep: bool) -> None:
        self._time = _DecodeTime()
        self._takes_timestep = takes_timestep
        self._adds_noise = any(
            getattr(module, "per_channel_scale1", None) is not None for module in autoencoder.decoder.modules()
        )
        self._timestep, self._noise_scale, self._seed = 0.0, 0.0, 0
        restore = by_statistics(autoencoder.latents_mean, autoencoder.latents_std, scaling_factor)
        frames, _ = _factors(autoencoder.decoder)
        time = self._time
        decoders = norm_fused(autoencoder, lambda module, raw: module.decoder(raw, time.value), frames)
        if self._adds_noise:
            # Two decoders that draw noise cannot be compared.
            decoders = Decoders(decoders.module, (), decoders.make_fast)
        super().__init__(autoencoder, restore, decoders, tiling(autoencoder))

    def for_request(self, request: GenerationRequest) -> LatentDecoder:
        if not self._takes_timestep:
            return self
        # Comparisons of decoders hold for every request.
        other = copy.copy(self)
        other._timestep = 0.0 if request.decode_timestep is None else request.decode_timestep
        other._noise_scale = other._timestep if request.decode_noise_scale is None else request.decode_noise_scale
        other._seed = request.seed
        return other

    def fast(self) -> LatentDecoder:
        """Return the fast decoder; itself where noise between the layers leaves nothing to compare."""
        return self if self._adds_noise else super().fast()

    def stream(self, latents: torch.Tensor, bands: RankGroup | None = None) -> FrameStream:
        if self._takes_timestep:
            self._time.value = torch.full((1,), self._timestep, dtype=self._dtype, device=self._device)
        return super().stream(latents, bands)

    def _raw(self, latents: torch.Tensor) -> torch.Tensor:
        raw = self._restore(latents.to(self._device, torch.float32))
        if self._takes_timestep and self._noise_scale > 0:
            # The second draw of the request's generator: the first is the noise that denoising began with.
            noise = SampleNoise(tuple(raw.shape[1:]), [self._seed])
            noise.draw()
            raw = (1 - self._noise_scale) * raw + self._noise_scale * noise.draw().to(raw.device)
        return raw.to(self._dtype)

    @contextlib.contextmanager
    def _decoding(self, latents: torch.Tensor) -> Iterator[None]:
        with super()._decoding(latents), self._seeded():
            yield

    @contextlib.contextmanager
    def _seeded(self) -> Iterator[None]:
        """Context manager: a decoder that draws noise between its layers draws the same for the same seed, and leaves
        torch's generators as they were."""
        if not self._adds_noise:
            yield
            return
        with torch.random.fork_rng(devices=[self._device] if self._device.type == "cuda" else []):
            torch.manual_seed(self._seed)
            yield


def load_decoder(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> LTXVideoDecoder:
    """Load the decoder of a diffusers folder's `vae`.

    Raises ModelLoadError for settings that the installed diffusers does not know and for weights that do not fit.
    """
    autoencoder = AUTOENCODER.load(folder, device, dtype, left_out=("encoder",), stays_float32=_is_statistic)
    return LTXVideoDecoder(autoencoder, _scaling_factor(folder), takes_timestep=decodes_at_a_timestep(folder))


def load_image_conditioner(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> FirstFrameConditioner:
    """Load the encoder of a diffusers folder's `vae`. Raises what load_decoder raises."""
    autoencoder = AUTOENCODER.load(folder, device, dtype, left_out=("decoder",), stays_float32=_is_statistic)
    return FirstFrameConditioner(autoencoder, _scaling_factor(folder))


def check_decoding(folder: AnyFolder) -> None:
    """Check the decoder's numbers. Raises ModelLoadError."""
    decodes_at_a_timestep(folder)
    _scaling_factor(folder)


def _scaling_factor(folder: AnyFolder) -> float:
    return read_config(folder, COMPONENT).number("scaling_factor", 1.0)


def _is_statistic(name: str) -> bool:
    return name in ("latents_mean", "latents_std")


def tiling(autoencoder: Any) -> Tiling:
    """Return the tile sizes: diffusers' 512 pixels a side that overlap by 64; along the frames 65 that overlap by 16,
    where diffusers' tiles of two latent frames would see hardly any motion."""
    _, pixels = _factors(autoencoder.decoder)
    size, stride = autoencoder.tile_sample_min_height // pixels, autoencoder.tile_sample_stride_height // pixels
    return Tiling(size, stride, pixels, (8, 6), keeps_ends=True)


def _factors(network: Any) -> tuple[int, int]:
    """Return the frames and pixels a side of a latent: the autoencoder's own ratios are its encoder's."""
    strides = [each.stride for block in network.up_blocks for each in block.upsamplers or ()]
    frames, rows = (math.prod(stride[axis] for stride in strides) for axis in (0, 1))
    return frames * int(network.patch_size_t), rows * int(network.patch_size)
