"""The order of a grid's tokens in a transformer's blocks: that of its sparse layers' tiles, where they share one.

A sparse method with static blocks (tiles of sliding tile attention, of Video Sparse Attention) computes on tokens that
are stored block by block. Where all layers agree, tokens and rotary positions are permuted once before the first block
and back after the last one, and no layer packs. Everything between treats each token by itself or, as dense attention
and the text do, in no order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch

from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.attention.layers import AttentionLayer
from diffusion_runtime.attention.sparse.tiles import tile_geometry, tile_order
from diffusion_runtime.core.token_layout import RASTER, Extent, TokenLayout
from diffusion_runtime.parallel.sharding import GridOrder


def in_shared_order(
    context: AttentionContext, layers: Iterable[AttentionLayer], grid: Extent, device: torch.device
) -> AttentionContext:
    """The forward pass whose `sharding` brings the tokens of `grid` into the order that the layers share.

    It is the same at all steps of a request: what step caches keep of one step is added at another.
    """
    tile = context.state.of_branch(context.step).get_or_create(
        ("token order", grid), lambda: shared_tile(layers, grid, context.step.num_steps)
    )
    if tile == RASTER:
        return context
    order = context.state.request.compute_once(_grid_order, grid, tile, device)
    frames, height, width = tile
    context.recorder.note(f"the grid's tokens are in tiles of {frames} x {height} x {width} from block to block")
    return dataclasses.replace(context, sharding=dataclasses.replace(context.sharding, order=order))


def shared_tile(layers: Iterable[AttentionLayer], grid: Extent, num_steps: int) -> Extent:
    """The order that all layers prefer at all steps, as TokenLayout.tile; raster order where they differ."""
    layout = TokenLayout(grid)
    tiles = frozenset[Extent]().union(*(layer.decisions.preferred_tiles(layout, num_steps) for layer in layers))
    if len(tiles) != 1:
        return RASTER
    (tile,) = tiles
    return RASTER if tile_geometry(layout, tile, "cpu").is_identity else tile


def _grid_order(grid: Extent, tile: Extent, device: torch.device) -> GridOrder:
    tokens, _ = tile_order(grid, tile)
    return GridOrder(tile, tokens.to(device), tokens.argsort().to(device))
