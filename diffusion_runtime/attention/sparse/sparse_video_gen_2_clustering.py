"""Sparse VideoGen 2: the clusters of a layer's queries and keys, and what the next step starts from."""

from __future__ import annotations

import zlib
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from diffusion_runtime.attention.backends.interface import AttentionCall
from diffusion_runtime.core.step_info import LayerInfo, StepInfo
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.kernels.kmeans.api import lloyd

_KEPT_NAME = "sparse_video_gen_2_attn centroids"


class TokenClusters(NamedTuple):
    """centroids: [G, K, head_dim] in the tokens' dtype; counts: int32 [G, K]; order: int32 [G, S], grid tokens cluster
    by cluster, by index inside a cluster. G: batch * heads."""

    centroids: torch.Tensor
    counts: torch.Tensor
    order: torch.Tensor


@dataclass(frozen=True)
class _KeptCentroids:
    """The centroids from which a layer's next clustering starts, when its `made_for` is the same.

    In the tokens' dtype: for 40 heads of 128, 1300 clusters and 40 layers that is 0.5 GB a branch in bfloat16.
    """

    made_for: Hashable
    q: torch.Tensor
    k: torch.Tensor


@torch.no_grad()
def cluster_tokens(call: AttentionCall) -> tuple[TokenClusters, TokenClusters]:
    """The clusters of the grid's queries, by query head, and of its keys, by key head; keeps their centroids.

    Raises ConfigError when a request's first clustering meets a value that is not finite. Later ones do not look,
    because that would wait for the device.
    """
    options, layout = call.options, call.grid_layout
    grid = slice(layout.num_prefix_tokens, layout.num_prefix_tokens + layout.num_grid_tokens)
    q, k = (tokens.detach()[:, grid].transpose(1, 2) for tokens in (call.q, call.k))
    num_q = min(options.svg2_num_q_centroids, layout.num_grid_tokens)
    num_k = min(options.svg2_num_k_centroids, layout.num_grid_tokens)
    made_for = (layout.grid, q.shape, k.shape, q.dtype, q.device, num_q, num_k, options.svg2_seed)
    cache = call.state.of_layer(call.layer, call.step)
    kept = cache.get_or_create(_KEPT_NAME, _nothing_kept)
    if kept is None or kept.made_for != made_for:
        _check_finite("q", q, call.layer)
        _check_finite("k", k, call.layer)
        generator = _generator(options.svg2_seed, call.layer, call.step)
        starts = [_random_tokens(tokens, num, generator) for tokens, num in ((q, num_q), (k, num_k))]
        num_iterations = options.svg2_kmeans_iter_init
    else:
        starts = [kept.q, kept.k]
        num_iterations = options.svg2_kmeans_iter_step
    q_clusters, k_clusters = (
        _cluster(tokens, start, num_iterations) for tokens, start in zip((q, k), starts, strict=True)
    )
    kept = _KeptCentroids(made_for, q_clusters.centroids, k_clusters.centroids)
    cache.put(_KEPT_NAME, kept)
    return q_clusters, k_clusters


def _nothing_kept() -> _KeptCentroids | None:
    return None


def _cluster(tokens: torch.Tensor, start: torch.Tensor, num_iterations: int) -> TokenClusters:
    """tokens: [B, H, S, head_dim]; start: [B * H, K, head_dim] in the tokens' dtype."""
    result = lloyd(tokens, start.float(), num_iterations)
    return TokenClusters(result.centroids.to(tokens.dtype), result.counts, result.order)


def _random_tokens(tokens: torch.Tensor, num_clusters: int, generator: torch.Generator) -> torch.Tensor:
    """[B * H, num_clusters, head_dim], drawn with replacement.

    The same token indexes for every sample and head: what a head starts from then depends neither on the batch nor on
    which other heads this process holds.
    """
    index = torch.randint(tokens.shape[2], (num_clusters,), generator=generator, device="cpu")
    return tokens[:, :, index.to(tokens.device)].flatten(0, 1)


def _generator(seed: int, layer: LayerInfo, step: StepInfo) -> torch.Generator:
    """On the CPU, so that every device draws the same.

    Both guidance branches draw alike, so that one batch of two gives what two batches of one give.
    """
    text = f"{seed} {step.expert} {layer.index} {layer.role}"
    return torch.Generator("cpu").manual_seed(zlib.crc32(text.encode()))


def _check_finite(name: str, tokens: torch.Tensor, layer: LayerInfo) -> None:
    """Waits for the device. The extremes of a tensor with a NaN are NaN."""
    low, high = tokens.aminmax()
    if not bool(low.isfinite() & high.isfinite()):
        raise ConfigError(
            f"sparse_video_gen_2_attn: expected finite values, {name} of layer {layer.index} "
            f"({layer.name or layer.role}) holds NaN or infinity; check the weights and the dtype of the layers before"
        )
