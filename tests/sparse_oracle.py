"""What every sparse method is judged against: masked attention in float64, and random inputs."""

from __future__ import annotations

import torch

from diffusion_runtime.attention import TokenLayout


def random_qkv(
    layout: TokenLayout,
    *,
    batch: int = 1,
    num_heads: int = 2,
    num_kv_heads: int | None = None,
    head_dim: int = 16,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [batch, seq, heads, head_dim] and k, v [batch, seq, kv_heads, head_dim] of independent normals."""
    generator = torch.Generator().manual_seed(seed)
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    shapes = [(batch, layout.num_tokens, heads, head_dim) for heads in (num_heads, kv_heads, kv_heads)]
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return q, k, v


def masked_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """mask: bool [batch, heads, seq_q, seq_k]. Returns out like q, float64, and lse [batch, heads, seq_q]."""
    repeats = q.shape[2] // k.shape[2]
    q_bhsd = q.double().transpose(1, 2)
    k_bhsd, v_bhsd = (x.double().transpose(1, 2).repeat_interleave(repeats, dim=1) for x in (k, v))
    scores = (q.shape[3] ** -0.5 if scale is None else scale) * q_bhsd @ k_bhsd.transpose(2, 3)
    scores = scores.masked_fill(~mask, float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])
    return (weights @ v_bhsd).transpose(1, 2), lse
