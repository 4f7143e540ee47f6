"""Decoding by several processes: each decodes a band of rows or some of the tiles where that is exact, else the first
one everything."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator

import numpy
import torch

from diffusion_runtime.decoders.interface import FrameStream, LatentDecoder
from diffusion_runtime.decoders.sample_decoder import DecodeNext
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.media.audio import Audio
from diffusion_runtime.parallel.collectives import RankGroup
from diffusion_runtime.parallel.halo import band_of, gather_bands
from diffusion_runtime.parallel.world import World
from diffusion_runtime.report.attention_report import AttentionRecorder
from diffusion_runtime.request.generation_request import GenerationRequest


class SharedDecoder(LatentDecoder):
    """Decoder shared by several processes. decoder: loaded on the first process, and on all of them when it
    `splits_rows` or `splits_tiles`; None on the others."""

    def __init__(self, decoder: LatentDecoder | None, world: World) -> None:
        self._decoder = decoder
        self._world = world
        self._in_bands = decoder is not None and decoder.splits_rows
        self._in_tiles = decoder is not None and decoder.splits_tiles
        description = json.loads(world.from_first(lambda: json.dumps(self._describe_decoder())))
        self.library, self.implementation, self.chosen = description

    def for_request(self, request: GenerationRequest) -> LatentDecoder:
        return self._around(None if self._decoder is None else self._decoder.for_request(request))

    def recording(self, recorder: AttentionRecorder) -> LatentDecoder:
        return self._around(None if self._decoder is None else self._decoder.recording(recorder))

    def _around(self, decoder: LatentDecoder | None) -> LatentDecoder:
        other = copy.copy(self)
        other._decoder = decoder
        return other

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Decode to the same frames on every process."""
        if self._in_tiles:
            return torch.cat([torch.cat(list(self.stream(each).chunks), dim=1) for each in torch.split(latents, 1)])
        if not self._splits(latents):
            return self._decode_on_first(latents)
        assert self._decoder is not None
        group = self._world.group
        frames = self._decoder.decode_band(latents[..., band_of(latents.shape[-2], group), :], group)
        self.library, self.implementation, self.chosen = self._describe_decoder()
        return gather_bands(frames, 2, group, latents.shape[-2])

    def stream(self, latents: torch.Tensor, bands: RankGroup | None = None) -> FrameStream:
        """Stream the same chunks on every process, all of which must read them."""
        assert bands is None, "it cuts the bands itself"
        if self._in_tiles:
            assert self._decoder is not None
            shared = self._decoder.stream(latents, self._world.group)
            self.library, self.implementation, self.chosen = self._describe_decoder()
            return shared
        if not self._splits(latents):
            return super().stream(latents)
        assert self._decoder is not None
        group = self._world.group
        of_band = self._decoder.stream(latents[..., band_of(latents.shape[-2], group), :], group)
        self.library, self.implementation, self.chosen = self._describe_decoder()
        chunks = (gather_bands(frames, 2, group, latents.shape[-2]) for frames in of_band.chunks)
        return FrameStream(of_band.num_frames, chunks)

    @contextlib.contextmanager
    def clip(self, bands: RankGroup | None = None) -> Iterator[DecodeNext]:
        """Decode a clip in pieces: the same chunks on every process, all of which must read them."""
        assert bands is None, "it cuts the bands itself"
        if not self._in_bands:
            raise ConfigError(f"stream: several processes cannot decode together ({self.implementation})")
        assert self._decoder is not None
        with self._decoder.clip(self._world.group) as decode_next:
            yield self._clip(decode_next)

    def _clip(self, decode_next: DecodeNext) -> DecodeNext:
        """Return the shared form of the function that decodes this process's band."""
        group = self._world.group

        def decode_band_next(latents: torch.Tensor) -> Iterator[torch.Tensor]:
            if not self._splits(latents):
                rows = latents.shape[-2]
                raise ConfigError(f"stream: {rows} rows of latents make no band for each of {group.size} processes")
            band = latents[..., band_of(latents.shape[-2], group), :]
            return (gather_bands(frames, 2, group, latents.shape[-2]) for frames in decode_next(band))

        return DecodeNext(decode_band_next, lambda: self._clip(decode_next.fork()))

    def _splits(self, latents: torch.Tensor) -> bool:
        return self._in_bands and latents.shape[-2] >= self._world.size

    def _decode_on_first(self, latents: torch.Tensor) -> torch.Tensor:
        made: list[torch.Tensor] = []

        def decode() -> str:
            assert self._decoder is not None
            made.append(self._decoder.decode(latents))
            return json.dumps(list(made[0].shape))

        shape = json.loads(self._world.from_first(decode))
        device = self._world.device
        frames = made[0].to(device) if made else torch.empty(shape, dtype=torch.float32, device=device)
        return self._world.broadcast(frames)

    def decode_audio(self, latents: torch.Tensor) -> Audio | None:
        """Decode the sound on the first process, and return it on every one."""
        made: list[Audio | None] = []

        def decode() -> str:
            assert self._decoder is not None
            made.append(self._decoder.decode_audio(latents))
            return json.dumps(None if made[0] is None else [list(made[0].samples.shape), made[0].sample_rate])

        header = json.loads(self._world.from_first(decode))
        if header is None:
            return None
        shape, sample_rate = header
        device = self._world.device
        if made and made[0] is not None:
            samples = torch.from_numpy(made[0].samples).to(device)
        else:
            samples = torch.empty(shape, dtype=torch.float32, device=device)
        received = self._world.broadcast(samples).cpu().numpy()
        return Audio(numpy.ascontiguousarray(received), sample_rate)

    def _describe_decoder(self) -> tuple[str, str, str]:
        assert self._decoder is not None
        size = self._world.size
        how = f"on one process of {size}"
        if self._in_bands:
            how = f"in bands of rows on {size} processes"
        elif self._in_tiles:
            how = f"the tiles shared by {size} processes"
        return self._decoder.library, f"{self._decoder.implementation}, {how}", self._decoder.chosen
