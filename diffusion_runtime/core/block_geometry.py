"""BlockGeometry: a permutation of a sequence's tokens, cut into blocks."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Self

import torch


@dataclass(frozen=True)
class BlockGeometry:
    """A permutation of the tokens, cut into blocks; the blocks are packed, so none holds padding.

    Rows: G is 1 when all heads share the geometry, else batch * heads (of the queries, or of the keys), in that order.

    order: int32 [G, N]. order[g, p] is the token at position p. The grid's S tokens come first, block by block, then
        the text tokens, valid or not, in their own order; N = S + number of text tokens.
    offsets: int32 [G, num_blocks + 1]. Block i holds the positions offsets[g, i] to offsets[g, i + 1] - 1; empty blocks
        are allowed; offsets[g, -1] = S.
    max_block_size: an upper bound on the size of every block, known without reading from the device.
    uniform_block_size: the size of every block when they are all equal, else None.
    is_identity: whether it is known on the host that `order` is 0, 1, 2, ...: the tokens are stored block by block.
    """

    order: torch.Tensor
    offsets: torch.Tensor
    max_block_size: int
    uniform_block_size: int | None = None
    is_identity: bool = False

    @property
    def num_groups(self) -> int:
        return self.order.shape[0]

    @property
    def num_blocks(self) -> int:
        return self.offsets.shape[1] - 1

    @property
    def num_tokens(self) -> int:
        """Grid and text tokens together."""
        return self.order.shape[1]

    @property
    def sizes(self) -> torch.Tensor:
        """int32 [G, num_blocks]."""
        return self.offsets.diff(dim=1)

    def block_of_token(self) -> torch.Tensor:
        """int32 [G, N]: the block of each token, by token; num_blocks for text tokens."""
        positions = torch.arange(self.num_tokens, device=self.order.device, dtype=torch.int32)
        block_of_position = torch.searchsorted(
            self.offsets[:, 1:].contiguous(), positions.expand_as(self.order).contiguous(), right=True, out_int32=True
        )
        block = torch.empty_like(self.order)
        return block.scatter_(1, self.order.long(), block_of_position)

    def positions(self) -> torch.Tensor:
        """int32 [G, N]: the position of each token: the inverse of `order`."""
        positions = torch.arange(self.num_tokens, device=self.order.device, dtype=torch.int32)
        return torch.empty_like(self.order).scatter_(1, self.order.long(), positions.expand_as(self.order))

    def to(self, device: torch.device | str) -> Self:
        """Return the same geometry on another device."""
        return dataclasses.replace(self, order=self.order.to(device), offsets=self.offsets.to(device))
