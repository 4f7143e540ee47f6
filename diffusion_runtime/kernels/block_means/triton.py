"""Block means in Triton: one pass over the tokens, in any order."""

from __future__ import annotations

import os

import torch

from diffusion_runtime.kernels.block_sparse.geometry import BlockGeometry


def refusal(x: torch.Tensor) -> str | None:
    """Why blocks of tensors like x cannot be averaged by this implementation; None when they can."""
    if not (x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"):
        return f"needs a CUDA GPU, the tensor is on {x.device}"
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"takes bfloat16, float16 and float32, not {x.dtype}"
    return None


def block_means_triton(x: torch.Tensor, geometry: BlockGeometry) -> torch.Tensor:
    """x: [B, seq, heads, head_dim]. Returns [B, heads, blocks, head_dim], float32; an empty block gives 0."""
    from diffusion_runtime.kernels.block_means import triton_kernels as kernels

    x = x if x.stride(3) == 1 else x.contiguous()
    batch, _, num_heads, head_dim = x.shape
    width = max(16, 1 << (head_dim - 1).bit_length())
    means = torch.empty(batch, num_heads, geometry.num_blocks, head_dim, dtype=torch.float32, device=x.device)
    shared = geometry.num_groups == 1
    kernels.average_blocks[(batch * num_heads, geometry.num_blocks)](
        x,
        geometry.order,
        geometry.offsets,
        means,
        geometry.num_blocks,
        num_heads,
        0 if shared else geometry.num_tokens,
        0 if shared else geometry.num_blocks + 1,
        x.stride(0),
        x.stride(1),
        x.stride(2),
        D=head_dim,
        W=width,
        BLOCK=min(64, 8192 // width),
        num_warps=4,
    )
    return means
