"""Block means (mean pooling of each block of tokens): checks, and the choice of the implementation."""

from __future__ import annotations

import torch

from diffusion_runtime.errors import ConfigError
from diffusion_runtime.kernels.block_means import triton
from diffusion_runtime.kernels.block_means.reference import block_means_reference
from diffusion_runtime.kernels.block_sparse.geometry import BlockGeometry


def block_means(x: torch.Tensor, geometry: BlockGeometry) -> torch.Tensor:
    """The mean over the tokens of each block; text tokens belong to none.

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
    if triton.refusal(x) is None:
        return triton.block_means_triton(x, geometry)
    return block_means_reference(x, geometry)
