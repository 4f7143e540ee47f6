"""Weight map: the tensors of a diffusers LTX-Video checkpoint that make up each of ours, and names in LoRA files.

Projections that read the same input are one tensor here: q, k, v of self-attention; k, v of cross-attention.
"""

from __future__ import annotations

from collections.abc import Iterator

from diffusion_runtime.models.ltx_video.config import LTXVideoConfig
from diffusion_runtime.models.ltx_video.transformer import NUM_WAVES
from diffusion_runtime.weights.checkpoint import Piece
from diffusion_runtime.weights.lora.names import LoraNames, block_names, each
from diffusion_runtime.weights.pieces import NamedPieces, feed_forward_pieces, linear_pieces, two_layer_pieces

# Rows that are added to float32 rows of the timestep.
FLOAT32 = ("*.modulation", "out_modulation")


def transformer_pieces(config: LTXVideoConfig) -> Iterator[NamedPieces]:
    """Yield our parameter names, and the checkpoint tensors that fill each, one after the other."""
    dim = config.dim
    yield from linear_pieces("embedding", [("proj_in", dim)], config.num_channels)
    yield from two_layer_pieces("text_embedding", "caption_projection", config.text_dim, dim)
    yield from two_layer_pieces("time.embedding", "time_embed.emb.timestep_embedder", NUM_WAVES, dim)
    yield from linear_pieces("time.projection", [("time_embed.linear", 6 * dim)], dim)
    yield "out_modulation", (Piece("scale_shift_table", (2, dim)),)
    yield from linear_pieces("out", [("proj_out", config.num_channels)], dim)
    for index in range(config.num_layers):
        ours, theirs = f"blocks.{index}", f"transformer_blocks.{index}"
        yield f"{ours}.modulation", (Piece(f"{theirs}.scale_shift_table", (6, dim)),)
        mine, name = f"{ours}.self_attention", f"{theirs}.attn1"
        yield from linear_pieces(f"{mine}.qkv", [(f"{name}.{part}", dim) for part in ("to_q", "to_k", "to_v")], dim)
        yield from _attention_rest(mine, name, dim)
        mine, name = f"{ours}.cross_attention", f"{theirs}.attn2"
        yield from linear_pieces(f"{mine}.q", [(f"{name}.to_q", dim)], dim)
        yield from linear_pieces(f"{mine}.kv", [(f"{name}.{part}", dim) for part in ("to_k", "to_v")], dim)
        yield from _attention_rest(mine, name, dim)
        yield from feed_forward_pieces(f"{ours}.feed_forward", f"{theirs}.ff", dim, config.ffn_dim)


def _attention_rest(ours: str, theirs: str, dim: int) -> Iterator[NamedPieces]:
    """Yield the norms of q and k, and the projection after attention."""
    for name in ("norm_q", "norm_k"):
        yield f"{ours}.{name}.weight", (Piece(f"{theirs}.{name}.weight", (dim,)),)
    yield from linear_pieces(f"{ours}.out", [(f"{theirs}.to_out.0", dim)], dim)


_ATTENTIONS = ("attn1", "attn2")
_PARTS = ("to_q", "to_k", "to_v", "to_out.0")

LORA_NAMES = LoraNames(
    title="LTX-Video",
    same=(
        *(f"transformer_blocks.{{}}.{name}.{part}" for name in _ATTENTIONS for part in _PARTS),
        *each("transformer_blocks.{}", ("ff.net.0.proj", "ff.net.2", "scale_shift_table")),
        *(f"caption_projection.linear_{index}" for index in (1, 2)),
        "scale_shift_table",
        "proj_out",
    ),
    originals={
        **block_names(
            "transformer_blocks.{}",
            "transformer_blocks.{}",
            {f"{name}.{part}_norm": f"{name}.norm_{part}" for name in _ATTENTIONS for part in ("q", "k")},
        ),
        "patchify_proj": "proj_in",
        **{
            f"adaln_single.{layer}": f"time_embed.{layer}"
            for layer in ("linear", "emb.timestep_embedder.linear_1", "emb.timestep_embedder.linear_2")
        },
    },
    widths=frozenset({2048, 4096}),
    num_blocks=frozenset({28, 48}),
)
