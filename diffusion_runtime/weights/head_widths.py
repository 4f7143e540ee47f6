"""Widths of a transformer by its heads, with a feed-forward network four times as wide."""

from __future__ import annotations

from diffusion_runtime.core import config_fields

_HIDDEN_RATIO = 4


@config_fields.config
class HeadWidths:
    """num_heads of head_dim channels each; dim: of a token, ffn_dim: within the feed-forward network."""

    num_heads: int = config_fields.whole_number("num_attention_heads")
    head_dim: int = config_fields.even_number("attention_head_dim")

    @property
    def dim(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def ffn_dim(self) -> int:
        return _HIDDEN_RATIO * self.dim
