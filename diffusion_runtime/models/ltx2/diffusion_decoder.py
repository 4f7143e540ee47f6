"""LTX-2.5's diffusion decoder of pictures: it denoises pixels in one step, given what four stages make of the latents.

The weights are those of diffusers' LTX2VideoDiffusionDecoderModel. Its blocks run in exact tiles on our neighbourhood
attention; diffusers' own is a block mask for flex attention with an entry for each pair of tokens, and its tiles are
blended. A folder has it as `diffusion_decoder`, beside the convolutional decoder of the same latents, and
RuntimeConfig.vae_decoder chooses it.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from diffusion_runtime.core.model_folder import AnyFolder, read_config
from diffusion_runtime.decoders.autoencoder import DiffusersComponent
from diffusion_runtime.decoders.interface import FrameStream, LatentDecoder
from diffusion_runtime.decoders.video_decoder import by_statistics
from diffusion_runtime.decoders.window_tiles import Tile, overwrite_in_tiles, slabs_of, tokens_beside
from diffusion_runtime.layers.neighborhood_attention import neighborhood_attention
from diffusion_runtime.media.audio import Audio
from diffusion_runtime.models.ltx2.geometry import LTX2Geometry
from diffusion_runtime.models.ltx2.sound_decoder import SoundDecoder, is_statistic, load_sound_decoder
from diffusion_runtime.parallel.collectives import RankGroup
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


class DiffusionDecoder(LatentDecoder):
    """The network, in its weights' dtype, and the decoder of the sound. The noise is drawn on the CPU, by the seed of
    the request, apart from what denoising draws.

    Every block runs in exact tiles (decoders/window_tiles.py); frames leave in slabs.
    """

    library = "diffusers"

    def __init__(self, network: Any, scaling_factor: float, sound: SoundDecoder) -> None:
        self._decoder = network.decoder
        self._sound = sound
        self._restore = by_statistics(network.latents_mean, network.latents_std, scaling_factor)
        self._seed = 0
        self.implementation = f"{type(network).__name__}, neighbourhood attention in boxes, blocks in exact tiles"

    def for_request(self, request: GenerationRequest) -> LatentDecoder:
        other = copy.copy(self)
        other._seed = request.seed
        return other

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.cat(list(self.stream(each).chunks), dim=1) for each in torch.split(latents, 1)])

    def stream(self, latents: torch.Tensor, bands: RankGroup | None = None) -> FrameStream:
        assert bands is None
        factor = self._decoder.temporal_compression_ratio
        return FrameStream(1 + (latents.shape[2] - 1) * factor, self._chunks(latents))

    def noise(self) -> torch.Generator:
        """Return the generator of the noise. It begins after the numbers of any seed that denoising draws from."""
        return torch.Generator("cpu").manual_seed((1 << 32) + self._seed)

    def decode_audio(self, latents: torch.Tensor) -> Audio:
        return self._sound.decode(latents)

    def _chunks(self, latents: torch.Tensor) -> Iterator[torch.Tensor]:
        decoder = self._decoder
        weight = decoder.conv_out.weight
        with torch.inference_mode():
            context = self._context(self._restore(latents.to(weight.device, torch.float32)).to(weight.dtype))
            x = self._noisy_tokens(context)
            modulation = decoder.shared_adaln(
                decoder.t_embedder(
                    torch.full((1,), float(decoder.timestep_scale_multiplier), device=weight.device),
                    resolution=None,
                    aspect_ratio=None,
                    batch_size=1,
                    hidden_dtype=weight.dtype,
                )
            )
            for block in decoder.diff_blocks:
                _denoise(block, x, context, modulation)
            del context
        for slab in slabs_of(x.shape[1]):
            with torch.inference_mode():
                frames = _frames(decoder.conv_out(decoder.norm_out(x[:, slab])), decoder.patch_size)
                frames = frames.float().div_(2).add_(0.5).clamp_(0.0, 1.0)
            yield frames

    def _context(self, raw: torch.Tensor) -> torch.Tensor:
        """Return what the four stages make of latents [1, channels, frames, height, width]: [1, frames, rows, columns,
        channels]. The last latent frame is repeated, so that windows at the end are not moved inward."""
        decoder = self._decoder
        num_padding = decoder.trailing_pad_latent_frames
        padded = torch.cat([raw, raw[:, :, -1:].expand(-1, -1, num_padding, -1, -1)], dim=2)
        x: torch.Tensor = decoder.conv_in(padded.movedim(1, -1))
        for index, (blocks, upsample) in enumerate(zip(decoder.det_stages, decoder.upsamples, strict=True)):
            for block in blocks:
                _upsampling_block(block, x)
            is_last = index == len(decoder.upsamples) - 1
            x = _upsampled(upsample, x, num_padding * decoder.temporal_compression_ratio if is_last else 0)
        return x

    def _noisy_tokens(self, context: torch.Tensor) -> torch.Tensor:
        """Return the tokens of noise on the context's grid, [1, frames, rows, columns, channels]."""
        decoder, (_, frames, rows, columns, _) = self._decoder, context.shape
        weight, patch = decoder.conv_in_x_t.weight, decoder.patch_size
        shape = 1, decoder.out_channels, frames, rows * patch, columns * patch
        noise = torch.randn(shape, generator=self.noise(), dtype=weight.dtype)
        x = context.new_empty(1, frames, rows, columns, weight.shape[0])
        for slab in slabs_of(frames):
            pixels = noise[:, :, slab].to(weight.device)
            pixels = torch.unflatten(torch.unflatten(pixels, 4, (columns, patch)), 3, (rows, patch))
            x[:, slab] = decoder.conv_in_x_t(pixels.permute(0, 2, 3, 5, 1, 6, 4).flatten(4))
        return x


def _attended(attn: Any, tokens: torch.Tensor, tile: Tile) -> torch.Tensor:
    """Return the attention of a tile's own tokens. tokens: normalised, that the tile reads. The queries come scaled."""
    q, k, v = attn.project_qkv(tokens)
    out = neighborhood_attention(tile.own(q), k, v, attn.kernel_size, scale=1.0, origin=tile.origin)
    attended: torch.Tensor = attn.to_out[0](out.flatten(4))
    return attended


def _upsampling_block(block: Any, x: torch.Tensor) -> None:
    """Overwrite x with what a block of LTX2VideoVaeNABlock makes of it."""

    def compute(tokens: torch.Tensor, tile: Tile) -> torch.Tensor:
        own = tile.own(tokens) + _attended(block.attn, block.norm1(tokens), tile)
        made: torch.Tensor = own + block.mlp(block.norm2(own))
        return made

    overwrite_in_tiles(x, block.attn.kernel_size, compute)


def _denoise(block: Any, x: torch.Tensor, context: torch.Tensor, modulation: Sequence[torch.Tensor]) -> None:
    """Overwrite x with what a block of LTX2VideoVaeDiffusionNABlock makes of it. modulation: of the timestep."""
    scale, shift, _, mlp_scale, mlp_shift, *_ = (
        of_time + own for of_time, own in zip(modulation, block.scale_shift_table, strict=True)
    )

    def compute(tokens: torch.Tensor, tile: Tile) -> torch.Tensor:
        tokens = tokens + block.context_proj(tile.read(context))
        attended = _attended(block.attn, block.norm1(tokens) * (1 + scale) + shift, tile)
        own = tile.own(tokens) + attended
        made: torch.Tensor = own + block.mlp(block.norm2(own) * (1 + mlp_scale) + mlp_shift)
        return made

    overwrite_in_tiles(x, block.attn.kernel_size, compute)


def _upsampled(upsample: Any, x: torch.Tensor, num_cut: int) -> torch.Tensor:
    """Return x [1, frames, rows, columns, channels] on the grid of the next stage, without its last num_cut frames. Of
    two frames that a first one becomes, the first is left out."""
    factor, *sides = upsample.stride
    num_dropped = int(factor == 2)
    length = x.shape[1] * factor - num_dropped - num_cut
    rows, columns = (size * side for size, side in zip(x.shape[2:4], sides, strict=True))
    out = x.new_empty(1, length, rows, columns, upsample.out_channels)
    for slab in slabs_of(x.shape[1]):
        start = slab.start * factor - num_dropped
        made = upsample(x[:, slab], drop_leading_frame=False)[:, max(0, -start) :]
        place = out[:, max(0, start) : slab.stop * factor - num_dropped]
        place.copy_(made[:, : place.shape[1]])
    return out


def _frames(patches: torch.Tensor, patch: int) -> torch.Tensor:
    """Return frames [1, frames, height, width, colours] of patches [1, frames, rows, columns, colours x patch x patch],
    which hold a patch's columns before its rows."""
    pixels = torch.unflatten(patches, 4, (-1, patch, patch)).permute(0, 1, 2, 6, 3, 5, 4)
    return pixels.flatten(4, 5).flatten(2, 3)


def load_diffusion_decoder(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> DiffusionDecoder:
    """Load the diffusion decoder of a folder, and the decoders of its sound. Raises ModelLoadError."""
    return DiffusionDecoder(
        NETWORK.load(folder, device, dtype, stays_float32=is_statistic),
        read_config(folder, NETWORK.name).number("scaling_factor", 1.0),
        load_sound_decoder(folder, device, dtype),
    )


def with_whole_windows(folder: AnyFolder, geometry: LTX2Geometry) -> LTX2Geometry:
    """Return the geometry of clips that have the window of every stage. Raises ModelLoadError for a decoder of several
    steps."""
    file = read_config(folder, NETWORK.name)
    file.refuse_other_values(
        {"decoder_model_output_type": "x0", "decoder_num_inference_steps": 1}, "as published, which is one step"
    )
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
    """Return the bytes of the activations of a decode: the tokens and their context, a slab of them, and a tile in a
    block."""
    network = NETWORK.build(folder).decoder
    grid = num_frames, height // network.patch_size, width // network.patch_size
    slab, tile = tokens_beside(grid, tuple(network.diff_blocks[0].attn.kernel_size))
    tokens = 2 * math.prod(grid) + slab + tile * _NUM_ACTIVATIONS
    return int(tokens * network.context_channels * dtype.itemsize)
