"""Weight map: the tensors of a diffusers FLUX.1 checkpoint that make up each of ours."""

from __future__ import annotations

from diffusion_runtime.models.flux1.config import Flux1TransformerConfig
from diffusion_runtime.weights.checkpoint import Piece
from diffusion_runtime.weights.pieces import (
    StreamNames,
    double_stream_pieces,
    linear_pieces,
    single_stream_pieces,
    two_layer_pieces,
)


def transformer_pieces(config: Flux1TransformerConfig) -> dict[str, tuple[Piece, ...]]:
    """Return our parameter name -> the checkpoint tensors that fill it, one after the other."""
    dim = config.dim
    pieces: dict[str, tuple[Piece, ...]] = {}
    pieces.update(linear_pieces("patch_embedding.projection", [("x_embedder", dim)], config.input_channels))
    pieces.update(linear_pieces("text_embedding", [("context_embedder", dim)], config.text_dim))
    embedders = [("timestep", "timestep_embedder", config.num_waves), ("pooled", "text_embedder", config.pooled_dim)]
    if config.embeds_guidance:
        embedders.append(("guidance", "guidance_embedder", config.num_waves))
    for ours, theirs, in_dim in embedders:
        pieces.update(two_layer_pieces(f"condition_embedding.{ours}", f"time_text_embed.{theirs}", in_dim, dim))
    for index in range(config.num_double_layers):
        names = f"double_blocks.{index}", f"transformer_blocks.{index}"
        pieces.update(double_stream_pieces(*names, dim, config.head_dim, config.ffn_dim, StreamNames()))
    for index in range(config.num_single_layers):
        names = f"single_blocks.{index}", f"single_transformer_blocks.{index}"
        pieces.update(single_stream_pieces(*names, dim, config.head_dim, config.ffn_dim))
    pieces.update(linear_pieces("out_modulation.projection", [("norm_out.linear", 2 * dim)], dim))
    pieces.update(linear_pieces("out", [("proj_out", config.patch_channels)], dim))
    return pieces
