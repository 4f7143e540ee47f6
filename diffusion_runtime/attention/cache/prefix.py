"""Prefix cache: keys and values that are computed once and that every later forward pass attends to, such as those of
reference images or of the prompt. Language-model servers call it a cached prefix."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PrefixCache:
    """The keys, with their positions, and values of every layer, by its index: [batch, tokens, kv_heads, head_dim]
    each, of the heads that this process holds before a sequence is shared. lengths: how many of the first ones each
    sample attends to; None for all, which text behind the prefix needs."""

    layers: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    lengths: tuple[int, ...] | None = None

    @property
    def num_tokens(self) -> int:
        return self.layers[0][0].shape[1]

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for pair in self.layers for x in pair)

    def joined(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, place: int, first_head: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a pass with those of the prefix from token `place` on. first_head: of k and v, among the
        heads of this process."""
        heads = slice(first_head, first_head + k.shape[2])
        of_prefix = (x[:, :, heads] for x in self.layers[layer])
        keys, values = (
            torch.cat([x[:, :place], prefix, x[:, place:]], dim=1) for x, prefix in zip((k, v), of_prefix, strict=True)
        )
        return keys, values
