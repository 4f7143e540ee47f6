"""Masks in general: [batch or 1, heads or 1, seq_q or 1, seq_k], boolean (True: attend) or added to the scaled scores.

Padding is better given as lengths (`TokenLayout.valid_lengths`), which cuts keys instead of hiding them. Nothing here
reads the values of a mask on the host: that would wait for the device at every call.
"""

from __future__ import annotations

import torch
from torch.nn.attention.flex_attention import BlockMask, create_mask

from diffusion_runtime.attention.backends.interface import AttentionResult
from diffusion_runtime.errors import ConfigError


def mask_feature(mask: torch.Tensor) -> str:
    """Which of FEATURES a call with this mask needs."""
    return "boolean_mask" if mask.dtype == torch.bool else "additive_mask"


def check_mask(mask: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> None:
    """Raises ConfigError unless the mask's shape, dtype and device fit q [batch, seq_q, heads, head_dim] and k."""
    whole = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    fits = mask.dim() == 4 and mask.shape[3] == whole[3]
    fits = fits and all(size in (1, full) for size, full in zip(mask.shape[:3], whole[:3], strict=True))
    if not fits:
        raise ConfigError(
            f"attention: expected a mask [batch or 1, heads or 1, seq_q or 1, seq_k] that fits {list(whole)}, "
            f"got {list(mask.shape)}"
        )
    if mask.dtype not in (torch.bool, q.dtype):
        raise ConfigError(
            f"attention: expected a boolean mask (True: attend) or one in q's dtype {q.dtype} that is added to the "
            f"scores, got {mask.dtype}"
        )
    if mask.device != q.device:
        raise ConfigError(f"attention: the mask is on {mask.device}, q on {q.device}; move the mask")


def block_mask_as_boolean(blocks: BlockMask) -> torch.Tensor:
    """Return the pairs that a BlockMask leaves visible: bool [batch or 1, heads or 1, seq_q, seq_k]. All pairs of its
    full blocks are visible, those of its partial blocks as its mask_mod allows."""
    seq_q, seq_k = blocks.seq_lengths
    seen = _listed_pairs(blocks.kv_num_blocks, blocks.kv_indices, blocks)
    seen = seen & create_mask(blocks.mask_mod, seen.shape[0], seen.shape[1], seq_q, seq_k, device=str(seen.device))
    if blocks.full_kv_num_blocks is None or blocks.full_kv_indices is None:
        return seen
    return seen | _listed_pairs(blocks.full_kv_num_blocks, blocks.full_kv_indices, blocks)


def _listed_pairs(counts: torch.Tensor, indices: torch.Tensor, blocks: BlockMask) -> torch.Tensor:
    """counts: [batch, heads, rows]; indices: [batch, heads, rows, columns], of which each row's first ones count."""
    columns = indices.shape[-1]
    is_listed = torch.arange(columns, device=indices.device) < counts[..., None]
    # What is not listed goes to a column of its own.
    table = torch.zeros(*indices.shape[:-1], columns + 1, dtype=torch.bool, device=indices.device)
    table.scatter_(-1, torch.where(is_listed, indices.long(), columns), True)
    (rows, width), (seq_q, seq_k) = blocks.BLOCK_SIZE, blocks.seq_lengths
    pairs = table[..., :columns].repeat_interleave(rows, -2).repeat_interleave(width, -1)
    return pairs[..., :seq_q, :seq_k]


def as_additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A boolean mask as numbers to add, 0 and -inf; an additive one as it is."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, float("-inf"))


def aligned_rows(bias: torch.Tensor) -> torch.Tensor:
    """The same numbers in rows that begin at multiples of 16, as kernels that load several at once read them.

    A part of a larger mask, such as the keys behind a text, may begin anywhere.
    """
    seq_k = bias.shape[-1]
    begins_aligned = bias.storage_offset() % 16 == 0
    if (
        begins_aligned
        and bias.stride(-1) == 1
        and all(size == 1 or stride % 16 == 0 for size, stride in zip(bias.shape[:3], bias.stride()[:3], strict=True))
    ):
        return bias
    if seq_k % 16 == 0:
        return bias.clone(memory_format=torch.contiguous_format)
    return torch.nn.functional.pad(bias, (0, -seq_k % 16))[..., :seq_k]


def hide_later_keys(mask: torch.Tensor, seq: int) -> torch.Tensor:
    """The mask of a causal call, for kernels that take a mask or causality but not both. [.., .., seq, seq]."""
    seen = torch.ones(seq, seq, dtype=torch.bool, device=mask.device).tril()
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, float("-inf"))


def blank_hidden_rows(result: AttentionResult, mask: torch.Tensor | None) -> AttentionResult:
    """The result with 0 and -inf for queries whose every key the mask hides: kernels differ in what they give there."""
    if mask is None:
        return result
    hidden = ~mask.any(dim=-1) if mask.dtype == torch.bool else mask.amax(dim=-1) == float("-inf")
    out = result.out.masked_fill(hidden.transpose(1, 2)[..., None], 0.0)
    lse = None if result.lse is None else result.lse.masked_fill(hidden, float("-inf"))
    return AttentionResult(out, lse, result.implementation)
