"""Weight map: the tensors of a HunyuanVideo-1.5 checkpoint that make up each of ours, and names in LoRA files."""

from __future__ import annotations

import math
from collections.abc import Iterator

from diffusion_runtime.models.hunyuan_video_15.config import HunyuanVideo15Config
from diffusion_runtime.weights.checkpoint import Piece
from diffusion_runtime.weights.lora.names import LoraNames, block_names, swapped_halves
from diffusion_runtime.weights.lora.stream_names import TOKEN_REFINER, VIDEO_DOUBLE_STREAM, embedder_names
from diffusion_runtime.weights.pieces import (
    NamedPieces,
    StreamNames,
    double_stream_pieces,
    layer_norm_pieces,
    linear_pieces,
    token_refiner_pieces,
    two_layer_pieces,
)

# Channels of the sinusoidal timestep.
NUM_WAVES = 256
# Width of the network that maps the tokens of text to write to the transformer's width.
GLYPH_HIDDEN_DIM = 2048

# Layer norms with weights: small, and computed in float32.
FLOAT32 = ("*.norm.*", "*.feed_forward_norm.*", "*.norm_in.*", "*.norm_out.*")


def transformer_pieces(config: HunyuanVideo15Config) -> Iterator[NamedPieces]:
    """Yield our parameter names, and the checkpoint tensors that fill each, one after the other."""
    dim = config.dim
    patch = (Piece("x_embedder.proj.weight", (dim, config.num_input_channels, *config.patch)),)
    yield "patch_embedding.projection.weight", patch
    yield "patch_embedding.projection.bias", (Piece("x_embedder.proj.bias", (dim,)),)
    yield from two_layer_pieces("conditioning.timestep", "time_embed.timestep_embedder", NUM_WAVES, dim)
    if config.takes_next_timestep:
        yield from two_layer_pieces("conditioning.next_timestep", "time_embed.timestep_embedder_r", NUM_WAVES, dim)
    yield from _text(config)
    sizes = (dim, config.head_dim, config.ffn_dim)
    for index in range(config.num_layers):
        yield from double_stream_pieces(f"blocks.{index}", f"transformer_blocks.{index}", *sizes, StreamNames())
    yield from linear_pieces("out_modulation.projection", [("norm_out.linear", 2 * dim)], dim)
    yield from linear_pieces("out", [("proj_out", config.num_channels * math.prod(config.patch))], dim)


def _text(config: HunyuanVideo15Config) -> Iterator[NamedPieces]:
    """Yield the pieces that map text and image to the transformer's width."""
    dim, hidden = config.dim, GLYPH_HIDDEN_DIM
    yield "text.kinds", (Piece("cond_type_embed.weight", (3, dim)),)
    yield from token_refiner_pieces(
        "text.refiner", "context_embedder", dim, config.text_dim, config.num_refiner_layers, NUM_WAVES
    )
    yield from layer_norm_pieces("text.glyphs.norm", "context_embedder_2.norm", config.glyph_dim)
    for ours, theirs, in_dim, out_dim in (
        ("up", "linear_1", config.glyph_dim, hidden),
        ("middle", "linear_2", hidden, hidden),
        ("down", "linear_3", hidden, dim),
    ):
        yield from linear_pieces(f"text.glyphs.{ours}", [(f"context_embedder_2.{theirs}", out_dim)], in_dim)
    yield from layer_norm_pieces("text.image.norm_in", "image_embedder.norm_in", config.image_dim)
    yield from linear_pieces("text.image.up", [("image_embedder.linear_1", config.image_dim)], config.image_dim)
    yield from linear_pieces("text.image.down", [("image_embedder.linear_2", dim)], config.image_dim)
    yield from layer_norm_pieces("text.image.norm_out", "image_embedder.norm_out", dim)


_IMAGE = {"proj.0": "norm_in", "proj.1": "linear_1", "proj.3": "linear_2", "proj.4": "norm_out"}

LORA_NAMES = LoraNames(
    title="HunyuanVideo-1.5",
    originals={
        **block_names(
            "double_blocks.{}",
            "transformer_blocks.{}",
            {
                **VIDEO_DOUBLE_STREAM,
                **{f"img_attn_{part}": f"attn.to_{part}" for part in "qkv"},
                **{f"txt_attn_{part}": f"attn.add_{part}_proj" for part in "qkv"},
            },
        ),
        **TOKEN_REFINER,
        "byt5_in.layernorm": "context_embedder_2.norm",
        **{f"byt5_in.fc{index}": f"context_embedder_2.linear_{index}" for index in (1, 2, 3)},
        **{f"vision_in.{name}": f"image_embedder.{part}" for name, part in _IMAGE.items()},
        "img_in.proj": "x_embedder.proj",
        "cond_type_embedding": "cond_type_embed",
        **embedder_names("time_in", "time_embed.timestep_embedder"),
        "final_layer.linear": "proj_out",
        "final_layer.adaLN_modulation.1": swapped_halves("norm_out.linear"),
    },
    widths=frozenset({2048}),
    num_blocks=frozenset({54}),
)
