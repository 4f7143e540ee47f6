"""Self-attention with QK norm and rotary positions: q, k and v of one product, written where its backend reads them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.attention.layers import AttentionLayer
from diffusion_runtime.kernels.qk_norm_rope.block_order import norm_rope_into_blocks
from diffusion_runtime.layers.norm import RMSNorm
from diffusion_runtime.layers.rope import norm_and_rotate


def rotated_attention(
    attention: AttentionLayer,
    product: torch.Tensor,
    norms: Sequence[RMSNorm],
    rotations: torch.Tensor | None,
    context: AttentionContext,
    *,
    gate: torch.Tensor | None = None,
) -> torch.Tensor:
    """attention(*norm_and_rotate(product, norms, rotations), context), [batch, seq, heads, head_dim].

    product: q, k and v, [batch, seq, 3, heads, head_dim]; it may be overwritten. norms: of q and of k. rotations:
    None for a cache that rotates where it reads. gate: as the
    attention layer takes it. Where the backend's blocks are known before, q, k and v are written as their rows; not
    where processes share the features that a norm is over, which takes the squares of all of them first.
    """
    blocks = None if norms[0].share is not None else attention.token_blocks(product, context, gate)
    out: torch.Tensor
    if blocks is None:
        heads = norm_and_rotate(product, norms, rotations, num_shares=attention.num_shares)
        out = attention(*heads, context, gate=gate)
    else:
        packed = norm_rope_into_blocks(product, [norm.weight for norm in norms], norms[0].eps, rotations, blocks)
        out = attention(*packed.in_sequence(len(product), product.shape[4]), context, gate=gate, packed=packed)
    return out
