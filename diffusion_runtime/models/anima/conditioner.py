"""The text conditioner of Anima: T5's tokens, embedded anew, attend to the states that a language model has of the same
prompt, and become the text that the transformer attends to.

    T5's token ids -> embedding -> num_layers x (self-attention, attention to the states, feed-forward) -> norm -> text

Shapes in this file: B batch, L tokens of T5, N tokens of the language model, D width (num_heads * head_dim).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.attention.layers import LocalAttention
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.core import config_fields
from diffusion_runtime.core.model_folder import AnyFolder, read_config
from diffusion_runtime.core.step_info import LayerInfo
from diffusion_runtime.core.token_layout import TokenLayout
from diffusion_runtime.kernels.modulated_norm.api import Branch, add_branch_, modulated_norm
from diffusion_runtime.layers.linear import FeedForward, Linear
from diffusion_runtime.layers.norm import RMSNorm
from diffusion_runtime.layers.rope import norm_and_rotate, position_rotations
from diffusion_runtime.text_encoders.interface import Conditions
from diffusion_runtime.text_encoders.token_ids import ids_of
from diffusion_runtime.weights.checkpoint import Piece
from diffusion_runtime.weights.pieces import (
    CrossNames,
    NamedPieces,
    cross_attention_pieces,
    linear_pieces,
    norm_pieces,
    up_down_pieces,
)

# The component that makes the transformer's text, in a folder of its own.
CONDITIONER = "text_conditioner"
SELF_ROLE, STATES_ROLE = "anima.text_self", "anima.text_states"
_EPS = 1e-6
# Modules of a block and around the blocks, as the authors and diffusers call them.
_ATTENTION = CrossNames("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
MODULES = (
    *(f"{attention}.{name}" for attention in ("self_attn", "cross_attn") for name in _ATTENTION),
    *("norm_self_attn", "norm_cross_attn", "norm_mlp", "mlp.0", "mlp.2"),
)
MODULES_AROUND = ("embed", "in_proj", "out_proj", "norm")


@config_fields.config
class ConditionerConfig:
    """Sizes of the text conditioner. source_dim: of the language model's states; vocab_size: of T5's tokens;
    min_tokens: what its tokens are filled up to with zeros, which the transformer attends to."""

    source_dim: int = config_fields.whole_number("source_dim", 1024)
    dim: int = config_fields.whole_number("model_dim", 1024)
    out_dim: int = config_fields.whole_number("target_dim", 1024)
    num_heads: int = config_fields.whole_number("num_attention_heads", 16)
    num_layers: int = config_fields.layer_count("num_layers", 6)
    ffn_dim: int = config_fields.ffn_width("mlp_ratio", 4.0)
    vocab_size: int = config_fields.whole_number("target_vocab_size", 32128)
    min_tokens: int = config_fields.whole_number("min_sequence_length", 512)

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads


def read_conditioner_config(folder: AnyFolder) -> ConditionerConfig:
    """Read text_conditioner/config.json. Raises ModelLoadError that names the file and the key."""
    file = read_config(folder, CONDITIONER)
    fixed = {"use_self_attention": True, "use_layer_norm": False}
    config = ConditionerConfig(**config_fields.read_fields(ConditionerConfig, file, fixed=fixed))
    if config.dim % (2 * config.num_heads):
        expected = f"an even number for each of num_attention_heads, {config.num_heads}"
        raise file.error("model_dim", expected, config.dim)
    return config


def conditioner_pieces(config: ConditionerConfig) -> Iterator[NamedPieces]:
    """Yield our parameter names -> the checkpoint tensors that fill them, one after the other."""
    dim, out_dim = config.dim, config.out_dim
    yield "conditioner.embedding.weight", (Piece(f"{CONDITIONER}.embed.weight", (config.vocab_size, out_dim)),)
    if dim != out_dim:
        yield from linear_pieces("conditioner.inward", [(f"{CONDITIONER}.in_proj", dim)], out_dim)
    for index in range(config.num_layers):
        ours, theirs = f"conditioner.blocks.{index}", f"{CONDITIONER}.blocks.{index}"
        attentions = {"self_attention": ("self_attn", dim), "states_attention": ("cross_attn", config.source_dim)}
        for mine, (name, in_dim) in attentions.items():
            attention = f"{ours}.{mine}", f"{theirs}.{name}"
            yield from cross_attention_pieces(*attention, dim, in_dim, config.head_dim, _ATTENTION)
        norms = {"self_norm": "norm_self_attn", "states_norm": "norm_cross_attn", "ffn_norm": "norm_mlp"}
        for mine, name in norms.items():
            yield from norm_pieces(f"{ours}.{mine}", f"{theirs}.{name}", dim)
        up, down = [(f"{theirs}.mlp.0", config.ffn_dim)], f"{theirs}.mlp.2"
        yield from up_down_pieces(f"{ours}.feed_forward", up, down, dim, config.ffn_dim, bias=True)
    yield from linear_pieces("conditioner.out", [(f"{CONDITIONER}.out_proj", out_dim)], dim)
    yield from norm_pieces("conditioner.norm", f"{CONDITIONER}.norm", out_dim)


class ConditionerAttention(nn.Module):
    """Attention with rotary positions among the tokens or, with `of_states`, to the language model's."""

    def __init__(self, config: ConditionerConfig, index: int, policy: AttentionPolicy, *, of_states: bool) -> None:
        super().__init__()
        self.q = Linear(config.dim, config.dim, bias=False)
        self.kv = Linear(config.source_dim if of_states else config.dim, 2 * config.dim, bias=False)
        self.norm_q = RMSNorm(config.head_dim, _EPS)
        self.norm_k = RMSNorm(config.head_dim, _EPS)
        self.out = Linear(config.dim, config.dim, bias=False)
        name = "states_attention" if of_states else "self_attention"
        role = STATES_ROLE if of_states else SELF_ROLE
        layer = LayerInfo(index, config.num_layers, role, f"conditioner.blocks.{index}.{name}.attention")
        self.attention = LocalAttention(config.num_heads, config.head_dim, layer=layer, policy=policy)

    def forward(
        self,
        x: torch.Tensor,
        source: torch.Tensor,
        rotations: torch.Tensor,
        source_rotations: torch.Tensor,
        context: AttentionContext,
    ) -> torch.Tensor:
        """Attend. x: [B, L, D]; source: [B, L or N, width], what keys and values are made of; context.layout: its
        tokens; rotations: [tokens, head_dim / 2] of either, complex."""
        heads, shares = self.attention.num_heads, self.attention.num_shares
        packed, further = self.q(x).unflatten(-1, (1, heads, -1)), self.kv(source).unflatten(-1, (2, heads, -1))
        (q,) = norm_and_rotate(packed, (self.norm_q,), rotations, num_shares=shares)
        k, v = norm_and_rotate(further, (self.norm_k,), source_rotations, num_shares=shares)
        out: torch.Tensor = self.out(self.attention(q, k, v, context).flatten(2))
        return out


class ConditionerBlock(nn.Module):
    """Both attentions and a feed-forward network, each after a norm."""

    def __init__(self, config: ConditionerConfig, index: int, policy: AttentionPolicy) -> None:
        super().__init__()
        self.self_norm = RMSNorm(config.dim, _EPS)
        self.self_attention = ConditionerAttention(config, index, policy, of_states=False)
        self.states_norm = RMSNorm(config.dim, _EPS)
        self.states_attention = ConditionerAttention(config, index, policy, of_states=True)
        self.ffn_norm = RMSNorm(config.dim, _EPS)
        self.feed_forward = FeedForward(config.dim, config.ffn_dim, is_exact=True)

    def forward(
        self,
        x: torch.Tensor,
        states: torch.Tensor,
        rotations: torch.Tensor,
        state_rotations: torch.Tensor,
        own: AttentionContext,
        of_states: AttentionContext,
    ) -> torch.Tensor:
        """Return new tokens [B, L, D]. states: [B, N, source_dim]; own, of_states: contexts of either attention."""
        normed = modulated_norm(x, self.self_norm.as_norm)
        branch = Branch(self.self_attention(normed, normed, rotations, rotations, own))
        x = x.clone()
        normed = modulated_norm(x, self.states_norm.as_norm, branch=branch)
        branch = Branch(self.states_attention(normed, states, rotations, state_rotations, of_states))
        normed = modulated_norm(x, self.ffn_norm.as_norm, branch=branch)
        return add_branch_(x, Branch(self.feed_forward(normed)))


class TextConditioner(nn.Module):
    """The whole conditioner."""

    def __init__(self, config: ConditionerConfig, policy: AttentionPolicy) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.out_dim)
        self.inward = Linear(config.out_dim, config.dim) if config.dim != config.out_dim else None
        self.blocks = nn.ModuleList(ConditionerBlock(config, index, policy) for index in range(config.num_layers))
        self.out = Linear(config.dim, config.out_dim)
        self.norm = RMSNorm(config.out_dim, _EPS)

    def forward(self, text: Conditions, context: AttentionContext) -> torch.Tensor:
        """Return the text [B, tokens of layout_of, out_dim], zero behind each prompt's own tokens."""
        (tokens,), dtype = text.further, self.out.weight.dtype
        states = text.embeddings[:, : max(1, *text.lengths)].to(dtype)
        num_tokens, num_states = max(tokens.lengths), states.shape[1]
        is_own = torch.arange(num_tokens)[None] < torch.tensor(tokens.lengths)[:, None]
        is_own = is_own.to(states.device)[..., None]
        # Padding may hold anything, and is no index.
        ids = ids_of(tokens.embeddings[:, :num_tokens]).clamp(0, self.config.vocab_size - 1)
        x = self.embedding(ids * is_own[..., 0]).to(dtype)
        x = x if self.inward is None else self.inward(x)
        own = context.with_layout(TokenLayout.text(num_tokens, tokens.lengths))
        of_states = context.with_layout(TokenLayout.text(num_states, text.lengths))
        rotations, state_rotations = (self._rotations(count, x.device) for count in (num_tokens, num_states))
        for block in self.blocks:
            x = block(x, states, rotations, state_rotations, own, of_states)
        made = modulated_norm(self.out(x), self.norm.as_norm) * is_own
        return F.pad(made, (0, 0, 0, max(0, self.config.min_tokens - num_tokens)))

    def layout_of(self, text: Conditions) -> TokenLayout:
        """Return the layout of the text that is made of conditions: every prompt with its zeros."""
        lengths = tuple(max(length, self.config.min_tokens) for length in text.further[0].lengths)
        return TokenLayout.text(max(lengths), lengths)

    def _rotations(self, num_tokens: int, device: torch.device) -> torch.Tensor:
        return position_rotations((range(num_tokens),), (self.config.head_dim,), device)
