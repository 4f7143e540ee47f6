"""Weight map of shared blocks: which tensors of a diffusers checkpoint make up what several families use.

ours: a prefix of our parameter names; theirs: of the checkpoint's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from diffusion_runtime.layers.token_refiner import HIDDEN_RATIO
from diffusion_runtime.weights.checkpoint import Piece

# Our parameter name, and the checkpoint tensors that fill it, one after the other.
NamedPieces: TypeAlias = tuple[str, tuple[Piece, ...]]


def linear_pieces(
    ours: str, theirs: Sequence[tuple[str, int]], in_dim: int, *, bias: bool = True
) -> Iterator[NamedPieces]:
    """One linear map of ours made of several of theirs that read the same input. theirs: names and output widths."""
    yield f"{ours}.weight", tuple(Piece(f"{name}.weight", (out_dim, in_dim)) for name, out_dim in theirs)
    if bias:
        yield f"{ours}.bias", tuple(Piece(f"{name}.bias", (out_dim,)) for name, out_dim in theirs)


def norm_pieces(ours: str, theirs: str, dim: int) -> Iterator[NamedPieces]:
    """A norm with a weight alone."""
    yield f"{ours}.weight", (Piece(f"{theirs}.weight", (dim,)),)


def convolution_pieces(ours: str, theirs: str, out_dim: int, kernel: tuple[int, ...]) -> Iterator[NamedPieces]:
    """A convolution with a bias. kernel: channels of its input, and its extent along each axis."""
    yield f"{ours}.weight", (Piece(f"{theirs}.weight", (out_dim, *kernel)),)
    yield f"{ours}.bias", (Piece(f"{theirs}.bias", (out_dim,)),)


def self_attention_pieces(
    ours: str, theirs: str, dim: int, inner_dim: int, head_dim: int, *, norms: tuple[str, str] = ("norm_q", "norm_k")
) -> Iterator[NamedPieces]:
    """A joined `qkv`, `out` and the norms of q and k, without biases, by diffusers' names. norms: theirs."""
    inward = [(f"{theirs}.{name}", inner_dim) for name in ("to_q", "to_k", "to_v")]
    yield from linear_pieces(f"{ours}.qkv", inward, dim, bias=False)
    yield from linear_pieces(f"{ours}.out", [(f"{theirs}.to_out.0", dim)], inner_dim, bias=False)
    for mine, name in zip(("norm_q", "norm_k"), norms, strict=True):
        yield from norm_pieces(f"{ours}.{mine}", f"{theirs}.{name}", head_dim)


class CrossNames(NamedTuple):
    """Names of the layers of attention whose keys and values are of another input, in a checkpoint."""

    q: str
    k: str
    v: str
    out: str
    norm_q: str
    norm_k: str


def cross_attention_pieces(
    ours: str, theirs: str, dim: int, other_dim: int, head_dim: int, names: CrossNames
) -> Iterator[NamedPieces]:
    """A `q`, a joined `kv` of an input of other_dim, `out` and the norms of q and k, without biases."""
    yield from linear_pieces(f"{ours}.q", [(f"{theirs}.{names.q}", dim)], dim, bias=False)
    yield from linear_pieces(f"{ours}.kv", [(f"{theirs}.{name}", dim) for name in names[1:3]], other_dim, bias=False)
    yield from linear_pieces(f"{ours}.out", [(f"{theirs}.{names.out}", dim)], dim, bias=False)
    yield from norm_pieces(f"{ours}.norm_q", f"{theirs}.{names.norm_q}", head_dim)
    yield from norm_pieces(f"{ours}.norm_k", f"{theirs}.{names.norm_k}", head_dim)


def turning_rows(name: str, rows: torch.Tensor) -> torch.Tensor | None:
    """Return the rows of parameter `name` of an attention layer that make channels of q and k, a view; None where it
    makes none."""
    shares = {"qkv": (2, 3), "kv": (1, 2), **dict.fromkeys(("q", "norm_q", "norm_k"), (1, 1))}
    share = shares.get(name.rpartition(".")[0].rpartition(".")[2])
    return None if share is None else rows[: len(rows) // share[1] * share[0]]


def pair_halves(rows: torch.Tensor, head_dim: int, num_turned: int | None = None) -> None:
    """Make channels that turn together adjacent, in place, where the checkpoint has the halves of a head one after the
    other: channel i turns with channel i + num_turned / 2. rows: of whole heads; num_turned: of a head's first
    channels, None for all."""
    heads = rows.view(-1, head_dim, *rows.shape[1:])[:, :num_turned]
    heads.copy_(torch.unflatten(heads, 1, (2, -1)).transpose(1, 2).flatten(1, 2).clone())


def paired_heads(head_dim_of: Callable[[Any, str], int | None]) -> Callable[[nn.Module, str, torch.Tensor], None]:
    """Return an Arrange (weights/weight_loading.py) that makes channels of q and k that turn together adjacent, for
    checkpoints with the halves of a head one after the other. head_dim_of: (the module's config, our parameter name) ->
    channels of a head; None where it turns nothing."""

    def arrange(module: nn.Module, name: str, rows: torch.Tensor) -> None:
        turning, head_dim = turning_rows(name, rows), head_dim_of(module.config, name)
        if turning is not None and head_dim is not None:
            pair_halves(turning, head_dim)

    return arrange


def two_layer_pieces(ours: str, theirs: str, in_dim: int, dim: int, *, bias: bool = True) -> Iterator[NamedPieces]:
    """The `up` and `down` of an embedding whose layers the checkpoint calls linear_1 and linear_2."""
    yield from linear_pieces(f"{ours}.up", [(f"{theirs}.linear_1", dim)], in_dim, bias=bias)
    yield from linear_pieces(f"{ours}.down", [(f"{theirs}.linear_2", dim)], dim, bias=bias)


@dataclass(frozen=True)
class StreamNames:
    """The names of a double-stream block's parts in a checkpoint: its maps to modulation rows and its feed-forward
    networks, of the grid and of the text."""

    modulation: str = "norm1.linear"
    text_modulation: str = "norm1_context.linear"
    feed_forward: str = "ff"
    text_feed_forward: str = "ff_context"


def double_stream_pieces(
    ours: str, theirs: str, dim: int, head_dim: int, ffn_dim: int, names: StreamNames
) -> Iterator[NamedPieces]:
    """A DoubleStreamBlock."""
    yield from linear_pieces(f"{ours}.modulation.projection", [(f"{theirs}.{names.modulation}", 6 * dim)], dim)
    yield from linear_pieces(
        f"{ours}.text_modulation.projection", [(f"{theirs}.{names.text_modulation}", 6 * dim)], dim
    )
    yield from joint_attention_pieces(f"{ours}.joint_attention", f"{theirs}.attn", dim, head_dim)
    yield from feed_forward_pieces(f"{ours}.feed_forward", f"{theirs}.{names.feed_forward}", dim, ffn_dim)
    yield from feed_forward_pieces(f"{ours}.text_feed_forward", f"{theirs}.{names.text_feed_forward}", dim, ffn_dim)


def joint_attention_pieces(
    ours: str, theirs: str, dim: int, head_dim: int, *, bias: bool = True
) -> Iterator[NamedPieces]:
    """A JointAttention."""
    grid, text = ("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj")
    yield from linear_pieces(f"{ours}.qkv", [(f"{theirs}.{name}", dim) for name in grid], dim, bias=bias)
    yield from linear_pieces(f"{ours}.text_qkv", [(f"{theirs}.{name}", dim) for name in text], dim, bias=bias)
    names = {"norm_q": "norm_q", "norm_k": "norm_k", "text_norm_q": "norm_added_q", "text_norm_k": "norm_added_k"}
    for mine, name in names.items():
        yield from norm_pieces(f"{ours}.{mine}", f"{theirs}.{name}", head_dim)
    yield from linear_pieces(f"{ours}.out", [(f"{theirs}.to_out.0", dim)], dim, bias=bias)
    yield from linear_pieces(f"{ours}.text_out", [(f"{theirs}.to_add_out", dim)], dim, bias=bias)


def single_stream_pieces(ours: str, theirs: str, dim: int, head_dim: int, ffn_dim: int) -> Iterator[NamedPieces]:
    """A SingleStreamBlock."""
    yield from linear_pieces(f"{ours}.modulation.projection", [(f"{theirs}.norm.linear", 3 * dim)], dim)
    inward = [(f"{theirs}.attn.{name}", dim) for name in ("to_q", "to_k", "to_v")]
    yield from linear_pieces(f"{ours}.qkv_up", [*inward, (f"{theirs}.proj_mlp", ffn_dim)], dim)
    for name in ("norm_q", "norm_k"):
        yield f"{ours}.{name}.weight", (Piece(f"{theirs}.attn.{name}.weight", (head_dim,)),)
    yield from linear_pieces(f"{ours}.out", [(f"{theirs}.proj_out", dim)], dim + ffn_dim)


def feed_forward_pieces(ours: str, theirs: str, dim: int, ffn_dim: int, *, bias: bool = True) -> Iterator[NamedPieces]:
    """A FeedForward, by diffusers' names."""
    yield from up_down_pieces(ours, [(f"{theirs}.net.0.proj", ffn_dim)], f"{theirs}.net.2", dim, ffn_dim, bias=bias)


def up_down_pieces(
    ours: str, up: Sequence[tuple[str, int]], down: str, dim: int, ffn_dim: int, *, bias: bool
) -> Iterator[NamedPieces]:
    """The `up` and `down` of a feed-forward network, gated or not. up, down: their names, as in linear_pieces; up's
    widths are ffn_dim together, or twice that with a gate."""
    yield from linear_pieces(f"{ours}.up", up, dim, bias=bias)
    yield from linear_pieces(f"{ours}.down", [(down, dim)], ffn_dim, bias=bias)


def layer_norm_pieces(ours: str, theirs: str, dim: int) -> Iterator[NamedPieces]:
    """A LayerNorm."""
    for name in ("weight", "bias"):
        yield f"{ours}.{name}", (Piece(f"{theirs}.{name}", (dim,)),)


def token_refiner_pieces(
    ours: str, theirs: str, dim: int, text_dim: int, num_layers: int, num_waves: int
) -> Iterator[NamedPieces]:
    """A TokenRefiner."""
    yield from two_layer_pieces(f"{ours}.timestep", f"{theirs}.time_text_embed.timestep_embedder", num_waves, dim)
    yield from two_layer_pieces(f"{ours}.mean", f"{theirs}.time_text_embed.text_embedder", text_dim, dim)
    yield from linear_pieces(f"{ours}.projection", [(f"{theirs}.proj_in", dim)], text_dim)
    for index in range(num_layers):
        mine, block = f"{ours}.blocks.{index}", f"{theirs}.token_refiner.refiner_blocks.{index}"
        yield from linear_pieces(f"{mine}.gates.projection", [(f"{block}.norm_out.linear", 2 * dim)], dim)
        yield from layer_norm_pieces(f"{mine}.norm", f"{block}.norm1", dim)
        inward = [(f"{block}.attn.{name}", dim) for name in ("to_q", "to_k", "to_v")]
        yield from linear_pieces(f"{mine}.qkv", inward, dim)
        yield from linear_pieces(f"{mine}.out", [(f"{block}.attn.to_out.0", dim)], dim)
        yield from layer_norm_pieces(f"{mine}.feed_forward_norm", f"{block}.norm2", dim)
        yield from feed_forward_pieces(mine, f"{block}.ff", dim, HIDDEN_RATIO * dim)
