"""Cross-attention of Wan: to the text, and in Wan 2.1 I2V and FLF2V to the tokens of one or two images as well.

Shapes: B batch, S grid tokens, L text tokens, I image tokens, D width (num_heads * head_dim).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import nn

from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.attention.layers import LocalAttention
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.core.step_info import LayerInfo
from diffusion_runtime.layers.embeddings import ImageEmbedding
from diffusion_runtime.layers.linear import Linear, LinearInput
from diffusion_runtime.layers.norm import RMSNorm
from diffusion_runtime.layers.rope import norm_and_rotate
from diffusion_runtime.models.wan.config import WanTransformerConfig

# Attention to the tokens of an image.
IMAGE_ROLE = "wan.image_cross"

# Keys and values of a text or of an image's tokens, for one block: both [B, L or I, heads, head_dim]. They depend on
# nothing that changes from step to step.
KeysAndValues: TypeAlias = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class BlockPlace:
    """Position of a block in its model, for its attention layers. index of num_blocks, of its kind; path: the module's
    in its model; self_role, text_role: of its attention to the grid and to the text."""

    index: int
    num_blocks: int
    path: str
    self_role: str = "self"
    text_role: str = "cross"

    def layer(self, role: str, part: str) -> LayerInfo:
        """Return the info of one of its attention layers. part: the layer's path in the block."""
        return LayerInfo(self.index, self.num_blocks, role, f"{self.path}.{part}")


@dataclass(frozen=True)
class CrossKeys:
    """Keys and values of one block. image: of models with an image encoder."""

    text: KeysAndValues
    image: KeysAndValues | None


class WanImageEmbedding(ImageEmbedding):
    """Image embedding. positions: learned ones of two images' tokens, added first; None in models of one image."""

    def __init__(self, config: WanTransformerConfig) -> None:
        assert config.image_dim is not None
        super().__init__(config.image_dim, config.dim)
        placed = config.num_placed_tokens
        self.positions = None if placed is None else nn.Parameter(torch.zeros(1, placed, config.image_dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [B, I, image_dim] to [B, I, D]."""
        return super().forward(x if self.positions is None else x + self.positions)


class WanImageCrossAttention(nn.Module):
    """Attention to the tokens of an image, with the queries of the attention to the text."""

    # Read by `keys_and_values`, not by forward.
    read_once = ("kv", "norm_k")

    def __init__(self, config: WanTransformerConfig, place: BlockPlace, policy: AttentionPolicy) -> None:
        super().__init__()
        self.kv = Linear(config.dim, 2 * config.dim)
        self.norm_k = RMSNorm(config.dim, config.eps)
        layer = place.layer(IMAGE_ROLE, "cross_attention.image")
        self.attention = LocalAttention(config.num_heads, config.head_dim, layer=layer, policy=policy)

    def keys_and_values(self, image: torch.Tensor) -> KeysAndValues:
        """Return the keys and values of an image's tokens [B, I, D]."""
        k, v = norm_and_rotate(self.kv(image).unflatten(-1, (2, self.attention.num_heads, -1)), (self.norm_k,), None)
        return k, v


class WanCrossAttention(nn.Module):
    """Attention to the text and, added to it, to the tokens of an image in models with an image encoder."""

    # Read by `keys_and_values`, not by forward.
    read_once = ("kv", "norm_k")

    def __init__(self, config: WanTransformerConfig, place: BlockPlace, policy: AttentionPolicy) -> None:
        super().__init__()
        self.q = Linear(config.dim, config.dim)
        self.kv = Linear(config.dim, 2 * config.dim)
        self.norm_q = RMSNorm(config.dim, config.eps)
        self.norm_k = RMSNorm(config.dim, config.eps)
        self.out = Linear(config.dim, config.dim)
        layer = place.layer(place.text_role, "cross_attention")
        self.attention = LocalAttention(config.num_heads, config.head_dim, layer=layer, policy=policy)
        self.image = None if config.image_dim is None else WanImageCrossAttention(config, place, policy)

    def keys_and_values(self, text: torch.Tensor) -> KeysAndValues:
        """Return the keys and values of text [B, L, D]."""
        k, v = norm_and_rotate(self.kv(text).unflatten(-1, (2, self.attention.num_heads, -1)), (self.norm_k,), None)
        return k, v

    def forward(
        self, x: LinearInput, keys: CrossKeys, context: AttentionContext, image_context: AttentionContext | None
    ) -> torch.Tensor:
        """Attend to the text and the image. x: [B, S, D], which may be quantised where q takes that; context.layout:
        the text; image_context.layout: the tokens of the image."""
        (q,) = norm_and_rotate(self.q(x).unflatten(-1, (1, self.attention.num_heads, -1)), (self.norm_q,), None)
        attended = self.attention(q, *keys.text, context)
        if self.image is not None and keys.image is not None:
            attended = attended + self.image.attention(q, *keys.image, image_context)
        out: torch.Tensor = self.out(attended.flatten(2))
        return out
