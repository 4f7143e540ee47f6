"""The encoder of UMT5 (Chung et al. 2023, arXiv:2304.09151), to the bits of transformers' UMT5EncoderModel.

transformers is imported for configs that this one does not know (`sizes_of`): importing it takes a second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from diffusion_runtime.untrusted.component_sizes import MAX_LAYERS
from diffusion_runtime.untrusted.known_settings import (
    Allows,
    anything,
    are_known,
    either,
    is_false,
    is_positive,
    is_true,
    whole,
)

_SIZE = whole(1, 2**20)
# config.json's name of every size, all of which are required.
_SIZES: Mapping[str, Allows] = {
    "vocab_size": whole(1, 2**24),
    "d_model": _SIZE,
    "d_kv": _SIZE,
    "d_ff": _SIZE,
    "num_heads": _SIZE,
    "num_layers": whole(1, MAX_LAYERS),
    # Half of the buckets are for one direction, half of those for distances that have one each.
    "relative_attention_num_buckets": whole(4, 2**20),
    "relative_attention_max_distance": whole(2, 2**20),
    "layer_norm_epsilon": is_positive,
}
_KNOWN: Mapping[str, Allows] = {
    **_SIZES,
    "model_type": either("umt5"),
    "feed_forward_proj": either("gated-gelu"),
    "dense_act_fn": either("gelu_new"),
    "is_gated_act": is_true,
    "is_decoder": is_false,
    "tie_word_embeddings": is_true,
    # Nothing that an encoder computes depends on these.
    **dict.fromkeys(
        (
            "architectures",
            "classifier_dropout",
            "decoder_start_token_id",
            "dropout_rate",
            "dtype",
            "eos_token_id",
            "initializer_factor",
            "is_encoder_decoder",
            "num_decoder_layers",
            "output_past",
            "pad_token_id",
            # The same in every published UMT5; transformers' class does not read it either.
            "scalable_attention",
            "tokenizer_class",
            "torch_dtype",
            "transformers_version",
            "use_cache",
        ),
        anything,
    ),
}


@dataclass(frozen=True)
class UMT5Sizes:
    """Sizes by their names in config.json, except head_dim (d_kv) and eps (layer_norm_epsilon)."""

    vocab_size: int
    d_model: int
    head_dim: int
    d_ff: int
    num_heads: int
    num_layers: int
    num_buckets: int
    max_distance: int
    eps: float


def sizes_of(config: Mapping[str, Any]) -> UMT5Sizes | None:
    """Return the sizes in a config.json; None where it has settings that UMT5Encoder does not know, or lacks a size."""
    settings = {key: value for key, value in config.items() if not key.startswith("_")}
    if not are_known(settings, _KNOWN) or not settings.keys() >= _SIZES.keys():
        return None
    sizes = UMT5Sizes(*(settings[name] for name in _SIZES))
    # Distances beyond those that have a bucket of their own are spaced by their logarithm.
    return sizes if sizes.max_distance > sizes.num_buckets // 4 else None


class UMT5Encoder(nn.Module):
    """Encoder from token ids to hidden states. Its parameters have the published names."""

    def __init__(self, sizes: UMT5Sizes) -> None:
        super().__init__()
        self.shared = _Table(sizes.vocab_size, sizes.d_model)
        self.encoder = _Stack(sizes)

    @property
    def device(self) -> torch.device:
        return self.shared.weight.device

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Return [batch, seq, d_model]. ids: [batch, seq]. mask: [batch, seq], False for padding; None without any."""
        hidden: torch.Tensor = self.encoder(self.shared(ids), None if mask is None else mask[:, None, None, :])
        return hidden


class _Stack(nn.Module):
    def __init__(self, sizes: UMT5Sizes) -> None:
        super().__init__()
        self.block = nn.ModuleList(_Block(sizes) for _ in range(sizes.num_layers))
        self.final_layer_norm = _Norm(sizes)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        for block in self.block:
            hidden = block(hidden, mask)
        normed: torch.Tensor = self.final_layer_norm(hidden)
        return normed


class _Block(nn.Module):
    def __init__(self, sizes: UMT5Sizes) -> None:
        super().__init__()
        self.layer = nn.ModuleList([_AttentionLayer(sizes), _FeedForwardLayer(sizes)])

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        attention, feed_forward = self.layer
        out: torch.Tensor = feed_forward(attention(hidden, mask))
        return out


class _AttentionLayer(nn.Module):
    def __init__(self, sizes: UMT5Sizes) -> None:
        super().__init__()
        self.SelfAttention = _Attention(sizes)
        self.layer_norm = _Norm(sizes)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        out: torch.Tensor = hidden + self.SelfAttention(self.layer_norm(hidden), mask)
        return out


class _FeedForwardLayer(nn.Module):
    def __init__(self, sizes: UMT5Sizes) -> None:
        super().__init__()
        self.DenseReluDense = _GatedGelu(sizes)
        self.layer_norm = _Norm(sizes)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = hidden + self.DenseReluDense(self.layer_norm(hidden))
        return out


class _Table(nn.Module):
    """An embedding. nn.Embedding draws its first weights, which on the meta device imports torch's compiler, 1.5 s."""

    def __init__(self, num_rows: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_rows, dim))

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return F.embedding(index, self.weight)


class _Norm(nn.Module):
    """RMSNorm, summed in float32."""

    def __init__(self, sizes: UMT5Sizes) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(sizes.d_model))
        self._eps = sizes.eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean_square = x.float().square().mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(mean_square + self._eps)).to(self.weight.dtype)


class _GatedGelu(nn.Module):
    def __init__(self, sizes: UMT5Sizes) -> None:
        super().__init__()
        self.wi_0 = nn.Linear(sizes.d_model, sizes.d_ff, bias=False)
        self.wi_1 = nn.Linear(sizes.d_model, sizes.d_ff, bias=False)
        self.wo = nn.Linear(sizes.d_ff, sizes.d_model, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.wi_0(x)
        # Written out: torch's fused tanh form rounds once where this rounds after every operation.
        inner = math.sqrt(2.0 / math.pi) * (gate + 0.044715 * torch.pow(gate, 3.0))
        out: torch.Tensor = self.wo(0.5 * gate * (1.0 + torch.tanh(inner)) * self.wi_1(x))
        return out


class _Attention(nn.Module):
    """Attention whose scores are not scaled, with a bias by the distance in every layer."""

    def __init__(self, sizes: UMT5Sizes) -> None:
        super().__init__()
        self._sizes = sizes
        inner = sizes.num_heads * sizes.head_dim
        self.q = nn.Linear(sizes.d_model, inner, bias=False)
        self.k = nn.Linear(sizes.d_model, inner, bias=False)
        self.v = nn.Linear(sizes.d_model, inner, bias=False)
        self.o = nn.Linear(inner, sizes.d_model, bias=False)
        self.relative_attention_bias = _Table(sizes.num_buckets, sizes.num_heads)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        q, k, v = (
            each(x).unflatten(-1, (self._sizes.num_heads, self._sizes.head_dim)).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        bias = self._bias(x.shape[1])
        if mask is not None:
            bias = torch.where(mask, bias, torch.finfo(bias.dtype).min)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.contiguous(), scale=1.0)
        out: torch.Tensor = self.o(attended.transpose(1, 2).flatten(2))
        return out

    def _bias(self, length: int) -> torch.Tensor:
        """Return the bias [1, heads, length, length], of a query's row and a key's column."""
        places = torch.arange(length, device=self.relative_attention_bias.weight.device)
        bias: torch.Tensor = self.relative_attention_bias(self._buckets(places[None, :] - places[:, None]))
        return bias.permute(2, 0, 1)[None]

    def _buckets(self, distance: torch.Tensor) -> torch.Tensor:
        """Return each distance's bucket, in the upper half for keys after a query; far ones share by logarithm."""
        per_direction = self._sizes.num_buckets // 2
        num_near = per_direction // 2
        away = distance.abs()
        steps = torch.log(away.float() / num_near) / math.log(self._sizes.max_distance / num_near)
        far = num_near + (steps * (per_direction - num_near)).long()
        bucket = torch.where(away < num_near, away, far.clamp(max=per_direction - 1))
        return bucket + (distance > 0) * per_direction
