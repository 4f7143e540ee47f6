"""A frames x height x width grid cut into tiles; the last tile of an axis holds what is left."""

from __future__ import annotations

import dataclasses
import math

import torch

from diffusion_runtime.attention.backends.interface import AttentionCall
from diffusion_runtime.core.block_geometry import BlockGeometry
from diffusion_runtime.core.token_layout import RASTER, Extent, TokenLayout


def tile_counts(grid: Extent, tile: Extent) -> Extent:
    """Return the number of tiles along each axis."""
    frames, height, width = (-(-extent // size) for extent, size in zip(grid, tile, strict=True))
    return frames, height, width


def tile_order(grid: Extent, tile: Extent) -> tuple[torch.Tensor, torch.Tensor]:
    """Tiles in raster order, tokens in raster order inside a tile: the tokens as they come, by their places in the
    grid's raster order, int64 [S], and how many each tile holds, int64 [tiles]; on the CPU."""
    counts = tile_counts(grid, tile)
    axes = [torch.arange(extent, device="cpu") // size for extent, size in zip(grid, tile, strict=True)]
    t, h, w = torch.meshgrid(*axes, indexing="ij")
    tile_of_token = ((t * counts[1] + h) * counts[2] + w).flatten()
    return tile_of_token.argsort(stable=True), tile_of_token.bincount(minlength=math.prod(counts))


def tile_geometry(layout: TokenLayout, tile: Extent, device: torch.device | str) -> BlockGeometry:
    """The tiles of a layout's grid, shared by all heads; text after the grid. In a layout of the same tiles the tokens
    are in their order already."""
    return order_geometry(layout, *tile_order(layout.grid, tile)).to(device)


def tiles_of(call: AttentionCall, tile: Extent) -> BlockGeometry:
    """The tiles of a call's grid on its device, made once per request."""
    layout, device = call.grid_layout, call.q.device
    return call.state.request.compute_once(tile_geometry, without_lengths(layout), tile, device)


def without_lengths(layout: TokenLayout) -> TokenLayout:
    """A layout as blocks of the grid depend on it."""
    return dataclasses.replace(layout, valid_lengths=None)


def order_geometry(layout: TokenLayout, order: torch.Tensor, sizes: torch.Tensor) -> BlockGeometry:
    """Blocks of `sizes` [n] over the grid tokens as they come in `order` [S], by their places in the grid's raster
    order; on the CPU, shared by all heads."""
    offsets = torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).to(torch.int32)
    lengths = set(sizes.tolist())
    if layout.tile != RASTER:
        order = tile_order(layout.grid, layout.tile)[0].argsort()[order]
    order = sequence_order(layout.num_prefix_tokens, layout.num_suffix_tokens, order)
    return BlockGeometry(
        order=order[None].to(torch.int32),
        offsets=offsets[None],
        max_block_size=max(lengths, default=0),
        uniform_block_size=lengths.pop() if len(lengths) == 1 else None,
        is_identity=torch.equal(order, torch.arange(len(order), device="cpu")),
    )


def sequence_order(num_prefix: int, num_suffix: int, grid_order: torch.Tensor) -> torch.Tensor:
    """Token indexes of the whole sequence: the grid as in `grid_order` [..., S], then the text before and after it."""
    num_grid = grid_order.shape[-1]
    device, lead = grid_order.device, grid_order.shape[:-1]
    prefix = torch.arange(num_prefix, device=device).expand(*lead, -1)
    suffix = torch.arange(num_suffix, device=device).expand(*lead, -1) + num_prefix + num_grid
    return torch.cat([grid_order + num_prefix, prefix.to(grid_order.dtype), suffix.to(grid_order.dtype)], dim=-1)


def text_lengths(layout: TokenLayout, device: torch.device) -> torch.Tensor | None:
    """int32 [batch], valid text tokens of each sample; None when all are valid."""
    if not layout.has_padding:
        return None
    return torch.tensor(layout.valid_lengths, dtype=torch.int32, device=device)


def text_lengths_of(call: AttentionCall) -> torch.Tensor | None:
    """The text lengths of a call on its device, copied there once per request."""
    layout = call.grid_layout
    return call.state.request.compute_once(text_lengths, layout, call.q.device) if layout.has_padding else None
