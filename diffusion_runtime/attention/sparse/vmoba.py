"""V-MoBA: mixture of block attention for video (Wu et al., arXiv:2506.23858).

Keys are cut into chunks, in time, in space or in both from layer to layer. Every query selects chunks by their mean key
and attends exactly to the tokens of its own chunk and of those.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch

from diffusion_runtime.attention.backends.interface import AttentionCall, AttentionResult
from diffusion_runtime.attention.backends.registry import register_backend
from diffusion_runtime.attention.schedule import DenseRule, dense_first_layers, dense_first_steps
from diffusion_runtime.attention.sparse.interface import SparseBackend, SparseOptions, check_grid, plan_of_call
from diffusion_runtime.attention.sparse.tiles import (
    order_geometry,
    text_lengths_of,
    tile_counts,
    tile_order,
    without_lengths,
)
from diffusion_runtime.core.block_geometry import BlockGeometry
from diffusion_runtime.core.step_info import LayerInfo
from diffusion_runtime.core.token_layout import Extent, TokenLayout
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.kernels.block_means import block_means
from diffusion_runtime.kernels.block_packing import pack_tokens
from diffusion_runtime.kernels.block_sparse.expected import PlanForm
from diffusion_runtime.kernels.block_sparse.gathered import refusal_of_blocks
from diffusion_runtime.kernels.block_sparse.plan import SparsePlan
from diffusion_runtime.kernels.block_sparse.row_masks import count_rows, every_block, listed_blocks
from diffusion_runtime.kernels.block_sparse.triton import refusal_of_size
from diffusion_runtime.kernels.chunk_selection import SelectionRule, chunk_row_mask

ChunkKind = Literal["temporal", "spatial", "st"]
# So many consecutive tokens in raster order, or a tile (frames, height, width); the last chunk holds what is left.
ChunkShape = int | Extent

# Queries of a block share the list of the chunks that any of them selected, so a block is a kernel's tile of rows.
NUM_QUERIES_IN_BLOCK = 128

# Options that may be 0.
_COUNTS = ("first_full_step", "first_full_layer", "temporal_layer", "spatial_layer", "st_layer")


@dataclass(frozen=True)
class VMobaOptions(SparseOptions):
    """Chunk sizes are in tokens after patchify, and defaults those for Wan 2.1 at 480p.

    temporal_chunk_size: latent frames, not necessarily whole ones; spatial_chunk_size: (height, width), over all
    frames; st_chunk_size: (frames, height, width). Where a grid is no whole number of chunks, the last is shorter.
    temporal_topk, spatial_topk, st_topk: chunks a query keeps, its own among them (mode `topk`).
    moba_select_mode: `threshold` keeps chunks until they hold the share moba_threshold of the gates; `topk` a number.
    moba_threshold_type: what is compared, in both modes: the chunks of one query (`query_head`), all pairs of a head
    (`head_global`), all pairs (`overall`), or all queries of a chunk (`block`, with a threshold alone).
    first_full_step, first_full_layer: steps and layers before them attend to everything.
    temporal_layer, spatial_layer, st_layer: how many layers in a row have each kind of chunk, from first_full_layer on
    and over again.
    """

    temporal_chunk_size: int | float = 2
    temporal_topk: int = 3
    spatial_chunk_size: tuple[int, int] = (3, 4)
    spatial_topk: int = 20
    st_chunk_size: tuple[int, int, int] = (4, 6, 4)
    st_topk: int = 15
    moba_select_mode: Literal["threshold", "topk"] = "threshold"
    moba_threshold: float = 0.25
    moba_threshold_type: Literal["query_head", "head_global", "overall", "block"] = "query_head"
    first_full_step: int = 12
    first_full_layer: int = 0
    temporal_layer: int = 1
    spatial_layer: int = 1
    st_layer: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.temporal_chunk_size > 0 and math.isfinite(self.temporal_chunk_size)):
            raise ValueError(f"temporal_chunk_size must be a number of frames above 0, got {self.temporal_chunk_size}")
        for name, sizes in (
            ("spatial_chunk_size", self.spatial_chunk_size),
            ("st_chunk_size", self.st_chunk_size),
        ):
            if min(sizes) < 1:
                raise ValueError(f"{name} must be 1 or more along every axis, got {list(sizes)}")
        for kind, top in self.top.items():
            if top < 1:
                raise ValueError(f"{kind}_topk must be 1 or more, as it counts a query's own chunk, got {top}")
        for name in _COUNTS:
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if self.temporal_layer + self.spatial_layer + self.st_layer == 0:
            raise ValueError("one of temporal_layer, spatial_layer and st_layer must be 1 or more, all are 0")
        if not (self.moba_threshold >= 0 and math.isfinite(self.moba_threshold)):
            raise ValueError(f"moba_threshold must be 0 or more (1 keeps everything), got {self.moba_threshold}")
        if (self.moba_select_mode, self.moba_threshold_type) == ("topk", "block"):
            raise ValueError(
                "moba_select_mode topk has no moba_threshold_type block: a number of chunks belongs to queries; choose "
                "query_head, head_global or overall"
            )

    @property
    def top(self) -> dict[ChunkKind, int]:
        return {"temporal": self.temporal_topk, "spatial": self.spatial_topk, "st": self.st_topk}

    def dense_schedule(self, num_layers: int, num_steps: int) -> tuple[DenseRule, ...]:  # noqa: ARG002
        return (
            *dense_first_steps(self.first_full_step, f"first_full_step {self.first_full_step}"),
            *dense_first_layers(self.first_full_layer, f"first_full_layer {self.first_full_layer}"),
        )


@register_backend
class VMobaBackend(SparseBackend):
    """Chunks that any query of a block selected are listed for the block; one bit per query marks those it sees."""

    name = "vmoba_attn"
    aliases = ("vmoba",)
    masks_rows = True
    summary = "V-MoBA: every query selects chunks of keys, cut in time and space by turns"
    options_type = VMobaOptions
    self_test_options = MappingProxyType({"spatial_chunk_size": (2, 3), "st_chunk_size": (2, 3, 4)})

    def keeps_everything(self, options: VMobaOptions, layout: TokenLayout, layer: LayerInfo) -> str | None:
        kind = chunk_kind(options, layer)
        num_chunks = chunk_count(layout.grid, chunk_shape(options, layout, kind))
        if num_chunks == 1:
            return "the grid is one chunk"
        if options.moba_select_mode == "topk" and options.top[kind] >= num_chunks:
            return f"{kind}_topk keeps every chunk"
        if options.moba_select_mode == "threshold" and options.moba_threshold >= 1:
            return "moba_threshold keeps every chunk"
        return None

    def sparse_density(self, options: VMobaOptions, layout: TokenLayout, layer: LayerInfo) -> float | None:
        """Return the density for a fixed number of chunks, which short chunks at the ends may lower; None for a
        threshold."""
        if options.moba_select_mode == "threshold":
            return None
        kind = chunk_kind(options, layer)
        return options.top[kind] / chunk_count(layout.grid, chunk_shape(options, layout, kind))

    def plan_form(self, options: VMobaOptions, layout: TokenLayout, layer: LayerInfo) -> PlanForm:
        num_chunks = chunk_count(layout.grid, chunk_shape(options, layout, chunk_kind(options, layer)))
        return PlanForm(layout.num_tokens, layout.num_grid_tokens, num_chunks, has_row_masks=True)

    def check_split_heads(self, options: VMobaOptions) -> None:
        if options.moba_threshold_type in ("overall", "block"):
            raise ConfigError(
                f"moba_threshold_type {options.moba_threshold_type} compares all heads of a layer, which processes "
                "share here; use query_head or head_global, or ulysses_degree 1 and tensor_parallel_size 1"
            )

    def run(self, call: AttentionCall) -> AttentionResult:
        check_grid(self.name, call)
        reason = self.dense_reason(call)
        if reason is not None:
            return self.run_dense(call, reason)
        if refusal_of_size(call.q, call.q.shape[1]) is not None:
            return self.run_sparse(call, self.select_blocks(call))
        # The pass that packs the keys averages them too.
        chunks, layout = _chunks_of_call(call), call.grid_layout
        packed = pack_tokens(
            call.q,
            call.k,
            call.v,
            chunks.q,
            chunks.kv,
            num_grid_tokens=layout.num_grid_tokens,
            text_lengths=text_lengths_of(call),
            averaged="kv" if call.options.tail == "pooled" else "k",
        )
        assert packed.k_means is not None
        return self.run_sparse(call, self._select(call, packed.k_means), packed=packed)

    def select_blocks(self, call: AttentionCall) -> SparsePlan:
        return self._select(call, block_means(call.k, _chunks_of_call(call).kv))

    def _select(self, call: AttentionCall, means: torch.Tensor) -> SparsePlan:
        """means: of the keys of each chunk."""
        options: VMobaOptions = call.options
        kind, layout, chunks = chunk_kind(options, call.layer), call.grid_layout, _chunks_of_call(call)
        rule = SelectionRule(
            options.moba_threshold_type,
            options.top[kind] if options.moba_select_mode == "topk" else None,
            options.moba_threshold,
        )
        row_mask = chunk_row_mask(call.q, means, chunks.q.order[0], chunks.chunk_of_row, rule)
        counts = count_rows(row_mask.flatten(0, 1), chunks.q, chunks.num_chunks)
        heads = (call.batch, call.num_heads)
        if refusal_of_blocks(call.q, chunks.q, chunks.kv, layout.num_grid_tokens) is None:
            # The kernel that gathers queries reads no lists: making them takes eleven launches.
            kv_count, kv_index = call.state.request.compute_once(
                every_block, chunks.q.num_blocks, chunks.num_chunks, call.q.device
            )
            group_of = torch.zeros(heads, dtype=torch.int32, device=call.q.device)
        else:
            kv_count, kv_index = listed_blocks(counts.of_blocks)
            group_of = torch.arange(math.prod(heads), dtype=torch.int32, device=call.q.device).view(heads)
        # A number of chunks over more than one query is an average.
        bound = rule.top if rule.top is not None and rule.group == "query_head" else chunks.num_chunks
        return plan_of_call(
            self.name,
            call,
            q=chunks.q,
            kv=chunks.kv,
            group_of=group_of,
            kv_count=kv_count,
            kv_index=kv_index,
            row_mask=row_mask,
            max_blocks_per_query=bound,
            row_counts=counts,
        )


def _chunks_of_call(call: AttentionCall) -> Chunks:
    shape = chunk_shape(call.options, call.grid_layout, chunk_kind(call.options, call.layer))
    return call.state.request.compute_once(chunks_of, without_lengths(call.grid_layout), shape, call.q.device)


def chunk_kind(options: VMobaOptions, layer: LayerInfo) -> ChunkKind:
    """Return how a layer cuts the grid: the kinds take turns, counted from first_full_layer."""
    turns = options.temporal_layer + options.spatial_layer + options.st_layer
    turn = (layer.index - options.first_full_layer) % turns
    if turn < options.temporal_layer:
        return "temporal"
    return "spatial" if turn < options.temporal_layer + options.spatial_layer else "st"


def chunk_shape(options: VMobaOptions, layout: TokenLayout, kind: ChunkKind) -> ChunkShape:
    """Return the shape of one kind's chunks. A temporal chunk holds consecutive tokens, not always whole frames; at
    least one token."""
    frames, height, width = layout.grid
    if kind == "temporal":
        return max(1, int(options.temporal_chunk_size * height * width))
    return (frames, *options.spatial_chunk_size) if kind == "spatial" else options.st_chunk_size


@dataclass(frozen=True)
class Chunks:
    """S grid tokens in the order of the chunks.

    kv: the chunks; q: the same order in blocks of at most NUM_QUERIES_IN_BLOCK tokens, each inside one chunk.
    chunk_of_row: int64 [S], the chunk of each position of the order.
    """

    kv: BlockGeometry
    q: BlockGeometry
    chunk_of_row: torch.Tensor

    @property
    def num_chunks(self) -> int:
        return self.kv.num_blocks


def chunk_count(grid: Extent, shape: ChunkShape) -> int:
    """Return the number of chunks of a grid."""
    return -(-math.prod(grid) // shape) if isinstance(shape, int) else math.prod(tile_counts(grid, shape))


def chunks_of(layout: TokenLayout, shape: ChunkShape, device: torch.device) -> Chunks:
    """The chunks of a layout's grid."""
    if isinstance(shape, int):
        total = layout.num_grid_tokens
        order = torch.arange(total, device="cpu")
        sizes_of_chunks = torch.tensor([min(shape, total - start) for start in range(0, total, shape)], device="cpu")
    else:
        order, sizes_of_chunks = tile_order(layout.grid, shape)
    kv = order_geometry(layout, order, sizes_of_chunks)
    sizes = []
    for size in kv.sizes[0].tolist():
        whole, rest = divmod(size, NUM_QUERIES_IN_BLOCK)
        sizes += [NUM_QUERIES_IN_BLOCK] * whole + [rest] * (rest > 0)
    q = order_geometry(layout, order, torch.tensor(sizes, device="cpu"))
    return Chunks(
        kv=kv.to(device),
        q=q.to(device),
        chunk_of_row=torch.repeat_interleave(kv.sizes[0].long()).to(device),
    )
