"""Rotary position embedding (RoPE) on a frames x height x width grid (Su et al., arXiv:2104.09864): by whole positions,
among the frames whose keys are cached, and by parts of an extent in seconds and pixels.

Neighbouring channels (2i, 2i + 1) are one complex number, and turning it by an angle is one multiplication; q and k are
turned in the pass that normalises them (kernels/qk_norm_rope). As a part of an extent, a position is a part of the
longest and widest clip there is, from -1 to 1, and every pair of channels of the whole width turns at a pace of its
own, so that no two heads turn alike (as in LTX-Video, arXiv:2501.00103).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from diffusion_runtime.attention.cache.frame_cache import FrameCache
from diffusion_runtime.attention.cache.plan import CachePlan
from diffusion_runtime.kernels.qk_norm_rope.api import norm_rope
from diffusion_runtime.layers.norm import RMSNorm
from diffusion_runtime.layers.riflex import lowered
from diffusion_runtime.parallel.sharding import SequenceSharding

THETA = 10000.0


def split_head_dim(head_dim: int) -> tuple[int, int, int]:
    """Channels of a head that carry (frame, row, column): rows and columns a third each, made even, frames the rest."""
    side = 2 * (head_dim // 6)
    return head_dim - 2 * side, side, side


def grid_rotations(
    grid: tuple[int, int, int],
    head_dim: int,
    device: torch.device,
    theta: float = THETA,
    lowered_index: int | None = None,
) -> torch.Tensor:
    """Unit complex numbers [tokens, head_dim / 2], complex64, for the tokens of a grid in raster order that starts at
    position 0 on every axis. lowered_index: see position_rotations."""
    axes, channels = tuple(range(size) for size in grid), split_head_dim(head_dim)
    return position_rotations(axes, channels, device, theta, lowered_index=lowered_index)


def position_rotations(
    axes: tuple[range, ...],
    channels: tuple[int, ...],
    device: torch.device,
    theta: float | Sequence[float] = THETA,
    spans: Sequence[int] | None = None,
    scales: Sequence[float] | None = None,
    lowered_index: int | None = None,
) -> torch.Tensor:
    """Unit complex numbers [tokens, sum(channels) / 2], complex64, for the tokens of a box of positions.

    axes: the positions along each axis; the tokens are all their combinations, the last axis varying fastest. channels:
    of a head that encode each axis, even numbers. spans: of tokens that cover so many positions along each axis,
    numbered by the first of them through `axes`; they turn by the middle one. None for one each. scales: what positions
    along each axis are multiplied by; None for 1. theta: of all axes, or one for each. lowered_index: of the frequency
    of the first axis, time, that RIFLEx lowers (layers/riflex.py); None for none.

    Channel pair i of an axis with n channels turns by position / theta ** (2 i / n). Angles are computed in float64: in
    float32 the last frames of a long clip would already be off in the sixth digit.
    """
    box = tuple(len(axis) for axis in axes)
    if device.type == "meta":
        return _shape_alone(math.prod(box), sum(channels) // 2)
    tables = []
    for place, (axis, num_channels) in enumerate(zip(axes, channels, strict=True)):
        span, scale = 1 if spans is None else spans[place], 1.0 if scales is None else scales[place]
        own = theta[place] if isinstance(theta, Sequence) else theta
        index = None if place else lowered_index
        table = _axis_rotations(axis, num_channels, own, span, scale, index)
        shape = [size if index == place else 1 for index, size in enumerate(box)]
        tables.append(table.view(*shape, -1).expand(*box, -1))
    return torch.cat(tables, dim=-1).flatten(0, -2).to(torch.complex64).to(device)


def diagonal_rotations(
    positions: range, channels: tuple[int, ...], device: torch.device, theta: float = THETA
) -> torch.Tensor:
    """Return position_rotations for tokens whose position is the same on every axis: [positions, sum(channels) / 2]."""
    whole = torch.cat([_axis_rotations(positions, num_channels, theta) for num_channels in channels], dim=-1)
    return whole.to(torch.complex64).to(device)


def followed_by_text(rotations: torch.Tensor, text: torch.Tensor | int) -> torch.Tensor:
    """Return the rotations [tokens, head_dim / 2] of a grid, then those of the text behind it. text: its own rotations,
    or the number of tokens that are not rotated."""
    if isinstance(text, int):
        text = rotations.new_ones(text, rotations.shape[1])
    return torch.cat([rotations, text])


def _shape_alone(*shape: int) -> torch.Tensor:
    """Return rotations on the meta device, for plans of memory: to compute those of a clip that is refused as too large
    would take minutes, and gigabytes of the machine."""
    return torch.empty(shape, dtype=torch.complex64, device="meta")


def _axis_rotations(
    positions: range,
    num_channels: int,
    theta: float,
    span: int = 1,
    scale: float = 1.0,
    lowered_index: int | None = None,
) -> torch.Tensor:
    """complex128 [positions, channels / 2]. span: positions that each of them covers, from itself on. scale: is
    multiplied with each. lowered_index: see position_rotations."""
    powers = torch.arange(0, num_channels, 2, dtype=torch.float64) / max(1, num_channels)
    places = torch.arange(positions.start, positions.stop, positions.step, dtype=torch.float64)
    paces = lowered(theta**-powers, lowered_index, len(positions))
    angles = torch.outer((places + (span - 1) / 2) * scale, paces)
    return torch.polar(torch.ones_like(angles), angles)


def norm_and_rotate(
    packed: torch.Tensor,
    norms: Sequence[RMSNorm],
    rotations: torch.Tensor | None,
    *,
    out: torch.Tensor | None = None,
    num_shares: int = 1,
) -> tuple[torch.Tensor, ...]:
    """q, k and v [batch, seq, heads, head_dim] of one product [batch, seq, 3, heads, head_dim], which is overwritten:
    q and k normalised and rotated; or the parts of another product, of which the first have norms.

    norms: of a head each, or of all heads together. rotations: [seq, head_dim / 2], also by sample or by head; None for
    none; see kernels/qk_norm_rope/api.py. out: written instead, such as the grid's tokens of a joint sequence.

    Where num_shares processes share the heads, `packed` holds this one's; a norm of all heads takes the squares of the
    others' from their processes, and rotations by head are those of all heads.
    """
    weights, eps, share = [norm.weight for norm in norms], norms[0].eps, norms[0].share
    if share is None:
        return norm_rope(packed, weights, eps, rotations, out=out, num_shares=num_shares)
    squares = torch.linalg.vector_norm(packed[:, :, : len(norms)], dim=(-2, -1), dtype=torch.float32).square_()
    mean_squares = share.complete(squares).div_(share.num_features_total)
    if rotations is not None and rotations.dim() == 4:
        num_heads = packed.shape[3]
        rotations = rotations.narrow(2, share.group.index * num_heads, num_heads)
    shares = share.group.size
    return norm_rope(packed, weights, eps, rotations, mean_squares=mean_squares, out=out, num_shares=shares)


def extent_paces(theta: float, dim: int, num_axes: int, *, is_double: bool) -> torch.Tensor:
    """Radians from the middle of an extent to its end, from a quarter turn to theta quarter turns; float32.

    dim: of all heads, whose channels the axes share in pairs. is_double: whether they are computed in float64.
    """
    dtype = torch.float64 if is_double else torch.float32
    exponents = torch.linspace(0.0, 1.0, dim // (2 * num_axes), dtype=dtype)
    return (torch.pow(theta, exponents) * torch.pi / 2).float()


def turned(positions: torch.Tensor, extent: int, paces: torch.Tensor) -> torch.Tensor:
    """Unit complex numbers [positions, paces], complex64. extent: the position that counts as 1.

    The angles are rounded to float32, as they were in training: at thousands of radians that moves the quickest
    channels, and the weights know them so.
    """
    angles = (positions / extent * 2 - 1)[:, None] * paces
    return torch.complex(angles.cos(), angles.sin())


def by_head(numbers: torch.Tensor, num_heads: int, dim: int) -> torch.Tensor:
    """[tokens, pairs] to [tokens, heads, head_dim / 2]. Pairs that the paces do not fill come first and do not turn."""
    still = numbers.new_ones(numbers.shape[0], dim // 2 - numbers.shape[1])
    return torch.cat([still, numbers], dim=1).view(numbers.shape[0], num_heads, -1)


def grid_extent_rotations(
    positions: Sequence[torch.Tensor],
    extents: Sequence[int],
    paces: torch.Tensor,
    num_heads: int,
    dim: int,
    device: torch.device,
) -> torch.Tensor:
    """Unit complex numbers [tokens, heads, head_dim / 2], complex64, of a grid's tokens in raster order.

    positions, extents: of frames, rows and columns. paces: of extent_paces for as many axes. dim: of all heads.
    """
    grid = tuple(len(axis) for axis in positions)
    if device.type == "meta":
        return _shape_alone(math.prod(grid), num_heads, dim // 2 // num_heads)
    tables = [turned(axis, extent, paces) for axis, extent in zip(positions, extents, strict=True)]
    whole = torch.stack(
        [
            table.view(*(size if place == axis else 1 for place, size in enumerate(grid)), -1).expand(*grid, -1)
            for axis, table in enumerate(tables)
        ],
        dim=-1,
    )
    return by_head(whole.flatten(3).flatten(0, 2), num_heads, dim).to(device)


def with_positions(
    cache: FrameCache, grid: tuple[int, int, int], head_dim: int, sharding: SequenceSharding, device: torch.device
) -> FrameCache:
    """Return the cache of a forward pass over a grid of tokens, with the rotations that its `positions` ask for."""
    if cache.positions == "window":
        return cache.with_rotations(*_among_frames_in_sight(cache.plan, grid, head_dim, device))
    box = (cache.plan.frames, range(grid[1]), range(grid[2]))
    return cache.with_rotations(sharding.shard(position_rotations(box, split_head_dim(head_dim), device), 0))


def _among_frames_in_sight(
    plan: CachePlan, grid: tuple[int, int, int], head_dim: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rotations of the queries and keys of a forward pass whose positions in time are ranks among the
    visible frames: ([tokens of the grid, head_dim / 2], [plan.num_keys, head_dim / 2]). grid: of the queries."""
    whole = grid_rotations((len(plan.key_frames), *grid[1:]), head_dim, device)
    by_rank = torch.unflatten(whole, 0, (len(plan.key_frames), -1))
    queries, keys = (by_rank[plan.ranks(frames)].flatten(0, 1) for frames in (plan.frames, plan.key_frames))
    return queries, keys
