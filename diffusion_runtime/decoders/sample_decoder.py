"""Decoding of one sample's latents into frames, at once or in tiles that overlap and are blended.

Tiles bound the memory of a decoder by their size. Neighbours overlap, and the shared part is blended linearly along
each axis: in the order, and with the roundings, of diffusers' `tiled_decode`, so that the frames are the same. Several
processes may share the tiles of a clip: each decodes some, and all receive them.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from diffusion_runtime.config import tile_pixels
from diffusion_runtime.parallel.collectives import RankGroup, all_gather


@dataclass(frozen=True, eq=False)
class DecodeNext:
    """Decoder of a clip in pieces. decode, which a call is: decode its next latents, chunk after chunk, as
    SampleDecoder.decode after the pieces before. fork: another clip with the same pieces so far, which continues
    independently; what the convolutions have read is copied. Call `fork` after the first piece, and between two whose
    frames have all been read."""

    decode: Callable[[torch.Tensor], Iterator[torch.Tensor]]
    fork: Callable[[], DecodeNext]

    def __call__(self, latents: torch.Tensor) -> Iterator[torch.Tensor]:
        return self.decode(latents)


class SampleDecoder(ABC):
    """Latents of one sample to frames.

    frames_factor: frames that every latent frame but the first becomes. keeps_history: whether it goes from latent
    frame to latent frame and keeps what its convolutions have read, so that a clip may come in pieces (`clip`).
    """

    frames_factor: int
    keeps_history: bool = False

    @abstractmethod
    def decode(self, raw: torch.Tensor, ranks: RankGroup | None = None) -> Iterator[torch.Tensor]:
        """Yield the frames chunk after chunk, [1, 3, frames, height, width], in [-1, 1].

        raw: latents as the autoencoder takes them, [1, channels, frames, height, width], in its weights' dtype. ranks:
        processes that decode together; whether raw is then this one's band of rows or everything depends on the
        decoder.
        """

    def clip(self, ranks: RankGroup | None = None) -> AbstractContextManager[DecodeNext]:
        """Context manager: decode one clip whose latents come in pieces, to the frames of the whole clip. The histories
        of the convolutions end with the context. For decoders that `keeps_history`."""
        raise NotImplementedError


class WholeDecoder(SampleDecoder):
    """Decoder of everything at once. network: of latents, as in SampleDecoder.decode."""

    def __init__(self, network: Callable[[torch.Tensor], torch.Tensor], frames_factor: int) -> None:
        self._network = network
        self.frames_factor = frames_factor

    def decode(self, raw: torch.Tensor, ranks: RankGroup | None = None) -> Iterator[torch.Tensor]:
        """Decode everything at once; the work is never shared."""
        assert ranks is None
        yield self._network(raw)


@dataclass(frozen=True)
class Tiling:
    """size, stride: of tiles along height and width, in latents; pixels: of one latent, a side.

    frames: latent frames of a tile and from one to the next, None for tiles of all frames. After the first, a tile
    reads one latent frame more, whose frame is left out. keeps_ends: a tile that reaches the end is the last; otherwise
    another one follows for what lies beyond the stride, as in diffusers, however narrow that is. is_default: whether
    the decoder works in tiles unless told otherwise, as its authors run it. is_exact: tiles of decoders/exact_tiles.py,
    which are not blended.
    """

    size: int
    stride: int
    pixels: int
    frames: tuple[int, int] | None = None
    keeps_ends: bool = False
    is_default: bool = False
    is_exact: bool = False

    def chosen(self, choice: str) -> Tiling | None:
        """Return the tiles for a value of RuntimeConfig.vae_tiling: of a size in pixels, with an overlap or this one's
        share of it; None for no tiles."""
        if choice in ("auto", "off"):
            return self if choice == "auto" and self.is_default else None
        if choice == "on":
            return self
        side, overlap = tile_pixels(choice)
        size = side // self.pixels
        shared = size * (self.size - self.stride) // self.size if overlap is None else overlap // self.pixels
        return dataclasses.replace(self, size=size, stride=size - shared)

    @property
    def text(self) -> str:
        """Return the tiles in words, for the report and the plan."""
        side, overlap = self.size * self.pixels, (self.size - self.stride) * self.pixels
        if self.is_exact:
            return f"tiles of {side} pixels, to rounding as a whole decode"
        return f"tiles of {side} pixels that overlap by {overlap}, not as a whole decode"

    def starts(self, length: int, size: int, stride: int) -> list[int]:
        """Return where tiles of `size` begin along an axis."""
        starts = list(range(0, length, stride))
        ended = [start for start in starts if start + size >= length]
        return starts[: starts.index(ended[0]) + 1] if self.keeps_ends else starts

    def is_needed(self, raw: torch.Tensor) -> bool:
        """Return whether latents are larger than a tile."""
        return max(raw.shape[-2:]) > self.size or (self.frames is not None and raw.shape[2] > self.frames[0])

    def largest(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """Return latent frames, height and width of the largest tile of latents of this size."""
        frames, height, width = shape
        length = frames if self.frames is None or frames <= self.frames[0] else self.frames[0] + 1
        return length, min(height, self.size), min(width, self.size)


class TiledDecoder(SampleDecoder):
    """Decoder that works tile by tile, each with another decoder; a chunk holds the frames of one tile along the
    frames.

    With several processes every one is given everything, decodes its share of the tiles and gets all frames.
    """

    def __init__(self, decoder: SampleDecoder, tiling: Tiling) -> None:
        self._decoder = decoder
        self._tiling = tiling
        self.frames_factor = decoder.frames_factor

    def decode(self, raw: torch.Tensor, ranks: RankGroup | None = None) -> Iterator[torch.Tensor]:
        tiling, num_frames = self._tiling, raw.shape[2]
        if tiling.frames is None or num_frames <= tiling.frames[0]:
            if max(raw.shape[-2:]) <= tiling.size:
                yield from self._decoder.decode(raw)
            else:
                yield self._in_space(raw, ranks)
            return
        size, stride = tiling.frames
        before: torch.Tensor | None = None
        starts = tiling.starts(num_frames, size + 1, stride)
        for start in starts:
            tile = self._in_space(raw[:, :, start : start + size + 1], ranks)
            if before is not None:
                tile = tile[:, :, 1:]
                _blend(before, tile, 2, (size - stride) * self.frames_factor)
            kept = stride * self.frames_factor + (1 if before is None else 0)
            if start == starts[-1]:
                # Everything, or less than a stride.
                kept = tile.shape[2]
            before = tile
            if tile.shape[2]:
                yield tile[:, :, :kept]

    def _in_space(self, raw: torch.Tensor, ranks: RankGroup | None) -> torch.Tensor:
        """Decode the full height and width of some latent frames."""
        size, stride, pixels = self._tiling.size, self._tiling.stride, self._tiling.pixels
        height, width = raw.shape[-2:]
        if max(height, width) <= size:
            return self._whole(raw)
        overlap, kept = (size - stride) * pixels, stride * pixels
        tops, lefts = (self._tiling.starts(length, size, stride) for length in (height, width))
        places = [(top, left) for top in tops for left in lefts]
        tiles = [raw[..., top : top + size, left : left + size] for top, left in places]
        decoded = self._decoded(tiles, ranks)
        rows: list[torch.Tensor] = []
        above: list[torch.Tensor] = []
        for top in tops:
            row = [next(decoded) for _ in lefts]
            for index, tile in enumerate(row):
                if above:
                    _blend(above[index], tile, 3, overlap)
                if index:
                    _blend(row[index - 1], tile, 4, overlap)
            # The last ones along each side are kept whole.
            rows_kept = kept if top != tops[-1] else size * pixels
            parts = [tile[..., :rows_kept, :kept] for tile in row[:-1]]
            rows.append(torch.cat([*parts, row[-1][..., :rows_kept, :]], dim=4))
            above = row
        return torch.cat(rows, dim=3)

    def _decoded(self, tiles: Sequence[torch.Tensor], ranks: RankGroup | None) -> Iterator[torch.Tensor]:
        """Yield the frames of all tiles, in their order."""
        if ranks is None:
            yield from map(self._whole, tiles)
            return
        own = [self._whole(tile).flatten() for tile in tiles[ranks.index :: ranks.size]]
        sizes = [self._frames_shape(tile) for tile in tiles]
        longest = max(sum(math.prod(size) for size in sizes[rank :: ranks.size]) for rank in range(ranks.size))
        sent = torch.zeros(longest, dtype=tiles[0].dtype, device=tiles[0].device)
        if own:
            together = torch.cat(own)
            sent[: together.numel()] = together
        of_ranks, positions = all_gather(ranks, sent), [0] * ranks.size
        for index, size in enumerate(sizes):
            rank, count = index % ranks.size, math.prod(size)
            yield of_ranks[rank][positions[rank] : positions[rank] + count].view(size)
            positions[rank] += count

    def _frames_shape(self, tile: torch.Tensor) -> tuple[int, ...]:
        """Return the shape of a decoded tile: three colours."""
        frames, height, width = tile.shape[2:]
        pixels = self._tiling.pixels
        return 1, 3, 1 + self.frames_factor * (frames - 1), height * pixels, width * pixels

    def _whole(self, tile: torch.Tensor) -> torch.Tensor:
        chunks = list(self._decoder.decode(tile))
        return chunks[0] if len(chunks) == 1 else torch.cat(chunks, dim=2)


def _blend(before: torch.Tensor, tile: torch.Tensor, dim: int, overlap: int) -> None:
    """Blend the beginning of `tile` along `dim` linearly with the end of `before`, in place."""
    overlap = min(before.shape[dim], tile.shape[dim], overlap)
    if overlap == 0:
        return
    share = torch.tensor([step / overlap for step in range(overlap)], dtype=torch.float64)
    shape = [-1 if axis == dim else 1 for axis in range(tile.dim())]
    end, start = before.narrow(dim, before.shape[dim] - overlap, overlap), tile.narrow(dim, 0, overlap)
    # Products and sum round to the frames' dtype, as they do row after row with Python numbers.
    old, new = (weight.to(torch.float32).view(shape).to(tile.device) for weight in (1 - share, share))
    start.copy_((end * old).to(tile.dtype) + (start * new).to(tile.dtype))
