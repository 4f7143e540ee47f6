"""Which tensors of a diffusers checkpoint make up a text's way into the transformer: norms and the token refiner."""

from __future__ import annotations

from collections.abc import Iterator

from diffusion_runtime.layers.token_refiner import HIDDEN_RATIO
from diffusion_runtime.models.checkpoint import Piece
from diffusion_runtime.models.pieces import NamedPieces, feed_forward_pieces, linear_pieces, two_layer_pieces


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
