"""Top-k of each row of scores with deterministic ties: in Triton, or by the specification in torch."""

from __future__ import annotations

import os

import torch

from diffusion_runtime.errors import ConfigError


def highest(scores: torch.Tensor, num_kept: int) -> torch.Tensor:
    """int32 [..., num_kept]: the indexes of the highest scores [..., N], ascending; the lowest index wins a tie.

    A NaN counts as lowest, so every row has exactly num_kept indexes for any input. No device synchronisation. Raises
    ConfigError unless 1 <= num_kept <= N.
    """
    if not 1 <= num_kept <= scores.shape[-1]:
        raise ConfigError(f"highest: expected 1 to {scores.shape[-1]} scores to keep, got {num_kept}")
    if refusal(scores) is None:
        return highest_triton(scores, num_kept)
    return highest_reference(scores, num_kept)


def highest_reference(scores: torch.Tensor, num_kept: int) -> torch.Tensor:
    """scores: [..., N]. Returns int32 [..., num_kept], ascending; the lowest index wins a tie, and a NaN is lowest."""
    scores = torch.where(scores.isnan(), float("-inf"), scores)
    # topk leaves open which of several equal scores it takes, so it gives the lowest kept score alone.
    lowest = scores.topk(num_kept, dim=-1).values[..., -1:]
    above = scores > lowest
    level = scores == lowest
    room = num_kept - above.sum(dim=-1, keepdim=True, dtype=torch.int32)
    keep = above | (level & (level.cumsum(dim=-1, dtype=torch.int32) <= room))
    # What is not kept goes into one slot too many, which is cut off.
    slot = torch.where(keep, keep.cumsum(dim=-1, dtype=torch.int32) - 1, num_kept).long()
    index = torch.arange(scores.shape[-1], dtype=torch.int32, device=scores.device).expand_as(slot)
    kept = torch.zeros(*scores.shape[:-1], num_kept + 1, dtype=torch.int32, device=scores.device)
    return kept.scatter_(-1, slot, index)[..., :num_kept]


# Scores that one program holds in registers.
_MAXIMUM = 8192


def refusal(scores: torch.Tensor) -> str | None:
    """Return why this implementation cannot search scores like these, or None."""
    if not (scores.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"):
        return f"needs a CUDA GPU, the scores are on {scores.device}"
    if scores.dtype != torch.float32:
        return f"takes float32, not {scores.dtype}"
    if scores.shape[-1] > _MAXIMUM:
        return f"takes rows of up to {_MAXIMUM}, not {scores.shape[-1]}"
    return None


def highest_triton(scores: torch.Tensor, num_kept: int) -> torch.Tensor:
    """scores: float32 [..., N]. Returns int32 [..., num_kept] as the reference does."""
    from diffusion_runtime.kernels import highest_blocks_triton as kernels

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
