"""QK norm and rotary positions in Triton: one launch for q, k and v, one read and one write of what changes."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from diffusion_runtime.kernels.implementation import refusal_of
from diffusion_runtime.kernels.launches import Launch, LaunchCache, is_expecting, kind_of
from diffusion_runtime.kernels.qk_norm_rope.reference import NormRopeCall

# Numbers of a token that one program holds in registers, heads and head_dim padded to powers of two.
MAX_BLOCK = 16384
_launches = LaunchCache()


def refusal(call: NormRopeCall) -> str | None:
    """Return why this implementation cannot compute such a call, or None."""
    packed, weights, _, rotations, mean_squares, out = call
    reason = refusal_of(packed, out, *weights, mean_squares)
    if reason is not None:
        return reason
    batch, _, _, num_heads, head_dim = packed.shape
    for x in (packed, packed if out is None else out):
        if x.stride(3) != head_dim and num_heads > 1:
            return "takes heads side by side"
    if head_dim % 2 or padded(num_heads) * padded(head_dim) > MAX_BLOCK:
        return f"takes even head sizes, up to {MAX_BLOCK} numbers per token, not {num_heads} heads of {head_dim}"
    if mean_squares is not None and not mean_squares.is_contiguous():
        return "takes contiguous mean squares"
    if rotations is not None and (rotations.dtype != torch.complex64 or rotations.stride(-1) != 1):
        return "takes contiguous complex64 rotations"
    if rotations is not None and rotations.device != packed.device:
        return f"takes tensors of one device, got {packed.device} and {rotations.device}"
    return "takes up to 65535 samples" if batch > 65535 else None


def padded(size: int) -> int:
    """Return the next power of two."""
    return 1 << (size - 1).bit_length()


def num_warps_for(block: int, over_heads: bool) -> int:
    """block: numbers per token. A norm per head: 16 per thread; with 32, cosines and sines go through shared memory to
    where they are needed. A norm over all heads: 64, since the sum of the token joins all warps; at Wan 1.3B's 1,536
    numbers one warp takes 0.112 ms, two 0.131, four 0.133 on an H200."""
    return max(1, min(16, block // 2048)) if over_heads else max(4, min(16, block // 512))


def repeat(call: NormRopeCall) -> tuple[torch.Tensor, ...] | None:
    """Return the result of a call like an earlier one, without its checks, or None for the first of its kind."""
    found = _launches.repeat(call.packed.device, _key, call)
    if found is None:
        return None
    target = call.packed if call.out is None else call.out
    found.run(_pointers(call, target))
    return target.unbind(2)


def expect(call: NormRopeCall, width: int) -> None:
    """Add the launch of a call on the meta device to those that are expected, where they are asked for. width: of the
    layer's tokens."""
    num_heads, head_dim = call.packed.shape[3:]
    if is_expecting(call.packed, width) and padded(num_heads) * padded(head_dim) <= MAX_BLOCK:
        norm_rope(call)


def norm_rope(call: NormRopeCall) -> tuple[torch.Tensor, ...]:
    """Implement api.norm_rope in one launch."""
    packed, weights, eps, rotations, mean_squares, out = call
    target = packed if out is None else out
    if packed.numel() == 0:
        return target.unbind(2)

    def prepare() -> Launch:
        from diffusion_runtime.kernels.qk_norm_rope import triton_kernels as kernels

        batch, num_tokens, num_parts, num_heads, head_dim = packed.shape
        # In numbers, two for each rotation.
        strides = (0, 0, 0) if rotations is None else tuple(2 * stride for stride in strides_of(rotations))
        over_heads = len(weights[0]) != head_dim
        heads_block, dim_block = padded(num_heads), padded(head_dim)
        constants = {
            "NUM_NORMED": len(weights),
            "HEADS": num_heads,
            "HEAD_DIM": head_dim,
            "HEADS_BLOCK": heads_block,
            "DIM_BLOCK": dim_block,
            "OVER_HEADS": over_heads,
            "HAS_MEANS": mean_squares is not None,
            "HAS_ROTATIONS": rotations is not None,
            "BY_HEAD": rotations is not None and rotations.dim() == 4,
        }
        return Launch(
            kernels.norm_rope,
            (num_tokens, len(weights) if out is None else num_parts, batch),
            (*packed.stride()[:3], *target.stride()[:3], *strides, eps),
            constants,
            num_warps_for(heads_block * dim_block, over_heads),
        )

    _launches.run(_key(call), _pointers(call, target), prepare)
    return target.unbind(2)


def _key(call: NormRopeCall) -> Hashable:
    """Return all that checks and launch depend on."""
    packed, weights, eps, rotations, mean_squares, out = call
    return kind_of(packed), tuple(map(kind_of, weights)), eps, kind_of(rotations), kind_of(mean_squares), kind_of(out)


def _pointers(call: NormRopeCall, target: torch.Tensor) -> tuple[torch.Tensor, ...]:
    packed, weights, _, rotations, mean_squares, _ = call
    turns = packed if rotations is None else torch.view_as_real(rotations)
    return packed, target, weights[0], weights[-1], turns, packed if mean_squares is None else mean_squares


def strides_of(rotations: torch.Tensor) -> tuple[int, int, int]:
    """Return the strides from sample to sample, token to token and head to head, 0 where they share."""
    if rotations.dim() == 2:
        return 0, rotations.stride(0), 0
    sample = rotations.stride(0) if rotations.shape[0] > 1 else 0
    return sample, rotations.stride(1), rotations.stride(2) if rotations.dim() == 4 else 0
