"""SparsePlan: which key blocks each block of queries attends to. Every sparse method produces one."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

import torch

from diffusion_runtime.core.block_geometry import BlockGeometry


class RowCounts(NamedTuple):
    """of_blocks: int32 [G, q blocks, kv blocks], how many queries of a block see a key block; of_rows: int32 [G, S],
    how many key blocks a query sees. G: batch * heads."""

    of_blocks: torch.Tensor
    of_rows: torch.Tensor


@dataclass(frozen=True)
class SparsePlan:
    """A block-sparse attention pattern over a grid of S tokens and the text around it. B batch, H query heads.

    Queries of a block see every token of the key blocks that the block lists, and all valid text. Queries of text see
    everything that is valid. No query sees padded text, and its own rows are 0 in the result.

    method: the name of the planner.
    batch, num_heads, num_kv_heads: the shape it was made for.
    q, kv: how query and key tokens are gathered into blocks; kv geometries go by key heads.
    group_of: int32 [B, H], which of the R distinct selections a head uses.
    kv_count: int32 [R, q blocks], how many key blocks a query block lists.
    kv_index: int32 [R, q blocks, capacity], the listed key blocks, ascending; what follows kv_count is unspecified.
    num_grid_tokens: S.
    text_lengths: int32 [B], how many of the text tokens that follow in the geometries' order are valid; None for all.
    row_mask: int32 [B, H, S, words], or None. Bit b of word w: whether the query at this position of the order sees
        the key block 32 w + b that its block lists; without it every query sees every block that is listed.
    max_blocks_per_query: how many key blocks a grid query sees at most, known without reading from the device. A
        planner that gives it sets no bit of row_mask for a block that is not listed.
    row_counts: what is counted of row_mask, from planners that counted it.
    pooled_tail: every block of keys that a grid query does not see is one key of it all the same, as pooled_tail.py
        defines it; density and masks count the others alone.
    is_dense: every valid query sees every valid key, so a dense kernel gives the same.
    """

    method: str
    batch: int
    num_heads: int
    num_kv_heads: int
    q: BlockGeometry
    kv: BlockGeometry
    group_of: torch.Tensor
    kv_count: torch.Tensor
    kv_index: torch.Tensor
    num_grid_tokens: int
    text_lengths: torch.Tensor | None = None
    row_mask: torch.Tensor | None = None
    max_blocks_per_query: int | None = None
    row_counts: RowCounts | None = None
    pooled_tail: bool = False
    is_dense: bool = False

    @property
    def num_tokens(self) -> int:
        return self.q.num_tokens

    @property
    def num_text_tokens(self) -> int:
        return self.num_tokens - self.num_grid_tokens

    @property
    def device(self) -> torch.device:
        return self.kv_index.device

    @cached_property
    def block_mask(self) -> torch.Tensor:
        """bool [R, q blocks, kv blocks]: the listed pairs. For references and tests: it grows with the square of the
        length."""
        rows, num_q_blocks, capacity = self.kv_index.shape
        listed = torch.arange(capacity, device=self.device) < self.kv_count[..., None]
        mask = torch.zeros(rows, num_q_blocks, self.kv.num_blocks + 1, dtype=torch.bool, device=self.device)
        # What follows the count goes into one column too many, which is cut off.
        index = torch.where(listed, self.kv_index, self.kv.num_blocks).long()
        return mask.scatter_(2, index, True)[..., :-1]

    @cached_property
    def density(self) -> float:
        """Share of the (query, key) pairs of valid tokens that is attended to, over all samples and heads.

        Synchronises with the device that holds the plan.
        """
        kept, total = 0, 0
        for sample in range(self.batch):
            text = self.valid_text(sample)
            valid = self.num_grid_tokens + text
            total += self.num_heads * valid * valid
            kept += self.num_heads * (self.num_grid_tokens * text + text * valid)
        return (kept + self._kept_grid_pairs()) / max(1, total)

    def _kept_grid_pairs(self) -> int:
        if self.row_mask is not None:
            return sum(
                int((self.row_selection(sample, head).double() @ self._kv_sizes(sample, head)).sum())
                for sample in range(self.batch)
                for head in range(self.num_heads)
            )
        repeats = self.num_heads // self.num_kv_heads
        heads = torch.arange(self.batch * self.num_heads, device=self.device)
        group, q_row = self.group_of.flatten().long(), heads if self.q.num_groups > 1 else heads * 0
        kv_row = heads // repeats if self.kv.num_groups > 1 else heads * 0
        # Heads that share a key head lie next to each other, and so do the samples' key heads.
        seen = torch.einsum("gqk,gk->gq", self.block_mask[group].double(), self.kv.sizes[kv_row].double())
        return int((seen * self.q.sizes[q_row]).sum())

    def _kv_sizes(self, sample: int, head: int) -> torch.Tensor:
        kv_row = sample * self.num_kv_heads + head // (self.num_heads // self.num_kv_heads)
        return self.kv.sizes[0 if self.kv.num_groups == 1 else kv_row].double()

    def row_selection(self, sample: int, head: int) -> torch.Tensor:
        """bool [S, kv blocks]: which listed blocks each grid query sees, by its position in the order."""
        q_row = 0 if self.q.num_groups == 1 else sample * self.num_heads + head
        sizes = self.q.sizes[q_row].long()
        listed = self.block_mask[int(self.group_of[sample, head])].repeat_interleave(sizes, dim=0)
        if self.row_mask is None:
            return listed
        block = torch.arange(self.kv.num_blocks, device=self.device)
        words = self.row_mask[sample, head][:, block // 32]
        return listed & ((words >> (block % 32).int()) & 1).bool()

    def kept_blocks(self, sample: int, head: int) -> torch.Tensor:
        """float32 [q blocks, kv blocks]: the share of a block's queries that see each key block. For pictures."""
        if self.row_mask is None:
            return self.block_mask[int(self.group_of[sample, head])].float()
        q_row = 0 if self.q.num_groups == 1 else sample * self.num_heads + head
        sizes = self.q.sizes[q_row].long()
        seen = self.row_selection(sample, head).float()
        kept = seen.new_zeros(self.q.num_blocks, self.kv.num_blocks)
        return kept.index_add_(0, torch.repeat_interleave(sizes), seen) / sizes.clamp(min=1)[:, None]

    def valid_text(self, sample: int) -> int:
        """Return the number of valid text tokens of a sample. Synchronises with the device that holds the plan."""
        return self.num_text_tokens if self.text_lengths is None else int(self.text_lengths[sample])

    def to_dense_mask(self) -> torch.Tensor:
        """bool [B, H, N, N], (query, key), tokens in the order of the sequence."""
        return torch.stack(
            [
                torch.stack([self._dense_mask_of(sample, head) for head in range(self.num_heads)])
                for sample in range(self.batch)
            ]
        )

    def _dense_mask_of(self, sample: int, head: int) -> torch.Tensor:
        q_row = 0 if self.q.num_groups == 1 else sample * self.num_heads + head
        kv_row = sample * self.num_kv_heads + head // (self.num_heads // self.num_kv_heads)
        kv_row = 0 if self.kv.num_groups == 1 else kv_row
        grid, text = self.num_grid_tokens, self.valid_text(sample)
        in_order = torch.zeros(self.num_tokens, self.num_tokens, dtype=torch.bool, device=self.device)
        kv_block = torch.repeat_interleave(self.kv.sizes[kv_row].long())
        in_order[:grid, :grid] = self.row_selection(sample, head)[:, kv_block]
        in_order[: grid + text, grid : grid + text] = True
        in_order[grid : grid + text, :grid] = True
        mask = torch.empty_like(in_order)
        q_order, kv_order = self.q.order[q_row].long(), self.kv.order[kv_row].long()
        mask[q_order[:, None], kv_order[None, :]] = in_order
        return mask

    def heads(self, start: int, stop: int) -> Self:
        """Return the plan of query heads start to stop - 1, which must be whole groups that share key heads."""
        repeats = self.num_heads // self.num_kv_heads
        assert start % repeats == stop % repeats == 0, "heads that share a key head stay together"
        return dataclasses.replace(
            self,
            num_heads=stop - start,
            num_kv_heads=(stop - start) // repeats,
            q=_geometry_of_heads(self.q, self.batch, start, stop),
            kv=_geometry_of_heads(self.kv, self.batch, start // repeats, stop // repeats),
            group_of=self.group_of[:, start:stop].contiguous(),
            row_mask=None if self.row_mask is None else self.row_mask[:, start:stop].contiguous(),
            row_counts=None,
        )

    def to(self, device: torch.device | str) -> Self:
        """Return the same plan on another device."""
        return dataclasses.replace(
            self,
            q=self.q.to(device),
            kv=self.kv.to(device),
            group_of=self.group_of.to(device),
            kv_count=self.kv_count.to(device),
            kv_index=self.kv_index.to(device),
            text_lengths=None if self.text_lengths is None else self.text_lengths.to(device),
            row_mask=None if self.row_mask is None else self.row_mask.to(device),
            row_counts=None,
        )


def _geometry_of_heads(geometry: BlockGeometry, batch: int, start: int, stop: int) -> BlockGeometry:
    if geometry.num_groups == 1:
        return geometry
    rows = torch.arange(geometry.num_groups, device=geometry.order.device).view(batch, -1)[:, start:stop].flatten()
    return dataclasses.replace(geometry, order=geometry.order[rows], offsets=geometry.offsets[rows])


@dataclass(frozen=True)
class PooledBranch:
    """Term added to the result of grid queries: gate * pooled[block of the query].

    pooled: [B, H, q blocks, head_dim]; gate: [B, seq, H, head_dim].
    """

    pooled: torch.Tensor
    gate: torch.Tensor


def add_branch(out: torch.Tensor, plan: SparsePlan, branch: PooledBranch) -> torch.Tensor:
    """out + gate * pooled, in float32 at least; returned in the shape and dtype of out [B, seq, H, head_dim]."""
    working = torch.promote_types(out.dtype, torch.float32)
    # Text tokens read one row too many, which is zero: they have no block to pool.
    pooled = torch.nn.functional.pad(branch.pooled.to(working), (0, 0, 0, 1))
    block = plan.q.block_of_token().long()
    rows = block.view(-1, 1, block.shape[1]) if plan.q.num_groups == 1 else block.view(*pooled.shape[:2], -1)
    index = rows.expand(*pooled.shape[:2], -1)[..., None].expand(-1, -1, -1, pooled.shape[-1])
    spread = pooled.gather(2, index).transpose(1, 2)
    return (out.to(working) + branch.gate.to(working) * spread).to(out.dtype)
