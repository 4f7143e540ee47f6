"""Attention with padding masks or query groups: keys are cut or permuted, so that every backend can compute it."""

from __future__ import annotations

import dataclasses

import torch
from torch.nn.attention.flex_attention import BlockMask

from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.attention.layers import LocalAttention
from diffusion_runtime.diffusers_bridge.masks import KeyPadding, QueryGroups
from diffusion_runtime.token_layout import TokenLayout


def run_layer(
    layer: LocalAttention,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    context: AttentionContext,
    *,
    mask: torch.Tensor | None = None,
    block_mask: BlockMask | None = None,
) -> torch.Tensor:
    """out: [batch, seq_q, heads, head_dim]"""
    out: torch.Tensor = layer(q, k, v, context, mask=mask, block_mask=block_mask)
    return out


def attend_padded(
    layer: LocalAttention,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: KeyPadding,
    context: AttentionContext,
) -> torch.Tensor:
    """Attention to the keys that each sample sees. Attention does not depend on the order of keys, so they may be
    permuted."""
    layout = context.layout
    if layout is not None and layout.num_text_tokens:
        start = 0 if layout.num_prefix_tokens else layout.num_grid_tokens
        text = seen.part(start, start + layout.num_text_tokens)
        if seen.keys.sum() - text.keys.sum() == seen.keys.shape[0] * layout.num_grid_tokens:
            return _attend_padded_text(layer, q, k, v, text, start, context)
    lengths = seen.lengths
    longest = max(lengths)
    if longest == 0:
        return torch.zeros_like(q)
    if not seen.is_on_the_right:
        order = seen.visible_first[:, :longest, None, None]
        k, v = (x.gather(1, order.expand(-1, -1, *x.shape[2:])) for x in (k, v))
    kept = None if min(lengths) == longest else TokenLayout.text(longest, lengths)
    return run_layer(layer, q, k[:, :longest], v[:, :longest], context.with_layout(kept))


def _attend_padded_text(
    layer: LocalAttention,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    text: KeyPadding,
    start: int,
    context: AttentionContext,
) -> torch.Tensor:
    """As attend_padded, where only text beside a grid is padded: tokens of the grid are not moved."""
    assert context.layout is not None
    padded = context.with_layout(dataclasses.replace(context.layout, valid_lengths=text.lengths))
    if text.is_on_the_right:
        return run_layer(layer, q, k, v, padded)
    order = torch.arange(q.shape[1], device=q.device).repeat(q.shape[0], 1)
    order[:, start : start + text.keys.shape[1]] = text.visible_first + start
    q, k, v = (x.gather(1, order[:, :, None, None].expand(-1, -1, *x.shape[2:])) for x in (q, k, v))
    out = run_layer(layer, q, k, v, padded)
    return torch.empty_like(out).scatter_(1, order[:, :, None, None].expand_as(out), out)


def attend_groups(
    layer: LocalAttention,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: QueryGroups,
    context: AttentionContext,
) -> torch.Tensor:
    """One call per group of queries of each sample, with the keys that it sees and no others."""
    out = torch.zeros_like(q)
    plain = context.with_layout(None)
    for sample, groups in enumerate(seen.groups):
        for queries, keys in groups:
            if keys.numel():
                k_seen, v_seen = k[sample, keys][None], v[sample, keys][None]
                out[sample, queries] = run_layer(layer, q[sample, queries][None], k_seen, v_seen, plain)[0]
    return out
