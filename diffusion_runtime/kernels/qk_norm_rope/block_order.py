"""QK norm and rotary positions straight into block order: q, k and v as the block-sparse kernel reads them, and the
means of their blocks, in the pass that normalises them.

For sequences whose tokens are stored block by block already (attention/token_order.py). In place of the product rows
lie apart, which slows the kernel, and the means are a pass of their own: 2.8 and 3.2 ms of a Wan 1.3B step of 193 ms
with Video Sparse Attention on an H200 (benchmarks/results/static_order_gpu.json).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from diffusion_runtime.core.packed_tokens import PackedTokens
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.kernels.block_packing import TokenBlocks, pack_tokens, pack_tokens_reference
from diffusion_runtime.kernels.implementation import runs_in_triton
from diffusion_runtime.kernels.qk_norm_rope import block_order_triton as triton
from diffusion_runtime.kernels.qk_norm_rope import reference
from diffusion_runtime.kernels.qk_norm_rope.api import check_norm_rope
from diffusion_runtime.kernels.qk_norm_rope.reference import NormRopeCall
from diffusion_runtime.kernels.qk_norm_rope.triton import refusal


def norm_rope_into_blocks(
    product: torch.Tensor,
    weights: Sequence[torch.Tensor],
    eps: float,
    rotations: torch.Tensor | None,
    blocks: TokenBlocks,
    *,
    implementation: str = "auto",
) -> PackedTokens:
    """pack_tokens(*norm_rope(product, ...)) in one pass, for blocks whose order the tokens have.

    product: q, k and v of one linear map, [batch, seq, 3, heads, head_dim]; it may be overwritten. weights: of q and of
    k; these, eps, rotations and implementation as in norm_rope. The means are of the rounded numbers, in float32.

    Raises ConfigError for shapes that do not fit, tokens in another order, and when the implementation that was asked
    for cannot run.
    """
    call = NormRopeCall(product, weights, eps, rotations)
    check_norm_rope(call)
    geometry = blocks.geometry
    if product.shape[2] != 3 or len(weights) != 2:
        raise ConfigError(
            f"norm into blocks: expected q, k and v with two weights, got {product.shape[2]} parts and {len(weights)}"
        )
    if blocks.averaged in ("k", "kv"):
        raise ConfigError(f"norm into blocks: expected means of none, qk or qkv, got {blocks.averaged}")
    if not geometry.is_identity or geometry.num_tokens != product.shape[1]:
        raise ConfigError(
            f"norm into blocks: expected {product.shape[1]} tokens that stand in the order of the blocks, got a "
            f"geometry of {geometry.num_tokens} {'in' if geometry.is_identity else 'not in'} that order"
        )
    if runs_in_triton(implementation, refusal(call)):
        return triton.norm_rope_into_blocks(call, blocks)
    q, k, v = reference.norm_rope(call)
    # Packing may run in Triton where the norm does not.
    pack = pack_tokens_reference if implementation == "reference" else pack_tokens
    return pack(
        q,
        k,
        v,
        geometry,
        geometry,
        num_grid_tokens=blocks.num_grid_tokens,
        text_lengths=blocks.text_lengths,
        averaged=blocks.averaged,
    )
