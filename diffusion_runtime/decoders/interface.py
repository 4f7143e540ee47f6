"""The part of a model that turns latents into frames and sound."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from diffusion_runtime.attention.layers import AttentionLayer
from diffusion_runtime.decoders.decoder_graphs import DecoderGraphs
from diffusion_runtime.decoders.sample_decoder import DecodeNext
from diffusion_runtime.denoising.segments import Segment
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.layers.spatial_parallel import SpatialParallel
from diffusion_runtime.media.audio import Audio
from diffusion_runtime.parallel.collectives import RankGroup
from diffusion_runtime.report.attention_report import AttentionRecorder, LibraryAttention
from diffusion_runtime.request.generation_request import GenerationRequest


@dataclass(frozen=True)
class FrameStream:
    """Frames of one sample as they are decoded. num_frames: of all chunks together. chunks: [1, frames, height, width,
    3] each, decoded when they are requested: float32 in [0, 1], or uint8 on the CPU where they are pixels already."""

    num_frames: int
    chunks: Iterator[torch.Tensor]


@dataclass(frozen=True)
class SampleEncoder:
    """Samples of sound to latents. sample_rate: samples a second. num_samples: moments of the latents -> the samples
    that they stand for. encode: [2, number] in [-1, 1], float32, to the most likely latents, normalised, float32, [1,
    channels, moments, bins]."""

    sample_rate: int
    num_samples: Callable[[int], int]
    encode: Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class LatentEncoder:
    """Frames to latents, by the encoder of the autoencoder that decodes them. encode: [1, 3, frames, height, width] in
    [-1, 1], float32, to the most likely latents, normalised as the transformer works on them, float32, [1, channels,
    latent frames, height, width]. libraries: those that compute it, for the report, known once it has encoded. sound:
    of models whose latents hold sound as well."""

    encode: Callable[[torch.Tensor], torch.Tensor]
    libraries: Callable[[], tuple[LibraryAttention, ...]]
    sound: SampleEncoder | None = None


class LatentDecoder(ABC):
    """Latents to frames, by a library's autoencoder.

    library, implementation: which code decodes, for the report of attention that a library runs itself. splits_rows:
    whether it can decode a band of rows, given the rows beyond (layers/spatial_parallel.py), as within the whole.
    splits_tiles: whether several processes can share the tiles in which it decodes. chosen: the choice that selects its
    attention; empty where that is a library's own.
    """

    splits_rows: bool = False
    splits_tiles: bool = False

    library: str
    implementation: str
    chosen: str = ""

    @abstractmethod
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Decode to frames, float32 in [0, 1], [batch, frames, height, width, 3].

        latents: normalised, as the transformer works on them, [batch, channels, frames, height, width].
        """

    def stream(self, latents: torch.Tensor, bands: RankGroup | None = None) -> FrameStream:
        """Return the frames of one sample chunk after chunk; one chunk of everything where the decoder cannot stop in
        between.

        latents: [1, channels, frames, height, width]. bands: as in decode_band, and `latents` are then one band; for a
        decoder that `splits_tiles`, the processes that share the tiles, each of which is given everything and gets all
        frames.
        """
        frames = self.decode(latents) if bands is None else self.decode_band(latents, bands)
        return FrameStream(frames.shape[1], iter([frames]))

    def clip(self, bands: RankGroup | None = None) -> AbstractContextManager[DecodeNext]:
        """Context manager: decode one clip whose latents come in pieces, [1, channels, frames, height, width] each.
        Gives the function that decodes the next piece into chunks as those of `stream`, together the frames of the
        whole clip. What the convolutions have read is kept in between, and ends with the context. bands: as in
        decode_band.

        Raises ConfigError for a decoder that needs the whole clip.
        """
        raise ConfigError("stream: the decoder of this model needs all latents of a clip at once; leave out --stream")

    def decode_band(self, latents: torch.Tensor, bands: RankGroup) -> torch.Tensor:
        """Decode one band of rows in a decoder that `splits_rows`. bands: the processes, by band, from the top."""
        with SpatialParallel(bands):
            return self.decode(latents)

    def for_request(self, request: GenerationRequest) -> LatentDecoder:
        """Return the same decoder for the clip of one resolved request, in models whose decoding reads values of it;
        itself in others."""
        return self

    def of_segment(self, segment: Segment) -> LatentDecoder:
        """Return the same decoder for one segment of a request's video, in models whose decoding reads its frames;
        itself in others."""
        return self

    def fast(self) -> LatentDecoder:
        """Return the same decoder in its quickest mode, whose frames differ by rounding; itself where it has none."""
        return self

    def in_fp8(self) -> LatentDecoder:
        """Return the same decoder with the products of its blocks in 8-bit floats, which its weights are quantised for
        in place; itself where it has no such mode."""
        return self

    def in_mode(self, mode: str) -> LatentDecoder:
        """Return the same decoder in a mode of RuntimeConfig.vae_decode."""
        return {"fast": self.fast, "fp8": self.in_fp8}[mode]() if mode != "exact" else self

    def in_tiles(self, choice: str) -> LatentDecoder:
        """Return the same decoder, decoding in tiles that are blended, or all at once. choice: a value of
        RuntimeConfig.vae_tiling. Raises ConfigError for one without tiles."""
        if choice not in ("auto", "off"):
            raise ConfigError(f"vae_tiling: {choice}: this decoder has no tiles; leave out --vae-tiling")
        return self

    def attending(self, attention: Sequence[AttentionLayer]) -> LatentDecoder:
        """Return the same decoder with the attention of each block by a layer; itself where that is a library's own."""
        return self

    def recording(self, recorder: AttentionRecorder) -> LatentDecoder:
        """Return the same decoder, which records what its attention layers measure of rounded backends; itself where
        attention is a library's own."""
        return self

    def with_graphs(self, graphs: DecoderGraphs) -> LatentDecoder:
        """Return the same decoder, replaying launch-bound parts from CUDA graphs; itself where there are none."""
        return self

    def decode_audio(self, latents: torch.Tensor) -> Audio | None:
        """Decode the sound of one sample; None from a decoder of pictures alone.

        latents: normalised, [1, channels, length, bins].
        """
        return None
