"""sparse_video_gen_2_attn: queries and keys in clusters of like tokens, and the pairs of clusters with most mass.

"Sparse VideoGen2: Accelerate Video Generation with Sparse Attention via Semantic-Aware Permutation", arXiv:2505.18875.
Training-free. What differs from the paper's code: guidance branches and batch items share nothing, the share of mass
is computed in float32, and a top-p of 1 is exactly dense.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch

from diffusion_runtime.attention.backends.interface import AttentionCall, AttentionResult
from diffusion_runtime.attention.backends.registry import register_backend
from diffusion_runtime.attention.schedule import DenseRule, dense_first_layers, dense_first_steps
from diffusion_runtime.attention.sparse.interface import SparseBackend, SparseOptions, check_grid, plan_of_call
from diffusion_runtime.attention.sparse.sparse_video_gen_2_clustering import TokenClusters, cluster_tokens
from diffusion_runtime.attention.sparse.tiles import sequence_order
from diffusion_runtime.core.block_geometry import BlockGeometry
from diffusion_runtime.core.step_info import LayerInfo
from diffusion_runtime.core.token_layout import TokenLayout
from diffusion_runtime.kernels.block_sparse.expected import PlanForm
from diffusion_runtime.kernels.block_sparse.plan import SparsePlan


@dataclass(frozen=True)
class SparseVideoGen2Options(SparseOptions):
    """svg2_num_q_centroids, svg2_num_k_centroids: clusters per head; no more than there are tokens.
    svg2_top_p_kmeans: share of the estimated mass that each cluster of queries keeps; 1 keeps everything.
    svg2_min_kc_ratio: share of the key clusters that is kept whatever their mass.
    svg2_kmeans_iter_init, svg2_kmeans_iter_step: iterations at a layer's first clustering, and at the later ones.
    svg2_zero_step_kmeans_init: cluster in the dense first steps too, so that the first sparse one starts warm.
    svg2_first_layers_fp, svg2_first_times_fp: share of the layers, and of the steps, that come first and stay dense.
    svg2_seed: of the tokens that the first clustering starts from.
    """

    svg2_num_q_centroids: int = 300
    svg2_num_k_centroids: int = 1000
    svg2_top_p_kmeans: float = 0.9
    svg2_min_kc_ratio: float = 0.1
    svg2_kmeans_iter_init: int = 50
    svg2_kmeans_iter_step: int = 2
    svg2_zero_step_kmeans_init: bool = False
    svg2_first_layers_fp: float = 0.03
    svg2_first_times_fp: float = 0.2
    svg2_seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("svg2_num_q_centroids", "svg2_num_k_centroids"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected 1 or more, got {getattr(self, name)}")
        for name in ("svg2_kmeans_iter_init", "svg2_kmeans_iter_step"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: expected 0 or more, got {getattr(self, name)}")
        for name in ("svg2_top_p_kmeans", "svg2_min_kc_ratio", "svg2_first_layers_fp", "svg2_first_times_fp"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name}: expected a share from 0 to 1, got {getattr(self, name)}")

    def dense_schedule(self, num_layers: int, num_steps: int) -> tuple[DenseRule, ...]:
        layers, steps = self.svg2_first_layers_fp, self.svg2_first_times_fp
        return (
            *dense_first_layers(math.floor(layers * num_layers), f"svg2_first_layers_fp {layers}"),
            *dense_first_steps(math.floor(steps * num_steps), f"svg2_first_times_fp {steps}"),
        )


@register_backend
class SparseVideoGen2Backend(SparseBackend):
    """Block-sparse attention between clusters, which k-means finds again at every step from those of the step
    before."""

    name = "sparse_video_gen_2_attn"
    summary = "attention between clusters of like tokens that hold most of the mass (Sparse VideoGen 2)"
    not_replayed = keeps_between_steps = "its clustering starts from the clusters of the step before"
    options_type: ClassVar[type] = SparseVideoGen2Options
    self_test_options = MappingProxyType(
        {"svg2_num_q_centroids": 6, "svg2_num_k_centroids": 15, "svg2_top_p_kmeans": 0.6}
    )

    def depends_on_step(self, options: SparseVideoGen2Options, layer: LayerInfo) -> bool:  # noqa: ARG002
        """The clusters of a step begin with those of the step before."""
        return True

    def keeps_everything(self, options: SparseVideoGen2Options, layout: TokenLayout, layer: LayerInfo) -> str | None:  # noqa: ARG002
        if options.svg2_top_p_kmeans >= 1.0 or options.svg2_min_kc_ratio >= 1.0:
            return "svg2_top_p_kmeans or svg2_min_kc_ratio of 1 keeps everything"
        return None

    def plan_form(self, options: SparseVideoGen2Options, layout: TokenLayout, layer: LayerInfo) -> PlanForm:  # noqa: ARG002
        return PlanForm(layout.num_tokens, layout.num_grid_tokens, options.svg2_num_k_centroids, is_shared=False)

    def plan(self, call: AttentionCall) -> SparsePlan:
        check_grid(self.name, call)
        self._warm_up(call)
        return super().plan(call)

    def run(self, call: AttentionCall) -> AttentionResult:
        check_grid(self.name, call)
        self._warm_up(call)
        return super().run(call)

    def _warm_up(self, call: AttentionCall) -> None:
        """Cluster in a dense first step, when the options ask for it and the layer is sparse later."""
        options: SparseVideoGen2Options = call.options
        if not options.svg2_zero_step_kmeans_init:
            return
        rules = options.dense_rules(call.layer, call.step, call.grid_layout.num_grid_tokens)
        # Rules that name steps end with them; any other keeps the layer dense.
        is_sparse_later = self.keeps_everything(options, call.grid_layout, call.layer) is None
        if rules and is_sparse_later and not any(rule.window.steps.is_every for rule in rules):
            cluster_tokens(call)

    @torch.no_grad()
    def select_blocks(self, call: AttentionCall) -> SparsePlan:
        options: SparseVideoGen2Options = call.options
        q, k = cluster_tokens(call)
        num_heads, num_kv_heads = call.num_heads, call.num_kv_heads
        num_k_clusters, head_dim = k.centroids.shape[1:]
        # Heads that share a key head are rows of one product.
        scores = call.softmax_scale * torch.bmm(
            q.centroids.float().view(call.batch * num_kv_heads, -1, head_dim), k.centroids.float().transpose(1, 2)
        )
        kv_count, kv_index = keep_most_mass(
            scores.view(call.batch * num_heads, -1, num_k_clusters),
            k.counts.repeat_interleave(num_heads // num_kv_heads, dim=0),
            options.svg2_top_p_kmeans,
            int(options.svg2_min_kc_ratio * num_k_clusters),
        )
        rows = torch.arange(call.batch * num_heads, dtype=torch.int32, device=call.q.device)
        return plan_of_call(
            self.name,
            call,
            q=_geometry(call.grid_layout, q),
            kv=_geometry(call.grid_layout, k),
            group_of=rows.view(call.batch, num_heads),
            kv_count=kv_count,
            kv_index=kv_index,
        )


def _geometry(layout: TokenLayout, clusters: TokenClusters) -> BlockGeometry:
    return BlockGeometry(
        order=sequence_order(layout.num_prefix_tokens, layout.num_suffix_tokens, clusters.order),
        offsets=torch.nn.functional.pad(clusters.counts.cumsum(dim=1, dtype=torch.int32), (1, 0)),
        max_block_size=layout.num_grid_tokens,
    )


def keep_most_mass(
    scores: torch.Tensor, sizes: torch.Tensor, top_p: float, minimum: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """scores: float32 [R, q clusters, K], scaled products of centroids; sizes: int32 [R, K], keys in each cluster.

    The mass of a key cluster is its size times exp(score), as a share of the row. From the heaviest on, a cluster is
    kept while those before it hold at most `top_p`, and the first `minimum` always; equals go by index.

    Returns count int32 [R, q clusters] and index int32 [R, q clusters, K]: the kept ones ascending, then the others.
    """
    num_clusters = scores.shape[-1]
    # An empty cluster weighs exp(-inf) = 0, so it comes last and is never counted, whatever its old centroid holds.
    sizes = sizes[:, None]
    weights = torch.softmax(torch.where(sizes > 0, scores + sizes.to(scores.dtype).log(), float("-inf")), dim=-1)
    heaviest = weights.sort(dim=-1, descending=True, stable=True)
    before = torch.nn.functional.pad(heaviest.values[..., :-1].cumsum(dim=-1), (1, 0))
    keep = before <= top_p
    keep[..., :minimum] = True
    kept = torch.empty_like(keep).scatter_(-1, heaviest.indices, keep)
    rank = kept.cumsum(dim=-1, dtype=torch.int32)
    count = rank[..., -1]
    cluster = torch.arange(num_clusters, dtype=torch.int32, device=scores.device)
    # Each rank is a position, so the lists need no second sort and nothing has a size that the data decides.
    position = torch.where(kept, rank - 1, count[..., None] + cluster - rank)
    index = torch.empty_like(rank).scatter_(-1, position.long(), cluster.expand_as(rank))
    return count.contiguous(), index
