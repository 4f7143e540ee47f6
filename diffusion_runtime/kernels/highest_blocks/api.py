"""Top-k of each row of scores: checks, and the choice of the implementation."""

from __future__ import annotations

import torch

from diffusion_runtime.errors import ConfigError
from diffusion_runtime.kernels.highest_blocks import triton
from diffusion_runtime.kernels.highest_blocks.reference import highest_reference


def highest(scores: torch.Tensor, num_kept: int) -> torch.Tensor:
    """int32 [..., num_kept]: the indexes of the highest scores [..., N], ascending; the lowest index wins a tie.

    A NaN counts as lowest, so every row has exactly num_kept indexes for any input. No device synchronisation. Raises
    ConfigError unless 1 <= num_kept <= N.
    """
    if not 1 <= num_kept <= scores.shape[-1]:
        raise ConfigError(f"highest: expected 1 to {scores.shape[-1]} scores to keep, got {num_kept}")
    if triton.refusal(scores) is None:
        return triton.highest_triton(scores, num_kept)
    return highest_reference(scores, num_kept)
