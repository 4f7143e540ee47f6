"""What every sparse method is judged against: masked attention in float64, random inputs, and one case a method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from diffusion_runtime.attention import LayerInfo, SparsePlan, StepInfo, TokenLayout
from diffusion_runtime.core.block_geometry import BlockGeometry

Options = dict[str, Any]


def random_qkv(
    layout: TokenLayout,
    *,
    batch: int = 1,
    num_heads: int = 2,
    num_kv_heads: int | None = None,
    head_dim: int = 16,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [batch, seq, heads, head_dim] and k, v [batch, seq, kv_heads, head_dim] of independent normals."""
    generator = torch.Generator().manual_seed(seed)
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    shapes = [(batch, layout.num_tokens, heads, head_dim) for heads in (num_heads, kv_heads, kv_heads)]
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return q, k, v


def masked_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scale: float | None = None,
    working: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """mask: bool [batch, heads, seq_q, seq_k]. Returns out like q, in `working`, and lse [batch, heads, seq_q]."""
    repeats = q.shape[2] // k.shape[2]
    q_bhsd = q.to(working).transpose(1, 2)
    k_bhsd, v_bhsd = (x.to(working).transpose(1, 2).repeat_interleave(repeats, dim=1) for x in (k, v))
    scores = (q.shape[3] ** -0.5 if scale is None else scale) * q_bhsd @ k_bhsd.transpose(2, 3)
    scores = scores.masked_fill(~mask, float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])
    return (weights @ v_bhsd).transpose(1, 2), lse


def pooled_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: SparsePlan, scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """masked_attention of a plan with a pooled tail: every key of a block that a grid query does not see is the mean of
    the block, key and value, so a block of n keys weighs as much as n of them."""
    heads = plan.batch * plan.num_heads
    mask, repeats = plan.to_dense_mask(), plan.num_heads // plan.num_kv_heads
    q_bhsd = q.double().transpose(1, 2)
    k_bhsd, v_bhsd = (x.double().transpose(1, 2).repeat_interleave(repeats, dim=1) for x in (k, v))
    block = plan.kv.block_of_token()
    if plan.kv.num_groups > 1:
        block = block.repeat_interleave(repeats, dim=0)
    # Rows of text belong to the block past the last one.
    member = torch.nn.functional.one_hot(block.long(), plan.kv.num_blocks + 1)[..., :-1].double()
    member = member.expand(heads, -1, -1).view(plan.batch, plan.num_heads, plan.num_tokens, -1)
    sizes = member.sum(dim=2).clamp(min=1)[..., None]
    k_mean, v_mean = (member @ (member.transpose(2, 3) @ x / sizes) for x in (k_bhsd, v_bhsd))
    grid = plan.q.order[0, : plan.num_grid_tokens].long()
    in_grid = torch.zeros(plan.num_tokens, dtype=torch.bool).index_fill_(0, grid, True)
    pooled = ~mask & in_grid[:, None] & in_grid
    scores = torch.where(pooled, q_bhsd @ k_mean.transpose(2, 3), q_bhsd @ k_bhsd.transpose(2, 3))
    scores = (q.shape[3] ** -0.5 if scale is None else scale) * scores
    scores = scores.masked_fill(~(mask | pooled), float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])
    out = weights.masked_fill(~mask, 0) @ v_bhsd + weights.masked_fill(~pooled, 0) @ v_mean
    return out.transpose(1, 2), lse


def valid_tokens(layout: TokenLayout, sample: int) -> torch.Tensor:
    """bool [seq]: what a sample attends to, text that is real and the grid."""
    valid = torch.zeros(layout.num_tokens, dtype=torch.bool)
    for start, stop in layout.key_ranges(sample):
        valid[start:stop] = True
    return valid


def in_order(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """x [B, N, heads, D] with token order[g, p] at position p; order: int [1 or B * heads, N]."""
    index = order.long().expand(x.shape[0] * x.shape[2], -1).reshape(x.shape[0], x.shape[2], -1).transpose(1, 2)
    return x.gather(1, index[..., None].expand(x.shape))


def shuffled(geometry: BlockGeometry, num_grid: int) -> torch.Tensor:
    """int64 [G, N]: positions in another order inside each block; those of text stay."""
    block = geometry.block_of_token().gather(1, geometry.order.long()).double()
    noise = torch.rand(block.shape, generator=torch.Generator().manual_seed(0))
    noise[:, num_grid:] = torch.linspace(0, 0.5, block.shape[1] - num_grid)
    return (block + noise).argsort(dim=1)


# --- one case a method ------------------------------------------------------------------------------------------------

# Past the first steps and layers that are dense by default.
STEP = StepInfo(20, 50)
LAYER = LayerInfo(1, 8)


@dataclass(frozen=True)
class Case:
    """A backend and options that are sparse on a grid of a hundred tokens or more, at STEP.

    full: changes that make it keep everything; wider: changes under which it sees more, one after the other;
    schedule: changes that make steps before 21 dense, and layers before 5; None for a method without such an option.
    sees_itself: a query always sees itself.
    compares_heads: what a head selects depends on the others by definition, so heads cannot be planned in parts.
    is_static: its blocks are tiles of the grid, whatever the tokens hold. draws_tokens: it begins with tokens drawn in
    the order in which they are given.
    """

    backend: str
    options: Options
    full: tuple[Options, ...]
    wider: tuple[Options, ...]
    schedule: tuple[Options | None, Options | None]
    layer: LayerInfo = LAYER
    sees_itself: bool = False
    compares_heads: bool = False
    is_static: bool = False
    draws_tokens: bool = False

    def arguments(self, layout: TokenLayout, **changes: Any) -> dict[str, Any]:
        """What both `attention` and `plan_attention` take after the tensors."""
        arguments = {"backend": self.backend, "options": self.options, "layout": layout}
        return {**arguments, "layer": self.layer, "step": STEP, **changes}


def _vmoba(layer: int, group: str, top: int | None = None) -> Case:
    """A layer with chunks in time (0), in space (1) or in both (2)."""
    shapes = {"temporal_chunk_size": 0.1, "spatial_chunk_size": (2, 3), "st_chunk_size": (2, 3, 4)}
    selection = {"moba_threshold": 0.25} if top is None else {"moba_select_mode": "topk"} | _tops(top)
    return Case(
        "vmoba_attn",
        {**shapes, **selection, "moba_threshold_type": group},
        full=({"moba_threshold": 1.0} if top is None else _tops(99),),
        wider=tuple({"moba_threshold": share} if top is None else _tops(n) for n, share in ((1, 0.1), (4, 0.6))),
        schedule=({"first_full_step": 21}, {"first_full_layer": 5}),
        layer=LayerInfo(layer, 8),
        sees_itself=True,
        compares_heads=group in ("overall", "block"),
    )


def _tops(count: int) -> Options:
    return {"temporal_topk": count, "spatial_topk": count, "st_topk": count}


CASES = {
    "STA": Case(
        "sliding_tile_attn",
        {"window": (1, 3, 3), "tile_size": (2, 2, 2)},
        full=({"window": (9, 9, 9)}, {"sta_mode": "none"}),
        wider=({"window": (1, 1, 3)}, {"window": (1, 3, 3)}, {"window": (2, 3, 3)}),
        schedule=({"skip_time_steps": 21}, None),
        sees_itself=True,
        is_static=True,
    ),
    "VSA": Case(
        "video_sparse_attn",
        {"sparsity": 0.6},
        full=({"sparsity": 0.0},),
        wider=({"sparsity": 1.0}, {"sparsity": 0.7}, {"sparsity": 0.3}),
        schedule=({"dense_first_steps": 21}, {"dense_layers": "0-4"}),
        is_static=True,
    ),
    # What they leave out is in test_pooled_tail.py.
    "Sol": Case(
        "sol_attn",
        {"tau": 0.5, "tile_size": (4, 4, 4), "tail": "none"},
        full=({"top_k": 1.0},),
        wider=({"tau": 3.0}, {"tau": 0.5}, {"tau": -0.5}),
        schedule=({"dense_first_steps": 21}, {"dense_layers": "0-4"}),
        sees_itself=True,
        is_static=True,
    ),
    "Sol top": Case(
        "sol_attn",
        {"top_k": 0.5, "tile_size": (4, 4, 4), "tail": "none"},
        full=({"top_k": 1.0},),
        wider=({"top_k": 0.1}, {"top_k": 0.5}, {"top_k": 0.8}),
        schedule=({"dense_first_steps": 21}, {"dense_layers": "0-4"}),
        sees_itself=True,
        is_static=True,
    ),
    "V-MoBA in time": _vmoba(0, "query_head"),
    "V-MoBA top in space": _vmoba(1, "query_head", top=3),
    "V-MoBA by head": _vmoba(2, "head_global"),
    "V-MoBA overall": _vmoba(0, "overall", top=2),
    "V-MoBA by chunk": _vmoba(2, "block"),
    "SVG2": Case(
        "sparse_video_gen_2_attn",
        {"svg2_num_q_centroids": 6, "svg2_num_k_centroids": 15, "svg2_top_p_kmeans": 0.6, "svg2_kmeans_iter_init": 3},
        full=({"svg2_top_p_kmeans": 1.0}, {"svg2_min_kc_ratio": 1.0}),
        wider=({"svg2_top_p_kmeans": 0.3}, {"svg2_top_p_kmeans": 0.6}, {"svg2_top_p_kmeans": 0.9}),
        schedule=({"svg2_first_times_fp": 0.42}, {"svg2_first_layers_fp": 0.625}),
        draws_tokens=True,
    ),
}
