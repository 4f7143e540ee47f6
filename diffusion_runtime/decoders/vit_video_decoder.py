"""Decoder of a video whose autoencoder is a vision transformer (MiniMax-H3): clip after clip, each in tiles, and the
normalisation of pixels and latents.

A clip of latents is decoded with the first latents of the next one. The frames that two clips share are blended
linearly over time, those that two tiles share over height, then width, in the order of the authors' code: a tile is
blended with its neighbours as they were decoded. A chunk of frames is one clip, of which one is in
memory at a time.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.attention.layers import AttentionLayer
from diffusion_runtime.decoders.interface import FrameStream, LatentDecoder
from diffusion_runtime.decoders.sample_decoder import Tiling
from diffusion_runtime.decoders.vit_decoder_network import VitDecoderSizes, VitVideoAutoencoder
from diffusion_runtime.errors import RequestError
from diffusion_runtime.layers.eight_bit_linear import ProductCounter
from diffusion_runtime.layers.fp8_linear import Fp8Linear, multiply_in_fp8
from diffusion_runtime.memory.device_memory import explain_memory_shortage
from diffusion_runtime.parallel.collectives import RankGroup, all_gather, inaccurate_alike
from diffusion_runtime.report.attention_report import AttentionRecorder

# Mean and deviation of ImageNet's pixels, which autoencoders that are trained with perceptual losses decode to.
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# Activations of the tiles that are decoded at once. Of MiniMax-H3 in bfloat16, 14 tiles of 256 x 256 take 1.6 GiB.
MAX_BATCH_BYTES = 2 * 2**30


@dataclass(frozen=True)
class TilesOfAxis:
    """Tiles along one axis. starts: of each; size: of all; overlaps: of each with the next."""

    starts: tuple[int, ...]
    size: int
    overlaps: tuple[int, ...]

    def times(self, factor: int) -> TilesOfAxis:
        """Return the same in units of which there are `factor` for each of these."""
        starts, overlaps = (tuple(factor * each for each in several) for several in (self.starts, self.overlaps))
        return TilesOfAxis(starts, factor * self.size, overlaps)


def tiles_of_axis(length: int, size: int, least_overlap: int) -> TilesOfAxis:
    """Return the fewest tiles that cover `length` exactly and overlap by `least_overlap` or more; the first ones by one
    more where the rest does not divide."""
    if size >= length:
        return TilesOfAxis((0,), length, ())
    number = math.ceil((length - least_overlap) / (size - least_overlap))
    more, first = divmod(size * number - least_overlap * (number - 1) - length, number - 1)
    overlaps = tuple(least_overlap + more + (index < first) for index in range(number - 1))
    starts = itertools.accumulate((size - overlap for overlap in overlaps), initial=0)
    return TilesOfAxis(tuple(starts), size, overlaps)


@dataclass(frozen=True)
class LatentClips:
    """Division of latent frames into clips. number: of them; num_padding: latent frames that the last one lacks, for
    which the last is repeated; num_frames: of the video."""

    number: int
    num_padding: int
    num_frames: int


def clips_of(sizes: VitDecoderSizes, num_latents: int) -> LatentClips:
    """Return the clips of so many latent frames. Raises RequestError for fewer than make a clip."""
    step = sizes.latents_per_clip
    own = num_latents - sizes.shared_latents
    if own < 1:
        raise RequestError(
            f"num_frames: a video has at least {sizes.shared_latents + 1} latent frames, got {num_latents}; use "
            f"{sizes.num_frames(step + sizes.shared_latents)}"
        )
    number = math.ceil(own / step)
    return LatentClips(number, number * step - own, sizes.num_frames(num_latents))


class VitVideoDecoder(LatentDecoder):
    """Decoder on a VitVideoAutoencoder, in the dtype of its weights. Several processes share the tiles of a clip.

    mean, std: of the latents by channel. attention: of each block. tiling: in which it decodes unless told otherwise;
    its overlap is the least that two tiles have.
    """

    library = "torch"
    splits_tiles = True

    def __init__(
        self,
        autoencoder: VitVideoAutoencoder,
        mean: Sequence[float],
        std: Sequence[float],
        attention: Sequence[AttentionLayer],
        tiling: Tiling,
    ) -> None:
        weight = autoencoder.post_quant_conv.weight
        self._autoencoder = autoencoder
        self._sizes = autoencoder.sizes
        self._device, self._dtype = weight.device, weight.dtype
        self._mean, self._std = (_by_channel(each, weight.device) for each in (mean, std))
        self._pixel_mean, self._pixel_std = (_by_channel(each, weight.device) for each in (IMAGENET_MEAN, IMAGENET_STD))
        self._attention = attention
        self._recorder = AttentionRecorder()
        self._tiling = tiling
        self._set_tiles(tiling.chosen("auto"))

    def attending(self, attention: Sequence[AttentionLayer]) -> LatentDecoder:
        other = copy.copy(self)
        other._attention = attention
        other._set_tiles(self._tiles)
        return other

    def recording(self, recorder: AttentionRecorder) -> LatentDecoder:
        other = copy.copy(self)
        other._recorder = recorder
        return other

    def in_tiles(self, choice: str) -> LatentDecoder:
        other = copy.copy(self)
        other._set_tiles(self._tiling.chosen(choice))
        return other

    def in_fp8(self) -> LatentDecoder:
        multiply_in_fp8(self._autoencoder.decoder.transformer_blocks, ProductCounter())
        self._set_tiles(self._tiles)
        return self

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.cat(list(self.stream(each).chunks), dim=1) for each in torch.split(latents, 1)])

    def stream(self, latents: torch.Tensor, bands: RankGroup | None = None) -> FrameStream:
        """Stream, a clip at a time. The normalisation is undone in float32, whatever dtype the decoder computes in."""
        clips = clips_of(self._sizes, latents.shape[2])
        return FrameStream(clips.num_frames, self._chunks(latents, clips, bands))

    def _chunks(self, latents: torch.Tensor, clips: LatentClips, ranks: RankGroup | None) -> Iterator[torch.Tensor]:
        sizes = self._sizes
        with self._decoding(latents):
            raw = (latents.to(self._device, torch.float32) * self._std + self._mean).to(self._dtype)
            raw = torch.cat([raw, raw[:, :, -1:].expand(-1, -1, clips.num_padding, -1, -1)], dim=2)
        # Frames that the next clip has as well; its own come after.
        shared: torch.Tensor | None = None
        # One state for all tiles: what a layer's attention loses is measured in the first of them.
        context = AttentionContext()
        step, own, left = sizes.latents_per_clip, sizes.latents_per_clip * sizes.patch[0], clips.num_frames
        for index in range(clips.number):
            with self._decoding(latents):
                clip = self._clip(raw[:, :, index * step : (index + 1) * step + sizes.shared_latents], context, ranks)
                frames = clip[:, :, sizes.num_lead_frames : own]
                if shared is not None:
                    blend_(frames, shared, 2, shared.shape[2])
                shared = clip[:, :, own + sizes.num_lead_frames :]
                if index == clips.number - 1:
                    frames = torch.cat([frames, shared], dim=2)
                else:
                    # Of its own: the rest of the clip can go.
                    shared = shared.clone()
                frames = self._as_pixels(frames[:, :, :left])
                del clip
            self._recorder.record_errors_of(context.recorder)
            left -= frames.shape[1]
            yield frames

    def _as_pixels(self, frames: torch.Tensor) -> torch.Tensor:
        """Return [1, frames, height, width, 3] in [0, 1]. frames: [1, 3, frames, height, width], overwritten."""
        return frames.mul_(self._pixel_std).add_(self._pixel_mean).clamp_(0.0, 1.0).permute(0, 2, 3, 4, 1).contiguous()

    def _clip(self, raw: torch.Tensor, context: AttentionContext, ranks: RankGroup | None) -> torch.Tensor:
        """Decode latents [1, channels, frames, height, width] of one clip to [1, 3, frames, height, width], float32."""
        rows, columns = axes_of_tiles(raw.shape[-2:], self._tiles)
        places = [(top, left) for top in rows.starts for left in columns.starts]
        tiles = [raw[0, :, :, top : top + rows.size, left : left + columns.size] for top, left in places]
        (depth, side), (frames, height, width) = self._sizes.patch, raw.shape[-3:]
        out = torch.empty(1, 3, frames * depth, height * side, width * side, device=raw.device)
        join_tiles(self._decoded(tiles, context, ranks), rows.times(side), columns.times(side), out)
        return out

    def _decoded(
        self, tiles: Sequence[torch.Tensor], context: AttentionContext, ranks: RankGroup | None
    ) -> Iterator[torch.Tensor]:
        """Yield the frames of all tiles in their order, [3, frames, height, width]."""
        if ranks is None:
            for batch in self._batches(tiles):
                yield from self._network(batch, context)
            return
        # As many on each, so that all send as much: the last ones of some are decoded for nothing.
        share = math.ceil(len(tiles) / ranks.size)
        own = [tiles[min(ranks.index + index * ranks.size, len(tiles) - 1)] for index in range(share)]
        # The first clip of a stream is the one in which layers are measured.
        is_measured = context.state.is_first("tiles")
        with inaccurate_alike(ranks, self._device) if is_measured else contextlib.nullcontext():
            decoded = torch.cat([self._network(batch, context) for batch in self._batches(own)])
        of_ranks = all_gather(ranks, decoded)
        for index in range(len(tiles)):
            yield of_ranks[index % ranks.size][index // ranks.size]

    def _batches(self, tiles: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield the tiles in batches of about one size, whose activations take no more than MAX_BATCH_BYTES."""
        size = batch_size(self._autoencoder, len(tiles), tuple(tiles[0].shape[1:]), self._dtype)
        for start in range(0, len(tiles), size):
            yield torch.stack(list(tiles[start : start + size]))

    def _network(self, batch: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        frames: torch.Tensor = self._autoencoder(batch, self._attention, context)
        return frames

    @contextlib.contextmanager
    def _decoding(self, latents: torch.Tensor) -> Iterator[None]:
        def advice() -> str:
            held = decoding_bytes(self._autoencoder, tuple(latents.shape[2:]), self._tiles)
            smaller = "A smaller height or width needs less" if self._tiles else "Leave out --vae-tiling off"
            return f"Decoding takes about {held / 2**30:.2f} GiB beside the weights. {smaller}"

        with explain_memory_shortage("decoding", advice), torch.inference_mode():
            yield

    def _set_tiles(self, tiles: Tiling | None) -> None:
        self._tiles = tiles
        self.chosen = f"role {self._attention[0].layer.role}"
        how = "" if tiles is None else f", in {tiles.text.partition(',')[0]} or more"
        q = torch.empty(1, 1, self._sizes.num_heads, self._sizes.head_dim, dtype=self._dtype, device=self._device)
        blocks = self._autoencoder.decoder.transformer_blocks
        products = ", fp8 products" if any(isinstance(layer, Fp8Linear) for layer in blocks.modules()) else ""
        backends = " and ".join(dict.fromkeys(layer.backend_of(q) for layer in self._attention))
        self.implementation = f"{self._autoencoder.class_name}, {backends}{products}{how}"


def batch_size(autoencoder: VitVideoAutoencoder, num_tiles: int, grid: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return how many tiles of `grid` latents are decoded at once."""
    sizes = autoencoder.sizes
    at_most = max(1, MAX_BATCH_BYTES // (bytes_of_token(sizes, dtype) * sizes.num_tokens(math.prod(grid))))
    return math.ceil(num_tiles / math.ceil(num_tiles / at_most))


def bytes_of_token(sizes: VitDecoderSizes, dtype: torch.dtype) -> int:
    """Return the activations of a token in a block: the residual stream in float32, its norm, the widest product and
    its half, and the branch."""
    return sizes.dim * (4 + dtype.itemsize * (2 + 3 * sizes.hidden_factor))


def decoding_bytes(autoencoder: VitVideoAutoencoder, shape: tuple[int, ...], tiling: Tiling | None) -> int:
    """Return the bytes that decoding [frames, height, width] latents has alive at once in addition to the weights, by
    formula. autoencoder: on any device, in the dtype that it computes in."""
    sizes, dtype = autoencoder.sizes, autoencoder.post_quant_conv.weight.dtype
    rows, columns = axes_of_tiles(shape[1:], tiling)
    frames = sizes.latents_per_clip + sizes.shared_latents
    grid = (frames, rows.size, columns.size)
    number = len(rows.starts) * len(columns.starts)
    in_batch = batch_size(autoencoder, number, grid, dtype)
    # Of a latent.
    num_colours = 3 * sizes.patch[0] * sizes.patch[1] ** 2
    of_tile, of_frame = num_colours * math.prod(grid) * dtype.itemsize, 4 * num_colours * math.prod(shape[1:])
    # A block of the network, then the tokens of a batch as patches and as pixels, then one tile of it in float32;
    # beside the batch before.
    of_block = in_batch * sizes.num_tokens(math.prod(grid)) * bytes_of_token(sizes, dtype)
    joined = in_batch * of_tile + 4 * num_colours * math.prod(grid)
    of_batch = max(of_block, 2 * in_batch * of_tile, joined) + (in_batch * of_tile if in_batch < number else 0)
    # All frames of a clip in float32, and those that leave it in the order of a file.
    leaving = sizes.num_frames(frames) / sizes.patch[0]
    return int(of_frame * frames + max(of_batch, of_frame * leaving))


def decoding_operations(autoencoder: VitVideoAutoencoder, shape: tuple[int, ...], tiling: Tiling | None) -> float:
    """Return the floating-point operations of decoding [frames, height, width] latents."""
    sizes = autoencoder.sizes
    rows, columns = axes_of_tiles(shape[1:], tiling)
    tokens = sizes.num_tokens((sizes.latents_per_clip + sizes.shared_latents) * rows.size * columns.size)
    weights = sum(each.numel() for each in autoencoder.decoder.parameters() if each.dim() == 2)
    of_tile = 2.0 * tokens * weights + 4.0 * tokens**2 * sizes.dim * sizes.num_layers
    return of_tile * len(rows.starts) * len(columns.starts) * clips_of(sizes, shape[0]).number


def axes_of_tiles(sides: Sequence[int], tiling: Tiling | None) -> tuple[TilesOfAxis, TilesOfAxis]:
    """Return the tiles along height and width of latents of that size."""
    height, width = (
        tiles_of_axis(side, *((side, 0) if tiling is None else (tiling.size, tiling.size - tiling.stride)))
        for side in sides
    )
    return height, width


def join_tiles(tiles: Iterator[torch.Tensor], rows: TilesOfAxis, columns: TilesOfAxis, out: torch.Tensor) -> None:
    """Write tiles to their places in `out` [1, channels, frames, height, width], blended where they overlap: each with
    its neighbour above, then with that to the left, both as they came. tiles: [channels, frames, height, width] row by
    row; they are converted to the dtype of `out` first."""
    above: list[torch.Tensor] = []
    for row, top in enumerate(rows.starts):
        current: list[torch.Tensor] = []
        for column, left in enumerate(columns.starts):
            tile = next(tiles)
            current.append(tile)
            blended = tile.to(out.dtype, copy=True)
            if row:
                blend_(blended, above[column], 2, rows.overlaps[row - 1])
            if column:
                blend_(blended, current[column - 1], 3, columns.overlaps[column - 1])
            # What it shares with the next one is written by that.
            height = rows.size - (rows.overlaps[row] if row < len(rows.overlaps) else 0)
            width = columns.size - (columns.overlaps[column] if column < len(columns.overlaps) else 0)
            out[0, :, :, top : top + height, left : left + width] = blended[:, :, :height, :width]
        above = current


def blend_(values: torch.Tensor, before: torch.Tensor, dim: int, overlap: int) -> None:
    """Blend the beginning of `values` along `dim` linearly with the end of `before`, in place, in the dtype of
    `values`."""
    overlap = min(before.shape[dim], values.shape[dim], overlap)
    share = torch.arange(overlap, device=values.device, dtype=values.dtype) / max(1, overlap)
    share = share.view([-1 if axis == dim else 1 for axis in range(values.dim())])
    end, start = before.narrow(dim, before.shape[dim] - overlap, overlap), values.narrow(dim, 0, overlap)
    start.mul_(share).add_(end.to(values.dtype).mul(1 - share))


def _by_channel(values: Sequence[float], device: torch.device) -> torch.Tensor:
    return torch.tensor(tuple(values), dtype=torch.float32, device=device).view(1, -1, 1, 1, 1)
