"""Attention calls to keys that were computed before: of earlier frames, and of a prefix."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from diffusion_runtime.attention.backends.calling import check_shapes
from diffusion_runtime.attention.backends.interface import AttentionCall, Backend
from diffusion_runtime.attention.backends.stored import StoredKeysReader
from diffusion_runtime.attention.cache.frame_cache import FrameCache
from diffusion_runtime.attention.cache.prefix import PrefixCache
from diffusion_runtime.attention.cache.store import KeyStore
from diffusion_runtime.attention.cache.stored import KeyParts
from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.attention.forward_plans import ForwardPlan, PlanLimits
from diffusion_runtime.core.step_info import LayerInfo
from diffusion_runtime.core.token_layout import RASTER, CachedLayout, Extent
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.parallel.interface import AttentionInputs

# The name of every layer's store in a RequestCache.
CACHED_KEYS = "cached keys"


class CachedCall(NamedTuple):
    """A call to the keys of a cache. inputs: with the keys in sight; with its own where `parts` are read in their
    place. copied: what was done to the keys for it, as KeyStore.copied describes, `in place` for none of it, empty for
    a store that is always read in place."""

    inputs: AttentionInputs
    copied: str = ""
    parts: KeyParts | None = None


def with_cached_keys(
    inputs: AttentionInputs,
    layer: LayerInfo,
    context: AttentionContext,
    cache: FrameCache,
    *,
    causal: bool,
    backend: Backend,
) -> CachedCall:
    """The call with the keys and values in sight in place of its own, which are written to the cache. After the
    exchange, so that every process keeps the heads that it computes. backend: whose kernels may read them in place.

    Raises ConfigError for a call over other frames than the cache's plan.
    """
    plan, q = cache.plan, inputs.q
    store = write_to_cache(inputs, layer, context, cache, causal=causal)
    in_sight = plan.key_layout(_grid_of(inputs, layer, cache))
    form = store.page_format(plan) if cache.reads_as_stored else None
    if form is not None and isinstance(backend, StoredKeysReader):
        refusal = backend.stored_refusal(form, q.device)
        if refusal is None:
            return CachedCall(inputs._replace(layout=in_sight, packed=None), "in place", store.read_parts(plan))
        context.recorder.note(f"{layer.role}: {backend.name}: cached keys are {store.copied}: {refusal}")
    q, k, v = cache.read(store, q)
    return CachedCall(inputs._replace(q=q, k=k, v=v, layout=in_sight, packed=None), store.copied)


def write_to_cache(
    inputs: AttentionInputs, layer: LayerInfo, context: AttentionContext, cache: FrameCache, *, causal: bool
) -> KeyStore:
    """Write the keys and values of a call into its layer's store, which is returned. Raises ConfigError as
    with_cached_keys."""
    _grid_of(inputs, layer, cache)
    check_shapes(inputs.q, inputs.k, inputs.v, inputs.layout, causal)
    # Its own keys of the chunk are written over before the other branch, or the commit, reads them.
    step = dataclasses.replace(context.step, branch="cond") if context.step.shares_keys else context.step
    store = context.state.of_layer(layer, step).get_or_create(
        (CACHED_KEYS, inputs.first_head), lambda: cache.new_store(inputs.k, step.branch)
    )
    store.write(cache.plan, inputs.k, inputs.v)
    return store


def _grid_of(inputs: AttentionInputs, layer: LayerInfo, cache: FrameCache) -> Extent:
    """Return the grid of a call over the frames of the cache's plan. Raises ConfigError for any other."""
    plan, layout = cache.plan, inputs.layout
    if layout is None or layout.num_text_tokens or layout.grid[0] != plan.num_frames or layout.tile != RASTER:
        raise ConfigError(
            f"{layer.name or layer.role}: expected a grid of {plan.num_frames} frames in raster order "
            f"for the key-value cache, got {layout}"
        )
    return layout.grid


def with_prefix(
    inputs: AttentionInputs, layer: LayerInfo, prefix: PrefixCache, *, first_head: int, causal: bool
) -> AttentionInputs:
    """The call with the keys and values of a prefix behind those of the grid, before the text. After the exchange,
    so that every process attends with the heads that it computes.

    Raises ConfigError for a call whose text precedes the grid, or behind a prefix with padding.
    """
    layout, name = inputs.layout, layer.name or layer.role
    if layout is None or layout.num_prefix_tokens:
        raise ConfigError(f"{name}: expected a grid with the text behind it for a prefix cache, got {layout}")
    if prefix.lengths is not None and layout.num_suffix_tokens:
        raise ConfigError(f"{name}: expected a grid alone for a prefix cache with padding, got {layout}")
    check_shapes(inputs.q, inputs.k, inputs.v, layout, causal)
    k, v = prefix.joined(layer.index, inputs.k, inputs.v, layout.num_grid_tokens, inputs.first_head - first_head)
    more, lengths = prefix.num_tokens, layout.valid_lengths
    in_sight = dataclasses.replace(
        layout,
        num_suffix_tokens=layout.num_suffix_tokens + more,
        valid_lengths=prefix.lengths if lengths is None else tuple(more + length for length in lengths),
    )
    return inputs._replace(k=k, v=v, layout=in_sight, packed=None)


def plan_of(call: AttentionCall, cache: FrameCache | None, parts: KeyParts | None = None) -> ForwardPlan:
    """Return the plan that a backend prepares once per forward pass: for cached calls, of the largest one the cache
    makes. parts: the keys of a call that reads them where they are stored."""
    layout, num_queries, num_keys = call.layout, call.q.shape[1], call.k.shape[1]
    plan = cache.plan if cache is not None and isinstance(layout, CachedLayout) else None
    if plan is not None and layout is not None:
        # The same at every pass of a video, however full its cache is.
        layout = plan.whole_layout(layout.grid)
        num_queries, num_keys = plan.max_frames * plan.tokens_per_frame, plan.capacity
    limits = PlanLimits(
        call.options,
        layout,
        call.batch,
        num_queries,
        num_keys,
        call.num_heads,
        call.num_kv_heads,
        call.q.shape[3],
        call.q.dtype,
        call.q.device,
        call.scale,
    )
    stored = None if parts is None else parts.stored
    if plan is not None and stored is not None:
        plan = dataclasses.replace(plan, page_table=stored.page_table)
    return ForwardPlan(limits, call.step, plan, None if stored is None else stored.form)
