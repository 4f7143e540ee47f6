"""Wan's attention with a rotation that torch.compile turns into one fast kernel; the numbers are the model's own.

diffusers writes the rotated halves into slices of an empty tensor, which costs a quarter of a training step.
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from diffusers.models.transformers.transformer_wan import WanAttention
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbouring pairs of the last axis: x [B, S, heads, D]; cos and sin [1, S, 1, D], each angle twice."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[..., 0::2], sin[..., 0::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).type_as(x)


class TrainingAttention:
    """An attention processor for WanTransformer3DModel without image conditioning; Wan never passes a mask."""

    def __call__(
        self,
        attn: WanAttention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,  # noqa: ARG002 (the processors' signature)
        rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        query = attn.norm_q(attn.to_q(hidden_states)).unflatten(2, (attn.heads, -1))
        key = attn.norm_k(attn.to_k(source)).unflatten(2, (attn.heads, -1))
        value = attn.to_v(source).unflatten(2, (attn.heads, -1))
        if rotary_emb is not None:
            query, key = rotate(query, *rotary_emb), rotate(key, *rotary_emb)
        dtype = value.dtype
        out = F.scaled_dot_product_attention(
            query.to(dtype).transpose(1, 2), key.to(dtype).transpose(1, 2), value.transpose(1, 2)
        )
        return attn.to_out[0](out.transpose(1, 2).flatten(2))


def faster_kernel(shape: tuple[int, int, int, int]) -> dict[str, float]:
    """Leave PyTorch the faster of FlashAttention and cuDNN for forward and backward; returns milliseconds of each.

    shape: [batch, heads, seq, head_dim] of self-attention; cross-attention to 64 tokens is timed with it. A kernel that
    does not run is left out.
    """
    milliseconds: dict[str, float] = {}
    query, key, value = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    text = key[:, :, :64].detach().requires_grad_()
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        try:
            with sdpa_kernel(backend):
                for turn in range(6):
                    if turn == 2:
                        torch.cuda.synchronize()
                        since = time.monotonic()
                    F.scaled_dot_product_attention(query, key, value).sum().backward()
                    F.scaled_dot_product_attention(query, text, text).sum().backward()
                torch.cuda.synchronize()
        except RuntimeError:
            continue
        milliseconds[backend.name] = 250 * (time.monotonic() - since)
    fastest = min(milliseconds, key=lambda name: milliseconds[name], default="FLASH_ATTENTION")
    torch.backends.cuda.enable_flash_sdp(fastest == "FLASH_ATTENTION")
    torch.backends.cuda.enable_cudnn_sdp(fastest == "CUDNN_ATTENTION")
    return milliseconds
