"""Sequence sharding: a transformer's grid tokens, in the order of its blocks, are cut into one slice per process; every
process holds the whole text."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from diffusion_runtime.core.token_layout import RASTER, Extent
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.parallel.collectives import RankGroup, all_gather
from diffusion_runtime.parallel.interface import AttentionInputs


@dataclass(frozen=True, eq=False)
class GridOrder:
    """The order in which a grid's tokens go through the blocks of a transformer.

    tile: as in TokenLayout. tokens: int64 [S], the place in raster order of the token at each position; positions: its
    inverse.
    """

    tile: Extent
    tokens: torch.Tensor
    positions: torch.Tensor


@dataclass(frozen=True)
class SequenceSharding:
    """Shards grid tokens after patchify and gathers them before unpatchify.

    Everything with one row per token is sharded alike: tokens, rotations, modulation by token. Text is not sharded:
    every process holds all of it. group: the processes that share the sequence, by slice. order: what the tokens are
    brought into before they are cut; None for raster order. The default shards nothing.
    """

    group: RankGroup = field(default_factory=RankGroup)
    order: GridOrder | None = None

    @property
    def tile(self) -> Extent:
        """The order of the grid's tokens between `shard` and `gather`, as TokenLayout names it."""
        return RASTER if self.order is None else self.order.tile

    @property
    def num_slices(self) -> int:
        return self.group.size

    def slice_length(self, num_tokens: int) -> int:
        """Tokens per slice, including the padding of the last ones."""
        return -(-num_tokens // self.group.size)

    def num_own(self, num_tokens: int) -> int:
        """Tokens of this process's slice without the padding behind them."""
        length = self.slice_length(num_tokens)
        return min(max(num_tokens - self.group.index * length, 0), length)

    def shard(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """This process's slice of the grid tokens along `dim`, which come in raster order; rows past the end are zeros
        that are masked in attention."""
        if self.order is not None:
            x = x.index_select(dim, self.order.tokens)
        if self.group.size == 1:
            return x
        length, num_tokens = self.slice_length(x.shape[dim]), x.shape[dim]
        start = min(self.group.index * length, num_tokens)
        mine = x.narrow(dim, start, min(length, num_tokens - start))
        missing = length - mine.shape[dim]
        if missing:
            shape = list(x.shape)
            shape[dim] = missing
            return torch.cat([mine, x.new_zeros(shape)], dim=dim).contiguous()
        # A copy: a view would keep the other slices in memory.
        return mine.clone(memory_format=torch.contiguous_format)

    def local(self, tokens: slice, num_tokens: int) -> slice:
        """Return where a range of the grid's tokens, which must be in raster order, lies in this process's slice.
        Adjacent ranges stay adjacent.

        Padding goes with the last token. num_tokens: of the whole grid.
        """
        assert self.order is None, "a range in raster order is none in another"
        length = self.slice_length(num_tokens)
        bounds = [
            length if bound == num_tokens else min(max(bound - self.group.index * length, 0), length)
            for bound in tokens.indices(num_tokens)[:2]
        ]
        return slice(*bounds)

    def gather(self, x: torch.Tensor, num_tokens: int, dim: int = 1) -> torch.Tensor:
        """Gather all grid tokens along `dim` in raster order on every process. num_tokens: of the whole grid."""
        x = self.gather_in_order(x, num_tokens, dim)
        return x if self.order is None else x.index_select(dim, self.order.positions)

    def gather_in_order(self, x: torch.Tensor, num_tokens: int, dim: int = 1) -> torch.Tensor:
        """`gather` for those who take the tokens in any order, such as keys: as they are between `shard` and `gather`,
        which moves none."""
        if self.group.size == 1:
            return x
        return torch.cat(all_gather(self.group, x), dim=dim).narrow(dim, 0, num_tokens)


@dataclass(frozen=True)
class Slices:
    """A grid of num_tokens cut into num_slices, between text that every process holds.

    length: tokens per slice; the last slices hold fewer, or none, and are padded.
    """

    num_tokens: int
    num_slices: int
    length: int
    num_prefix: int
    num_suffix: int

    @property
    def num_text(self) -> int:
        return self.num_prefix + self.num_suffix

    def num_real(self, first: int, count: int) -> int:
        """Tokens of the grid in `count` slices from `first` on."""
        return min(max(self.num_tokens - first * self.length, 0), count * self.length)


def slices_of(inputs: AttentionInputs, num_slices: int) -> Slices:
    """Raises ConfigError unless q, k, v and the gate have the rows of one slice of the layout and its text, and the
    mask has those rows and the columns of the whole sequence."""
    if not inputs.q.dim() == inputs.k.dim() == inputs.v.dim() == 4:
        shapes = ", ".join(str(tuple(x.shape)) for x in (inputs.q, inputs.k, inputs.v))
        raise ConfigError(f"attention: expected q, k and v [batch, seq, heads, head_dim], got {shapes}")
    rows, layout = inputs.q.shape[1], inputs.layout
    if layout is None:
        slices = Slices(rows * num_slices, num_slices, rows, 0, 0)
    else:
        total = layout.num_grid_tokens
        slices = Slices(total, num_slices, -(-total // num_slices), layout.num_prefix_tokens, layout.num_suffix_tokens)
    tensors = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "gate": inputs.gate}
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape[1] != slices.length + slices.num_text:
            raise ConfigError(
                f"attention over a sequence that {num_slices} processes share: expected {name} to hold "
                f"{slices.length} of {slices.num_tokens} grid tokens and {slices.num_text} text tokens, got "
                f"{tensor.shape[1]} rows; cut the grid's tokens, and the rotations alike, with context.sharding.shard, "
                "and leave the text whole"
            )
    total = slices.num_tokens + slices.num_text
    if inputs.mask is not None and not (inputs.mask.dim() == 4 and set(inputs.mask.shape[2:]) <= {1, total}):
        raise ConfigError(
            f"attention over a sequence that {num_slices} processes share: expected a mask [batch or 1, heads or 1, "
            f"{total} or 1, {total}] over the whole sequence, got {list(inputs.mask.shape)}"
        )
    return slices


def rows(x: torch.Tensor, start: int, length: int) -> torch.Tensor:
    """Tokens start to start + length - 1 of x [batch, seq, ...]."""
    return x.narrow(1, start, length)


def around(prefix: torch.Tensor, grid: torch.Tensor, suffix: torch.Tensor) -> torch.Tensor:
    """Text before, grid, text after, without a copy where there is no text."""
    parts = [part for part in (prefix, grid, suffix) if part.shape[1]]
    return torch.cat(parts, dim=1) if len(parts) > 1 else (parts[0] if parts else grid)
