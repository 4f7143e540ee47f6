"""A frames x height x width grid cut into tiles; the last tile of an axis holds what is left."""

from __future__ import annotations

import torch

from diffusion_runtime.attention.backends.interface import AttentionCall
from diffusion_runtime.kernels.block_sparse.geometry import BlockGeometry
from diffusion_runtime.token_layout import TokenLayout

Extent = tuple[int, int, int]


def tile_counts(grid: Extent, tile: Extent) -> Extent:
    """How many tiles there are along each axis."""
    frames, height, width = (-(-extent // size) for extent, size in zip(grid, tile, strict=True))
    return frames, height, width


def tile_geometry(layout: TokenLayout, tile: Extent, device: torch.device | str) -> BlockGeometry:
    """Tiles in raster order, tokens in raster order inside a tile, shared by all heads; text after the grid."""
    counts = tile_counts(layout.grid, tile)
    axes = [torch.arange(extent, device="cpu") // size for extent, size in zip(layout.grid, tile, strict=True)]
    t, h, w = torch.meshgrid(*axes, indexing="ij")
    tile_of_token = ((t * counts[1] + h) * counts[2] + w).flatten()
    order = tile_of_token.argsort(stable=True)
    sizes = tile_of_token.bincount(minlength=counts[0] * counts[1] * counts[2])
    return order_geometry(layout, order, sizes).to(device)


def tiles_of(call: AttentionCall, tile: Extent) -> BlockGeometry:
    """The tiles of a call's grid on its device, made once per request."""
    layout, device = call.grid_layout, call.q.device
    # Without the lengths of the text, which tiles do not depend on.
    grid = TokenLayout(layout.grid, layout.num_prefix_tokens, layout.num_suffix_tokens)
    return call.state.request.compute_once(tile_geometry, grid, tile, device)


def order_geometry(layout: TokenLayout, order: torch.Tensor, sizes: torch.Tensor) -> BlockGeometry:
    """Blocks of `sizes` [n] over the grid tokens as they come in `order` [S]; on the CPU, shared by all heads."""
    offsets = torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).to(torch.int32)
    lengths = set(sizes.tolist())
    return BlockGeometry(
        order=sequence_order(layout.num_prefix_tokens, layout.num_suffix_tokens, order)[None].to(torch.int32),
        offsets=offsets[None],
        max_block_size=max(lengths, default=0),
        uniform_block_size=lengths.pop() if len(lengths) == 1 else None,
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
