"""Top-k in Triton: one pass, no sort."""

from __future__ import annotations

import os

import torch

# Scores that one program holds in registers.
_MAXIMUM = 8192


def refusal(scores: torch.Tensor) -> str | None:
    """Why scores like these cannot be searched by this implementation; None when they can."""
    if not (scores.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"):
        return f"needs a CUDA GPU, the scores are on {scores.device}"
    if scores.dtype != torch.float32:
        return f"takes float32, not {scores.dtype}"
    if scores.shape[-1] > _MAXIMUM:
        return f"takes rows of up to {_MAXIMUM}, not {scores.shape[-1]}"
    return None


def highest_triton(scores: torch.Tensor, num_kept: int) -> torch.Tensor:
    """scores: float32 [..., N]. Returns int32 [..., num_kept] as the reference does."""
    from diffusion_runtime.kernels.highest_blocks import triton_kernels as kernels

    scores = scores.contiguous()
    num_scores = scores.shape[-1]
    kept = torch.empty(*scores.shape[:-1], num_kept, dtype=torch.int32, device=scores.device)
    block = max(32, 1 << (num_scores - 1).bit_length())
    # A warp that has its row to itself sums without a barrier.
    num_warps = max(1, block // 1024)
    kernels.keep_highest[(scores.numel() // num_scores,)](
        scores, kept, num_scores, num_kept, BLOCK=block, num_warps=num_warps
    )
    return kept
