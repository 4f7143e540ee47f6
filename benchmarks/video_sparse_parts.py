"""Where the time of one call of Video Sparse Attention goes, and what it would be without what was fused.

Used by sparse_backends_gpu.py. Each part is timed alone on the inputs that a call gives it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from diffusion_runtime.attention import LayerInfo, RequestCache, StepInfo, TokenLayout
from diffusion_runtime.attention.backends.interface import AttentionCall
from diffusion_runtime.attention.sparse.tiles import tile_geometry
from diffusion_runtime.attention.sparse.video_sparse import (
    VideoSparseBackend,
    VideoSparseOptions,
    attend_tiles,
    num_kept_tiles,
    tile_means,
)
from diffusion_runtime.kernels.block_packing import Averaged, PackedTokens, pack_tokens
from diffusion_runtime.kernels.block_sparse import triton_kernels
from diffusion_runtime.kernels.block_sparse.geometry import BlockGeometry
from diffusion_runtime.kernels.block_sparse.pieces import list_pieces, list_tiles
from diffusion_runtime.kernels.block_sparse.plan import PooledBranch, SparsePlan
from diffusion_runtime.kernels.block_sparse.triton import TileShape, prepare, tile_shape
from diffusion_runtime.kernels.highest_blocks import highest
from diffusion_runtime.parallel.interface import AttentionInputs


@dataclasses.dataclass(frozen=True)
class Call:
    """One gated call of one sample. q, k, v, gate: [1, tokens, heads, head_dim]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    gate: torch.Tensor
    layout: TokenLayout
    options: VideoSparseOptions
    state: RequestCache = dataclasses.field(default_factory=RequestCache)

    @property
    def tiles(self) -> BlockGeometry:
        request = self.state.request
        return request.compute_once(tile_geometry, self.layout, self.options.tile_size, self.q.device)

    def pack(self, averaged: Averaged) -> PackedTokens:
        geometry = self.tiles
        num_grid_tokens = self.layout.num_grid_tokens
        return pack_tokens(
            self.q, self.k, self.v, geometry, geometry, num_grid_tokens=num_grid_tokens, averaged=averaged
        )

    def select(self) -> tuple[SparsePlan, torch.Tensor]:
        """The plan and the pooled values, by means that are read in passes of their own."""
        inputs = AttentionInputs(self.q, self.k, self.v, self.layout)
        call = AttentionCall(inputs, self.options, LayerInfo(10, 40), StepInfo(30, 50), self.state)
        geometry = self.tiles
        plan, pooled = VideoSparseBackend().select_tiles(call, tile_means(self.q, self.k, self.v, geometry))
        assert pooled is not None
        return plan, pooled

    def unfused(self, shape: TileShape) -> torch.Tensor:
        """The whole call with means apart from packing."""
        plan, pooled = self.select()
        prepared = prepare(
            self.q,
            self.k,
            self.v,
            plan,
            scale=self.q.shape[3] ** -0.5,
            branch=PooledBranch(pooled, self.gate),
            shape=shape,
        )
        prepared.launch()
        return prepared.out


def parts(call: Call, milliseconds: Callable[[Callable[[], object]], float]) -> dict[str, float]:
    """Milliseconds by part; the names say what is in each."""
    scale = call.q.shape[3] ** -0.5
    geometry = call.tiles
    means = tile_means(call.q, call.k, call.v, geometry)
    assert means.v is not None
    q_means, k_means, v_means = means.q[0], means.k[0], means.v[0]
    scores = scale * q_means @ k_means.transpose(1, 2)
    num_kept = num_kept_tiles(call.options.sparsity, geometry.num_blocks)
    plan, pooled = call.select()
    packed = call.pack("qkv")
    shape = tile_shape(call.q, plan)
    whole_tiles = dataclasses.replace(shape, rest_rows=0)

    def kernel(shape: TileShape, branch: PooledBranch | None) -> float:
        return milliseconds(
            prepare(call.q, call.k, call.v, plan, scale=scale, branch=branch, packed=packed, shape=shape).launch
        )

    times = {
        "pack and means, one pass": milliseconds(lambda: call.pack("qkv")),
        "pack alone": milliseconds(lambda: call.pack("none")),
        "means alone": milliseconds(lambda: tile_means(call.q, call.k, call.v, geometry)),
        "coarse scores": milliseconds(lambda: scale * q_means @ k_means.transpose(1, 2)),
        "selection": milliseconds(lambda: highest(scores, num_kept)),
        "coarse values": milliseconds(lambda: scores.softmax(dim=-1) @ v_means),
        "coarse branch, all of it": milliseconds(lambda: attend_tiles(means, scale=scale, num_kept=num_kept)),
        "listing": milliseconds(
            lambda: (list_pieces(triton_kernels, plan, shape.piece), list_tiles(plan.q, shape.rows, shape.rest_rows))
        ),
        "kernel": kernel(shape, None),
        "kernel, no tiles for rests": kernel(whole_tiles, None),
        "kernel with coarse add": kernel(shape, PooledBranch(pooled, call.gate)),
    }
    times["coarse add"] = times["kernel with coarse add"] - times["kernel"]
    times["whole call, unfused"] = milliseconds(lambda: call.unfused(shape))
    times["whole call, unfused, no tiles for rests"] = milliseconds(lambda: call.unfused(whole_tiles))
    return times
