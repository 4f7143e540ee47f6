"""RMSNorm of queries and keys, then rotary positions (RoPE), in one pass: checks, and the choice of the implementation.

The parts of a packed product are normalised and rotated where they are, or on the way to their place in the longer
sequence of a joint attention. Done one after the other they are read and written six times, in part in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from diffusion_runtime.errors import ConfigError
from diffusion_runtime.kernels.implementation import has_shape_alone, leaves_eager, runs_in_triton
from diffusion_runtime.kernels.qk_norm_rope import reference, triton
from diffusion_runtime.kernels.qk_norm_rope.reference import NormRopeCall


def norm_rope(
    packed: torch.Tensor,
    weights: Sequence[torch.Tensor],
    eps: float,
    rotations: torch.Tensor | None,
    *,
    mean_squares: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    num_shares: int = 1,
    implementation: str = "auto",
) -> tuple[torch.Tensor, ...]:
    """Return the parts of `packed` [batch, seq, parts, heads, head_dim], each [batch, seq, heads, head_dim]: the first
    ones, as many as there are weights, normalised (Zhang and Sennrich, arXiv:1910.07467) and rotated (Su et al.,
    arXiv:2104.09864), the others as they are.

    packed: q, k and v of one linear map, or some of them; it may be overwritten, and is where the result lies, unless
    `out` is given, a tensor of its shape. weights: [head_dim] each normalises every head, [heads * head_dim] all heads
    of a token together. rotations: complex64, unit numbers that turn neighbouring channels (2i, 2i + 1), [seq, head_dim
    / 2] or [batch, seq, head_dim / 2] for all heads, [batch or 1, seq, heads, head_dim / 2] for each; None leaves out
    the rotation. mean_squares: float32 [batch, seq, weights], of norms over more heads than `packed` holds: the mean of
    the squares of all of them; the weights are those of its own heads. num_shares: how many processes share the layer's
    heads, `packed` holding one's. implementation: `auto`, `reference` or `triton`; Triton computes in float32 and
    rounds once, the reference after the norm and after the rotation.

    Raises ConfigError for shapes that do not fit, and when the implementation that was asked for cannot run.
    """
    call = NormRopeCall(packed, weights, eps, rotations, mean_squares, out)
    width = packed.shape[3] * packed.shape[4] * num_shares
    if implementation == "auto":
        if leaves_eager(packed, width):
            check_norm_rope(call)
            return reference.norm_rope(call)
        made = triton.repeat(call)
        if made is not None:
            return made
    check_norm_rope(call)
    if has_shape_alone(packed):
        triton.expect(call, width)
        return (packed if out is None else out).unbind(2)
    if runs_in_triton(implementation, triton.refusal(call)):
        return triton.norm_rope(call)
    return reference.norm_rope(call)


def check_norm_rope(call: NormRopeCall) -> None:
    """Raises ConfigError for shapes that do not fit each other."""
    packed, weights, _, rotations, mean_squares, out = call
    batch, num_tokens, num_parts, num_heads, head_dim = packed.shape
    if not 1 <= len(weights) <= min(2, num_parts):
        raise ConfigError(f"QK norm: expected 1 or 2 weights for {num_parts} parts, got {len(weights)}")
    for weight in weights:
        if weight.shape not in ((head_dim,), (num_heads * head_dim,)) or weight.shape != weights[0].shape:
            raise ConfigError(
                f"QK norm: expected weights [{head_dim}] or [{num_heads * head_dim}] for heads {tuple(packed.shape)}, "
                f"got {[tuple(each.shape) for each in weights]}"
            )
    if rotations is not None:
        table = (num_tokens, head_dim // 2)
        by_sample = (batch, *table)
        by_head = (num_tokens, num_heads, head_dim // 2)
        if rotations.shape not in (table, by_sample, (1, *by_head), (batch, *by_head)):
            raise ConfigError(
                f"rotary positions: expected {table}, {by_sample} or {(batch, *by_head)} for heads "
                f"{tuple(packed.shape)}, got {tuple(rotations.shape)}"
            )
    if mean_squares is not None:
        expected = (batch, num_tokens, len(weights))
        if mean_squares.shape != expected or mean_squares.dtype != torch.float32:
            raise ConfigError(
                f"QK norm: expected mean squares {expected}, float32, got {tuple(mean_squares.shape)}, "
                f"{mean_squares.dtype}"
            )
        if len(weights[0]) != num_heads * head_dim:
            raise ConfigError(f"QK norm: mean squares go with a weight for all heads, got [{len(weights[0])}]")
    if out is not None and out.shape != packed.shape:
        raise ConfigError(f"QK norm: expected out like the product {tuple(packed.shape)}, got {tuple(out.shape)}")
