"""Exact tiled decoding of an image autoencoder with group norms: tiles that read a halo, under statistics of the whole.

Group norms keep tiles from being exact: their means and variances are those of the whole picture. They are collected
first, tile by tile. One level of resolution after the other, from its input, which is held whole: a pass over all tiles
for every norm runs the layers before it and adds up its statistics, and a last one makes the level's output. A tile
reads as many pixels beyond its edges as the level's convolutions reach; they are left out of sums and output. So
nothing is blended, and the picture is that of a whole decode to the rounding of the statistics. It takes 4.6 times the
operations (FLUX.1, 2048 x 2048 in tiles of 512), and the memory of one tile beside the inputs of two levels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from diffusion_runtime.decoders.fused_norms import with_shared_weights
from diffusion_runtime.decoders.sample_decoder import SampleDecoder
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.parallel.collectives import RankGroup


def decode_frame(autoencoder: Any, raw: torch.Tensor) -> torch.Tensor:
    """Decode latents at once to a picture in [-1, 1], [batch, 3, 1, height, width]. raw: [batch, channels, 1, height,
    width]."""
    picture: torch.Tensor = autoencoder.decode(raw.squeeze(2), return_dict=False)[0]
    return picture[:, :, None]


class _Collected(Exception):
    """A norm has added the statistics of a tile; what follows it is not computed."""


@dataclass
class _Interior:
    """The rows and columns of the present tile without its halo."""

    rows: slice = field(default_factory=lambda: slice(None))
    columns: slice = field(default_factory=lambda: slice(None))


class _WholeNorm(nn.Module):
    """Group norm with the statistics of the whole picture, which it collects from tiles until `close`."""

    def __init__(self, norm: nn.GroupNorm, interior: _Interior) -> None:
        super().__init__()
        self.norm = norm
        self.interior = interior
        self.parts: list[torch.Tensor] = []
        self.statistics: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise x [1, channels, height, width]. Raises _Collected before `close`."""
        norm = self.norm
        if self.statistics is None:
            own = x[..., self.interior.rows, self.interior.columns].float()
            groups = own.reshape(norm.num_groups, -1)
            variance, mean = torch.var_mean(groups, dim=1, correction=0)
            counts = torch.full_like(mean, groups.shape[1], dtype=torch.float64)
            self.parts.append(torch.stack([counts, mean.double(), variance.double()]))
            raise _Collected
        weight, bias = norm.weight.float(), norm.bias.float()
        return F.batch_norm(x, *self.statistics, weight, bias, training=False, eps=norm.eps)

    def close(self) -> None:
        """Combine the tiles' statistics, where there are any."""
        if not self.parts:
            return
        counts, means, variances = torch.stack(self.parts, dim=1)
        shares = counts / counts.sum(0)
        mean = (shares * means).sum(0)
        variance = (shares * (variances + (means - mean).square())).sum(0)
        channels = self.norm.num_channels // self.norm.num_groups
        self.statistics = mean.repeat_interleave(channels).float(), variance.repeat_interleave(channels).float()
        self.parts = []


@dataclass(frozen=True)
class _Tile:
    """Slices of one tile, (rows, columns) each: of the level's input with the halo, of what the layers make of that
    without it, of the level's output."""

    read: tuple[slice, slice]
    interior: tuple[slice, slice]
    written: tuple[slice, slice]


class ExactTiles(SampleDecoder):
    """Decoder of AutoencoderKL and AutoencoderKLFlux2 in tiles. side: of a tile in pixels. at_most: tiles of a level
    that are computed, the largest first; None for all, 1 to count what one takes.

    Raises ConfigError for a module with other blocks than those of convolutions.
    """

    frames_factor = 1

    def __init__(self, autoencoder: Any, side: int, at_most: int | None = None) -> None:
        self._whole = autoencoder
        self._autoencoder = with_shared_weights(autoencoder)
        self._side = side
        self._at_most = at_most
        decoder = self._autoencoder.decoder
        others = {type(block).__name__ for block in decoder.up_blocks} - {"UpDecoderBlock2D"}
        if others or not isinstance(decoder.conv_norm_out, nn.GroupNorm):
            found = ", ".join(sorted(others)) or type(decoder.conv_norm_out).__name__
            raise ConfigError(f"vae_tiling: no tiles for a decoder with {found}; leave out --vae-tiling")
        self._interior = _Interior()
        layers: list[nn.Module] = []
        self._levels: list[nn.Sequential] = []
        for block in decoder.up_blocks:
            self._levels.append(nn.Sequential(*layers, *block.resnets))
            layers = list(block.upsamplers or ())
        self._levels[-1].extend([decoder.conv_norm_out, decoder.conv_act, decoder.conv_out])
        for level in self._levels:
            for parent in list(level.modules()):
                for name, child in list(parent.named_children()):
                    if isinstance(child, nn.GroupNorm):
                        setattr(parent, name, _WholeNorm(child, self._interior))

    def decode(self, raw: torch.Tensor, ranks: RankGroup | None = None) -> Iterator[torch.Tensor]:
        """Decode tile by tile to one chunk, never shared. raw: [1, channels, 1, height, width]."""
        assert ranks is None
        if max(raw.shape[-2:]) * 2 ** (len(self._levels) - 1) <= self._side and self._at_most is None:
            yield decode_frame(self._whole, raw)
            return
        module, x = self._autoencoder, raw.squeeze(2)
        if module.post_quant_conv is not None:
            x = module.post_quant_conv(x)
        # At the resolution of the latents, where the middle block attends to the whole picture.
        x = module.decoder.mid_block(module.decoder.conv_in(x), None)
        for index, level in enumerate(self._levels):
            x = self._decoded(level, x, self._side // 2 ** (len(self._levels) - 1 - index))
        yield x[:, :, None]

    def _decoded(self, level: nn.Sequential, x: torch.Tensor, side: int) -> torch.Tensor:
        """Return the output of one level. x: its input; side: of a tile of its output."""
        norms = [each for each in level.modules() if isinstance(each, _WholeNorm)]
        for norm in norms:
            norm.statistics = None
        factor = 1 if hasattr(level[0], "norm1") else 2
        tiles = list(_tiles(x.shape[-2] * factor, x.shape[-1] * factor, side, factor, _reach(level)))
        if self._at_most is not None:
            tiles = sorted(tiles, key=lambda tile: -_area(tile))[: self._at_most]
        while any(norm.statistics is None for norm in norms):
            for tile in tiles:
                self._tile(level, x, tile)
            for norm in norms:
                norm.close()
        # Made before the first tile, so that a count of one tile has it, too.
        channels = [each for each in level.modules() if isinstance(each, nn.Conv2d)][-1].out_channels
        out = x.new_empty(1, channels, x.shape[-2] * factor, x.shape[-1] * factor)
        for tile in tiles:
            made = self._tile(level, x, tile)
            assert made is not None
            out[:, :, *tile.written] = made
            # A view of a whole tile with its halo, which the next tile would be computed beside.
            del made
        return out

    def _tile(self, level: nn.Sequential, x: torch.Tensor, tile: _Tile) -> torch.Tensor | None:
        """Return the level's output for a tile, without the halo; None where a norm collected instead."""
        self._interior.rows, self._interior.columns = tile.interior
        try:
            out: torch.Tensor = x[:, :, *tile.read]
            for layer in level:
                # Blocks take the embedding of a timestep, of which a decoder has none.
                out = layer(out, None) if hasattr(layer, "norm1") else layer(out)
        except _Collected:
            return None
        return out[:, :, *tile.interior]


def _area(tile: _Tile) -> int:
    rows, columns = tile.read
    return int((rows.stop - rows.start) * (columns.stop - columns.start))


def _reach(level: nn.Module) -> int:
    """Return how many pixels of the output's resolution beyond a pixel its value depends on."""
    return sum(each.kernel_size[0] // 2 for each in level.modules() if isinstance(each, nn.Conv2d))


def _tiles(height: int, width: int, side: int, factor: int, reach: int) -> Iterator[_Tile]:
    """Yield the tiles of a level. height, width: of its output, `factor` times its input's."""
    for rows in _intervals(height, side, factor, reach):
        for columns in _intervals(width, side, factor, reach):
            yield _Tile(*zip(rows, columns, strict=True))


def _intervals(length: int, side: int, factor: int, reach: int) -> Iterator[Sequence[slice]]:
    """Yield (read, interior, written) of every tile along one axis."""
    for start in range(0, length, side):
        end = min(start + side, length)
        first = max(start - reach, 0) // factor
        last = min(-(-(end + reach) // factor), length // factor)
        yield slice(first, last), slice(start - first * factor, end - first * factor), slice(start, end)
