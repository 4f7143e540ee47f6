"""LTX-2.5's diffusion decoder of pictures: it denoises pixels in one step, given what four stages make of the latents.

diffusers' LTX2VideoDiffusionDecoderModel with our neighbourhood attention in place of its block mask for flex
attention, which is made of an entry for each pair of tokens. A folder has it as `diffusion_decoder`, beside the
convolutional decoder of the same latents, and RuntimeConfig.vae_decoder chooses it.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch

from diffusion_runtime.core.model_folder import AnyFolder, read_config
from diffusion_runtime.decoders.autoencoder import DiffusersComponent
from diffusion_runtime.decoders.interface import LatentDecoder
from diffusion_runtime.decoders.video_decoder import by_statistics
from diffusion_runtime.layers.neighborhood_attention import neighborhood_attention
from diffusion_runtime.media.audio import Audio
from diffusion_runtime.models.ltx2.geometry import LTX2Geometry
from diffusion_runtime.models.ltx2.sound_decoder import SoundDecoder, is_statistic, load_sound_decoder
from diffusion_runtime.request.generation_request import GenerationRequest

NAME = "diffusion"
NETWORK = DiffusersComponent(
    "diffusion_decoder",
    "diffusers.models.autoencoders.ltx2_diffusion_decoder",
    "LTX2VideoDiffusionDecoderModel",
)
# Numbers of a block's activations at once, for each of its own: input, context, queries, keys and values, and these
# turned in float32.
_NUM_ACTIVATIONS = 18


class _Attending:
    """Attention of one of the model's layers, as its processors compute it."""

    def __call__(self, attn: Any, hidden_states: torch.Tensor, block_mask: None = None) -> torch.Tensor:
        """Map [batch, frames, height, width, channels] to the same shape. The queries come scaled."""
        assert block_mask is None
        q, k, v = attn.project_qkv(hidden_states)
        attended = neighborhood_attention(q, k, v, attn.kernel_size, scale=1.0)
        out: torch.Tensor = attn.to_out[0](attended.flatten(4))
        return out


class DiffusionDecoder(LatentDecoder):
    """The network, in its weights' dtype, and the decoder of the sound. The noise is drawn on the CPU, by the seed of
    the request, apart from what denoising draws."""

    library = "diffusers"

    def __init__(self, network: Any, scaling_factor: float, sound: SoundDecoder) -> None:
        for module in network.modules():
            if hasattr(module, "set_processor"):
                module.set_processor(_Attending())
        self._network = network
        self._sound = sound
        self._restore = by_statistics(network.latents_mean, network.latents_std, scaling_factor)
        self._seed = 0
        self.implementation = f"{type(network).__name__}, neighbourhood attention in boxes"

    def for_request(self, request: GenerationRequest) -> LatentDecoder:
        other = copy.copy(self)
        other._seed = request.seed
        return other

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        weight = next(self._network.parameters())
        with torch.inference_mode():
            raw = self._restore(latents.to(weight.device, torch.float32)).to(weight.dtype)
            pixels: torch.Tensor = self._network.decode(raw, generator=self.noise(), return_dict=False)[0]
            return (pixels.float() / 2 + 0.5).clamp(0.0, 1.0).permute(0, 2, 3, 4, 1).contiguous()

    def noise(self) -> torch.Generator:
        """Return the generator of the noise. It begins after the numbers of any seed that denoising draws from."""
        return torch.Generator("cpu").manual_seed((1 << 32) + self._seed)

    def decode_audio(self, latents: torch.Tensor) -> Audio:
        return self._sound.decode(latents)


def load_diffusion_decoder(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> DiffusionDecoder:
    """Load the diffusion decoder of a folder, and the decoders of its sound. Raises ModelLoadError."""
    return DiffusionDecoder(
        NETWORK.load(folder, device, dtype, stays_float32=is_statistic),
        read_config(folder, NETWORK.name).number("scaling_factor", 1.0),
        load_sound_decoder(folder, device, dtype),
    )


def with_whole_windows(folder: AnyFolder, geometry: LTX2Geometry) -> LTX2Geometry:
    """Return the geometry of clips that have the window of every stage."""
    network = NETWORK.build(folder).decoder
    side = scale = 1
    for stage, upsample in zip(network.det_stages, network.upsamples, strict=True):
        side = max(side, -(-max(stage[0].attn.kernel_size[1:]) // scale))
        scale *= max(upsample.stride[1:])
    # The other stages see frames of padding in addition.
    frames, *sides = network.diff_blocks[0].attn.kernel_size
    factor = geometry.temporal_factor
    return dataclasses.replace(
        geometry,
        min_latents=max(geometry.min_latents, side, -(-max(sides) // scale)),
        min_frames=1 + -(-(frames - 1) // factor) * factor,
    )


def decoding_bytes(folder: AnyFolder, dtype: torch.dtype, height: int, width: int, num_frames: int) -> int:
    """Return the bytes of the activations of a decode."""
    network = NETWORK.build(folder).decoder
    tokens = num_frames * (height // network.patch_size) * (width // network.patch_size)
    return int(tokens * network.context_channels * _NUM_ACTIVATIONS * dtype.itemsize)
