"""The shapes of one attention call."""

from __future__ import annotations

import torch

from diffusion_runtime.errors import ConfigError
from diffusion_runtime.step_info import LayerInfo
from diffusion_runtime.token_layout import TokenLayout


def check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: TokenLayout | None, causal: bool) -> None:
    """Raises ConfigError unless q, k, v are [batch, seq, heads, head_dim] that fit each other and the layout."""
    # Read once: every access to a shape makes a new object, and this runs at every call.
    q_shape, k_shape = q.shape, k.shape
    fits = len(q_shape) == len(k_shape) == 4 and k_shape == v.shape
    if not fits or q_shape[0] != k_shape[0] or q_shape[3] != k_shape[3] or not _are_groups(q_shape[2], k_shape[2]):
        raise ConfigError(
            "attention: expected q [batch, seq_q, heads, head_dim] and k, v [batch, seq_k, kv_heads, head_dim] with "
            f"heads a multiple of kv_heads, got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ConfigError(f"attention: q, k and v must share a dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if not q.device == k.device == v.device:
        raise ConfigError(f"attention: q, k and v must be on one device, got {q.device}, {k.device}, {v.device}")
    if causal and q_shape[1] != k_shape[1]:
        raise ConfigError(f"attention: causal needs as many queries as keys, got {q.shape[1]} and {k.shape[1]}")
    if layout is None:
        return
    if layout.num_tokens != k.shape[1]:
        raise ConfigError(f"attention: the layout describes {layout.num_tokens} tokens, k has {k.shape[1]}")
    if layout.valid_lengths is not None and len(layout.valid_lengths) != q.shape[0]:
        raise ConfigError(
            f"attention: valid_lengths holds {len(layout.valid_lengths)} samples, the batch has {q.shape[0]}"
        )


def _are_groups(num_heads: int, num_kv_heads: int) -> bool:
    """Whether every key head serves as many query heads; no heads at all on either side are fine."""
    return num_heads == num_kv_heads or (num_kv_heads > 0 and num_heads % num_kv_heads == 0)


def check_heads(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    layer: LayerInfo,
) -> None:
    """Raises ConfigError unless a layer is called with the heads and the head size that it was built for, which its
    backend was chosen by. q, k, v: before processes exchange heads, so with all of the layer's."""
    of_keys = (num_kv_heads, head_dim)
    if q.shape[2:] == (num_heads, head_dim) and k.shape[2:] == of_keys and v.shape[2:] == of_keys:
        return
    where = f"layer {layer.index}" + (f" ({layer.name})" if layer.name else "")
    raise ConfigError(
        f"attention of {where}, role {layer.role!r}: built for q [batch, seq_q, {num_heads}, {head_dim}] and k, v "
        f"[batch, seq_k, {num_kv_heads}, {head_dim}], called with q {tuple(q.shape)}, k {tuple(k.shape)}, "
        f"v {tuple(v.shape)}; build the layer with the num_heads, head_dim and num_kv_heads of its calls"
    )
