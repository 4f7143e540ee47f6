"""Which tensors of a diffusers Wan checkpoint make up each of ours.

Projections that read the same input are one tensor here (q, k, v of self-attention; k, v of cross-attention), and the
patch convolution is a linear map of the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from diffusion_runtime.models.checkpoint import Piece
from diffusion_runtime.models.wan.config import GATE, WanTransformerConfig

# Left over in some published checkpoints, and read by nothing.
IGNORED_SUFFIXES = ("norm_added_q.weight",)

# Parts whose parameters stay float32 in a model of any dtype.
_FLOAT32_PARTS = frozenset({"time_embedding", "modulation", "out_modulation", "cross_norm"})


def stays_float32(name: str) -> bool:
    """Whether our parameter `name` is kept in float32 when the model is loaded in another dtype."""
    return not _FLOAT32_PARTS.isdisjoint(name.split("."))


def transformer_pieces(config: WanTransformerConfig) -> dict[str, tuple[Piece, ...]]:
    """Our parameter name -> the checkpoint tensors that fill it, one after the other."""
    dim = config.dim
    pieces: dict[str, tuple[Piece, ...]] = {
        "patch_embedding.projection.weight": (
            Piece("patch_embedding.weight", (dim, config.num_channels, *config.patch)),
        ),
        "patch_embedding.projection.bias": (Piece("patch_embedding.bias", (dim,)),),
        "out_modulation": (Piece("scale_shift_table", (1, 2, dim)),),
    }
    pieces.update(_linears("time_embedding.up", ["condition_embedder.time_embedder.linear_1"], dim, config.num_waves))
    pieces.update(_linears("time_embedding.down", ["condition_embedder.time_embedder.linear_2"], dim, dim))
    pieces.update(_linears("time_projection", ["condition_embedder.time_proj"], 6 * dim, dim))
    pieces.update(_linears("text_embedding.up", ["condition_embedder.text_embedder.linear_1"], dim, config.text_dim))
    pieces.update(_linears("text_embedding.down", ["condition_embedder.text_embedder.linear_2"], dim, dim))
    pieces.update(_linears("out", ["proj_out"], config.patch_channels, dim))
    for index in range(config.num_layers):
        pieces.update(_block(f"blocks.{index}", config))
    return pieces


def _block(name: str, config: WanTransformerConfig) -> Iterator[tuple[str, tuple[Piece, ...]]]:
    dim = config.dim
    yield f"{name}.modulation", (Piece(f"{name}.scale_shift_table", (1, 6, dim)),)
    ours, theirs = f"{name}.self_attention", f"{name}.attn1"
    yield from _linears(f"{ours}.qkv", [f"{theirs}.to_q", f"{theirs}.to_k", f"{theirs}.to_v"], dim, dim).items()
    yield from _attention_rest(ours, theirs, dim)
    if config.has_gate:
        yield from _linears(f"{ours}.gate", [f"{name}.{GATE}"], dim, dim).items()
    ours, theirs = f"{name}.cross_attention", f"{name}.attn2"
    yield from _linears(f"{ours}.q", [f"{theirs}.to_q"], dim, dim).items()
    yield from _linears(f"{ours}.kv", [f"{theirs}.to_k", f"{theirs}.to_v"], dim, dim).items()
    yield from _attention_rest(ours, theirs, dim)
    if config.norm_cross:
        yield f"{name}.cross_norm.weight", (Piece(f"{name}.norm2.weight", (dim,)),)
        yield f"{name}.cross_norm.bias", (Piece(f"{name}.norm2.bias", (dim,)),)
    yield from _linears(f"{name}.feed_forward.up", [f"{name}.ffn.net.0.proj"], config.ffn_dim, dim).items()
    yield from _linears(f"{name}.feed_forward.down", [f"{name}.ffn.net.2"], dim, config.ffn_dim).items()


def _attention_rest(ours: str, theirs: str, dim: int) -> Iterator[tuple[str, tuple[Piece, ...]]]:
    """Norms of q and k, and the projection after attention."""
    yield f"{ours}.norm_q.weight", (Piece(f"{theirs}.norm_q.weight", (dim,)),)
    yield f"{ours}.norm_k.weight", (Piece(f"{theirs}.norm_k.weight", (dim,)),)
    yield from _linears(f"{ours}.out", [f"{theirs}.to_out.0"], dim, dim).items()


def _linears(ours: str, theirs: list[str], out_dim: int, in_dim: int) -> Mapping[str, tuple[Piece, ...]]:
    """One linear map of ours made of several [out_dim, in_dim] ones of theirs."""
    return {
        f"{ours}.weight": tuple(Piece(f"{name}.weight", (out_dim, in_dim)) for name in theirs),
        f"{ours}.bias": tuple(Piece(f"{name}.bias", (out_dim,)) for name in theirs),
    }
