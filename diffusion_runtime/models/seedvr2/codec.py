"""SeedVR2's autoencoder: the decoder, which brings the colours of what is made to those of the video, and the encoder
of the video."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from diffusion_runtime.core.empty_modules import empty_modules
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.core.model_folder import MAX_SIZE, AnyFolder, read_config
from diffusion_runtime.decoders.autoencoder import COMPONENT, DiffusersComponent
from diffusion_runtime.decoders.interface import FrameStream, LatentDecoder
from diffusion_runtime.decoders.replicating_autoencoder import (
    AutoencoderKLSeedVR2,
    ReplicatingAutoencoder,
    ReplicatingDecoder,
)
from diffusion_runtime.decoders.sample_decoder import Tiling
from diffusion_runtime.decoders.video_decoder import Decoders, FusedDecoder, VideoDecoder, by_factor
from diffusion_runtime.denoising.noise import SampleNoise
from diffusion_runtime.denoising.segments import Segment
from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.layers.convolution import OneDnnConvolutions
from diffusion_runtime.models.interface import ImageCondition, ImageConditioner
from diffusion_runtime.models.seedvr2.colors import CORRECTIONS
from diffusion_runtime.models.seedvr2.geometry import SeedVR2Geometry, read_geometry
from diffusion_runtime.models.seedvr2.source import SourceFrames, scaled
from diffusion_runtime.parallel.collectives import RankGroup
from diffusion_runtime.report.attention_report import LibraryAttention
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.untrusted.component_sizes import MAX_LAYERS
from diffusion_runtime.untrusted.known_settings import Allows, are_known, is_number, several, whole

_SIZE = whole(1, MAX_SIZE)
# Settings of config.json; all but the last are of the module.
_KNOWN: Mapping[str, Allows] = {
    "latent_channels": _SIZE,
    "block_out_channels": several(_SIZE),
    "layers_per_block": whole(1, MAX_LAYERS),
    "norm_num_groups": _SIZE,
    "temporal_scale_num": whole(1, MAX_LAYERS),
    "scaling_factor": is_number,
}
_LATENT_FACTOR = "scaling_factor"
# In pixels, as in the programs that people run the model with.
_TILE, _TILE_OVERLAP = 1024, 128
# The encoder draws from a generator of its own, beside that of the noise.
_SEED_OF_ENCODER = 1_000_000


def _half(settings: Mapping[str, Any]) -> nn.Module | None:
    if not are_known(settings, _KNOWN):
        return None
    sizes = {key: value for key, value in settings.items() if key != _LATENT_FACTOR}
    try:
        with empty_modules():
            return AutoencoderKLSeedVR2(**sizes, has_encoder=False)
    except (ModelLoadError, RuntimeError, ValueError, OverflowError):  # sizes that do not fit each other
        return None


AUTOENCODER = DiffusersComponent(
    COMPONENT,
    "diffusion_runtime.decoders.replicating_autoencoder",
    "AutoencoderKLSeedVR2",
    {_LATENT_FACTOR: "the decoder reads it, not the module"},
    encoder_parts=("encoder",),
    decoding_half=_half,
)


def _factor(folder: AnyFolder) -> float:
    """Read what latents are multiplied with. Raises ModelLoadError."""
    file = read_config(folder, COMPONENT)
    factor = file.number(_LATENT_FACTOR, 0.9152)
    if factor <= 0:
        raise file.error(_LATENT_FACTOR, "a number above 0", factor)
    return factor


def check_decoding(folder: AnyFolder) -> None:
    """Check the autoencoder's settings. Raises ModelLoadError that names the file and the key."""
    file = read_config(folder, COMPONENT)
    file.refuse_unknown(_KNOWN)
    for key, allows in _KNOWN.items():
        if key in file.values and not allows(file.values[key]):
            raise file.error(key, "a size, or several", file.values[key])
    _factor(folder)
    if AUTOENCODER.build_decoding_half(folder) is None:
        sizes = ", ".join(f"{key} {file.values.get(key)}" for key in ("block_out_channels", "norm_num_groups"))
        raise file.error("block_out_channels", "sizes that fit each other", sizes)


def tiling(autoencoder: Any) -> Tiling:
    """Return the tile sizes."""
    pixels = int(autoencoder.spatial_compression_ratio)
    size, overlap = (max(1, each // pixels) for each in (_TILE, _TILE_OVERLAP))
    return Tiling(size, size - overlap, pixels, keeps_ends=True)


class SeedVR2Decoder(VideoDecoder):
    """The decoder of AutoencoderKLSeedVR2 in its weights' dtype, for one request: `for_request` sets it."""

    library = "torch"

    def __init__(self, autoencoder: ReplicatingAutoencoder, scaling_factor: float) -> None:
        decoders = Decoders(ReplicatingDecoder(autoencoder), ())
        super().__init__(autoencoder, by_factor(scaling_factor), decoders, tiling(autoencoder))
        self._source = SourceFrames()
        self._request: GenerationRequest | None = None
        self._segment: Segment | None = None

    def for_request(self, request: GenerationRequest) -> LatentDecoder:
        other = copy.copy(self)
        other._request, other._source = request, SourceFrames()
        return other

    def of_segment(self, segment: Segment) -> LatentDecoder:
        other = copy.copy(self)
        other._segment = segment
        return other

    def stream(self, latents: torch.Tensor, bands: RankGroup | None = None) -> FrameStream:
        whole, request, segment = super().stream(latents, bands), self._request, self._segment
        if request is None or segment is None:
            return whole
        num_frames = min(whole.num_frames, segment.num_frames)
        return FrameStream(num_frames, self._finished(whole.chunks, request, num_frames, segment.start))

    def _describe(self, fused: FusedDecoder | None) -> None:
        super()._describe(fused)
        tiles = "" if self._tiles is None else f", in {self._tiles.text}"
        self.implementation = f"{self._autoencoder.class_name}{tiles}"

    def _finished(
        self, chunks: Iterator[torch.Tensor], request: GenerationRequest, num_frames: int, start: int
    ) -> Iterator[torch.Tensor]:
        """Yield frames of a request, from `start` on, without what was added to whole tokens, in the colours of its
        file."""
        height, width = request.height, request.width
        assert height is not None
        assert width is not None
        method, position = request.color_correction or "none", 0
        for chunk in chunks:
            made = chunk[:, : num_frames - position, :height, :width]
            if made.shape[1] == 0:
                return
            if method != "none":
                given = self._source.read(request, start + position, made.shape[1])
                size = ClipSize(height, width, made.shape[1], 1)
                with torch.inference_mode():
                    frames = made[0].permute(0, 3, 1, 2).mul(2.0).sub_(1.0)
                    frames = CORRECTIONS[method](frames, scaled(given, size, frames.device))
                    made = frames.mul_(0.5).add_(0.5).permute(0, 2, 3, 1)[None]
            position += made.shape[1]
            yield made.contiguous()


def load_decoder(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> SeedVR2Decoder:
    """Load the decoder of a folder's `vae`. Raises ModelLoadError for settings that are not supported, and for weights
    that do not fit."""
    return SeedVR2Decoder(AUTOENCODER.load_decoder(folder, device, dtype), _factor(folder))


class SeedVR2Conditioner(ImageConditioner):
    """Conditioner by the video that is restored: its latents at the size of what is made, and a mask of ones.

    autoencoder: with its encoder. The latents are sampled, as in training, from a generator of the request's seed.
    """

    def __init__(self, autoencoder: ReplicatingAutoencoder, scaling_factor: float, geometry: SeedVR2Geometry) -> None:
        self._autoencoder = autoencoder
        self._factor = scaling_factor
        self._geometry = geometry
        self._source = SourceFrames()
        self._start = 0
        self._tiles: Tiling | None = None

    def in_tiles(self, choice: str) -> ImageConditioner:
        other = copy.copy(self)
        other._tiles = tiling(self._autoencoder).chosen(choice)
        return other

    def of_segment(self, segment: Segment, before: torch.Tensor | None) -> ImageConditioner:
        other = copy.copy(self)
        other._start = segment.start
        if segment.index == 0:
            other._source = SourceFrames()
        return other

    @property
    def libraries(self) -> tuple[LibraryAttention, ...]:
        tiles = "" if self._tiles is None else f", in {self._tiles.text}"
        return (LibraryAttention("vae encoder", "torch", f"{self._autoencoder.class_name}'s encoder{tiles}"),)

    def condition(self, request: GenerationRequest, size: ClipSize) -> ImageCondition:
        """Return latents and mask, [1, channels + 1, latent frames, height, width], float32."""
        weight = next(self._autoencoder.parameters())
        with torch.inference_mode(), OneDnnConvolutions():
            pieces = (each.to(weight.dtype) for each in self._pieces(request, size, weight.device))
            mean, std = self._autoencoder.encode(pieces, self._tiles)
        noise = SampleNoise(tuple(mean.shape[1:]), [(request.seed + _SEED_OF_ENCODER) % 2**63]).draw()
        latents = (mean.float() + std.float() * noise.to(mean.device)) * self._factor
        return ImageCondition(torch.cat([latents, torch.ones_like(latents[:, :1])], dim=1))

    def _pieces(self, request: GenerationRequest, size: ClipSize, device: torch.device) -> Iterator[torch.Tensor]:
        """Yield the frames as the encoder takes them, one and then so many as make a latent frame, [1, 3, frames,
        height, width]. What is missing to whole tokens is black, to whole latent frames the last frame again."""
        height, width, num_frames = self._geometry.padded(size.height, size.width, size.num_frames)
        missing = (0, width - size.width, 0, height - size.height)
        position, count = 0, 1
        last: torch.Tensor | None = None
        while position < num_frames:
            there = min(count, size.num_frames - position)
            frames = []
            if there > 0:
                read = scaled(self._source.read(request, self._start + position, there), size, device)
                frames.append(nn.functional.pad(read, missing, value=-1.0))
                last = frames[-1][-1:]
            if there < count:
                assert last is not None
                frames.append(last.expand(count - max(0, there), -1, -1, -1))
            yield torch.cat(frames).transpose(0, 1)[None]
            position, count = position + count, self._geometry.temporal_factor


def load_conditioner(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> SeedVR2Conditioner:
    """Load the encoder of a folder's `vae`. Raises what load_decoder raises."""
    autoencoder = AUTOENCODER.load(folder, device, dtype, left_out=("decoder",))
    return SeedVR2Conditioner(autoencoder, _factor(folder), read_geometry(folder))
