"""QK norm and rotary positions into block order in Triton: one launch and one pass over q, k and v."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from diffusion_runtime.core.packed_tokens import TAIL_ROWS, PackedTokens
from diffusion_runtime.kernels.block_packing import TokenBlocks, row_width
from diffusion_runtime.kernels.launches import Launch, LaunchCache, kind_of
from diffusion_runtime.kernels.qk_norm_rope import triton
from diffusion_runtime.kernels.qk_norm_rope.reference import NormRopeCall

# Numbers that a program holds at once, of several tokens: enough bytes under way, with a few programs per
# multiprocessor.
STEP_NUMBERS = 8192
_NUM_AVERAGED = {"none": 0, "qk": 2, "qkv": 3}
_launches = LaunchCache()


def launch_shape(num_heads: int, head_dim: int) -> tuple[int, int]:
    """(tokens per step, warps)."""
    token = triton.padded(num_heads) * row_width(head_dim)
    step = max(1, STEP_NUMBERS // token)
    return step, max(4, min(16, step * token // 1024))


def norm_rope_into_blocks(call: NormRopeCall, blocks: TokenBlocks) -> PackedTokens:
    """Implement block_order.norm_rope_into_blocks in Triton."""
    product, weights, eps, rotations, _, _ = call
    batch, num_tokens, _, num_heads, head_dim = product.shape
    geometry, width, num_averaged = blocks.geometry, row_width(head_dim), _NUM_AVERAGED[blocks.averaged]
    out = product.new_empty((3, batch * num_heads * num_tokens + TAIL_ROWS, width))
    shape = (num_averaged, batch, num_heads, geometry.num_blocks, head_dim)
    means = product.new_empty(shape, dtype=torch.float32)
    step, num_warps = launch_shape(num_heads, head_dim)

    def prepare() -> Launch:
        from diffusion_runtime.kernels.qk_norm_rope import triton_kernels as kernels

        strides = (0, 0, 0) if rotations is None else tuple(2 * stride for stride in triton.strides_of(rotations))
        text_run = 8 * step
        num_text_runs = -(-(num_tokens - blocks.num_grid_tokens) // text_run)
        constants = {
            "HEADS": num_heads,
            "HEAD_DIM": head_dim,
            "HEADS_BLOCK": triton.padded(num_heads),
            "WIDTH": width,
            "STEP": step,
            "TEXT_RUN": text_run,
            "TAIL": TAIL_ROWS,
            "OVER_HEADS": len(weights[0]) != head_dim,
            "HAS_ROTATIONS": rotations is not None,
            "BY_HEAD": rotations is not None and rotations.dim() == 4,
            "HAS_LENGTHS": blocks.text_lengths is not None,
            "NUM_AVERAGED": num_averaged,
        }
        sizes = (num_tokens, blocks.num_grid_tokens, geometry.num_blocks)
        apart = (*product.stride()[:3], out.stride(0), batch * num_heads * geometry.num_blocks * head_dim, *strides)
        grid = (geometry.num_blocks + num_text_runs, 3, batch)
        return Launch(kernels.norm_rope_blocks, grid, (*sizes, *apart, eps), constants, num_warps)

    turns = product if rotations is None else torch.view_as_real(rotations)
    lengths = geometry.offsets if blocks.text_lengths is None else blocks.text_lengths
    pointers = (product, out, means if num_averaged else product, *weights, turns, geometry.offsets, lengths)
    _launches.run(_key(call, blocks), pointers, prepare)
    q, k, v = out
    return PackedTokens(q, k, v, geometry, geometry, *means)


def _key(call: NormRopeCall, blocks: TokenBlocks) -> Hashable:
    """Return all that the launch depends on."""
    product, weights, eps, rotations, _, _ = call
    offsets, lengths = kind_of(blocks.geometry.offsets), kind_of(blocks.text_lengths)
    kinds = kind_of(product), tuple(map(kind_of, weights)), kind_of(rotations), offsets, lengths
    return *kinds, eps, blocks.num_grid_tokens, blocks.averaged
