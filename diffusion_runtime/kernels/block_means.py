"""Block means (mean pooling of each block of tokens): in Triton, or by the specification in torch."""

from __future__ import annotations

import os

import torch

from diffusion_runtime.core.block_geometry import BlockGeometry
from diffusion_runtime.errors import ConfigError


def block_means(x: torch.Tensor, geometry: BlockGeometry) -> torch.Tensor:
    """Return the mean over the tokens of each block; text tokens belong to none.

    x: [B, seq, heads, head_dim]; geometry: shared by all heads, or with one row for each of B * heads. Returns [B,
    heads, blocks, head_dim] in float32, summed in float32; an empty block gives 0. Deterministic, and without a device
    synchronisation. Raises ConfigError when the tensor does not fit the geometry.
    """
    batch, num_tokens, num_heads, _ = x.shape
    if num_tokens != geometry.num_tokens or geometry.num_groups not in (1, batch * num_heads):
        raise ConfigError(
            f"block means: expected [batch, {geometry.num_tokens}, heads, head_dim] with batch * heads "
            f"{'of any number' if geometry.num_groups == 1 else geometry.num_groups}, got {tuple(x.shape)}"
        )
    if refusal(x) is None:
        return block_means_triton(x, geometry)
    return block_means_reference(x, geometry)


# How many numbers are gathered in float32 at a time.
_CHUNK = 1 << 25


def block_means_reference(x: torch.Tensor, geometry: BlockGeometry) -> torch.Tensor:
    """x: [B, seq, heads, head_dim]. Returns [B, heads, blocks, head_dim], float32; an empty block gives 0."""
    batch, num_tokens, num_heads, head_dim = x.shape
    means = torch.empty(batch, num_heads, geometry.num_blocks, head_dim, dtype=torch.float32, device=x.device)
    step = max(1, _CHUNK // max(1, num_tokens * head_dim))
    for sample in range(batch):
        for start in range(0, num_heads, step):
            heads = slice(start, min(start + step, num_heads))
            first = sample * num_heads
            rows = slice(0, 1) if geometry.num_groups == 1 else slice(first + heads.start, first + heads.stop)
            means[sample, heads] = _means_of_rows(
                x[sample, :, heads].transpose(0, 1), geometry.order[rows], geometry.offsets[rows]
            )
    return means


def _means_of_rows(x: torch.Tensor, order: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """x: [n, seq, head_dim]; order, offsets: [1 or n, ...]. Returns [n, blocks, head_dim]."""
    index = order.long()[..., None].expand(x.shape[0], -1, x.shape[2])
    # Each segment is summed by itself: running totals would carry one NaN into every later block, and atomic additions
    # would make two runs differ.
    sums = torch.segment_reduce(
        x.gather(1, index).float(),
        "sum",
        offsets=offsets.long().expand(x.shape[0], -1).contiguous(),
        axis=1,
        unsafe=True,
        initial=0,
    )
    return sums / offsets.diff(dim=1).clamp(min=1)[..., None]


def refusal(x: torch.Tensor) -> str | None:
    """Return why this implementation cannot average blocks of tensors like x, or None."""
    if not (x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"):
        return f"needs a CUDA GPU, the tensor is on {x.device}"
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"takes bfloat16, float16 and float32, not {x.dtype}"
    return None


def block_means_triton(x: torch.Tensor, geometry: BlockGeometry) -> torch.Tensor:
    """x: [B, seq, heads, head_dim]. Returns [B, heads, blocks, head_dim], float32; an empty block gives 0."""
    from diffusion_runtime.kernels import block_means_triton as kernels

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
