"""Weight map: the tensors of a diffusers HunyuanVideo checkpoint that make up each of ours, and names in LoRA files."""

from __future__ import annotations

import math
from collections.abc import Iterator

from diffusion_runtime.models.hunyuan_video.config import HunyuanVideoConfig
from diffusion_runtime.weights.checkpoint import Piece
from diffusion_runtime.weights.lora.names import LoraNames, block_names, swapped_halves
from diffusion_runtime.weights.lora.stream_names import (
    QKV,
    SINGLE_STREAM,
    TEXT_QKV,
    TOKEN_REFINER,
    VIDEO_DOUBLE_STREAM,
    embedder_names,
)
from diffusion_runtime.weights.pieces import (
    NamedPieces,
    StreamNames,
    double_stream_pieces,
    linear_pieces,
    single_stream_pieces,
    token_refiner_pieces,
    two_layer_pieces,
)

# Channels of the sinusoidal timestep and guidance.
NUM_WAVES = 256

# Layer norms with weights: small, and computed in float32.
FLOAT32 = ("*.norm.*", "*.feed_forward_norm.*")


def transformer_pieces(config: HunyuanVideoConfig) -> Iterator[NamedPieces]:
    """Yield our parameter names, and the checkpoint tensors that fill each, one after the other."""
    dim, num_channels = config.dim, config.num_channels
    embeddings = [("timestep", "timestep_embedder", NUM_WAVES), ("pooled", "text_embedder", config.pooled_dim)]
    if config.has_guidance:
        embeddings.append(("guidance", "guidance_embedder", NUM_WAVES))
    for ours, theirs, in_dim in embeddings:
        yield from two_layer_pieces(f"conditioning.{ours}", f"time_text_embed.{theirs}", in_dim, dim)
    patch = (Piece("x_embedder.proj.weight", (dim, config.num_input_channels, *config.patch)),)
    yield "patch_embedding.projection.weight", patch
    yield "patch_embedding.projection.bias", (Piece("x_embedder.proj.bias", (dim,)),)
    yield from token_refiner_pieces(
        "refiner", "context_embedder", dim, config.text_dim, config.num_refiner_layers, NUM_WAVES
    )
    sizes = (dim, config.head_dim, config.ffn_dim)
    for index in range(config.num_layers):
        yield from double_stream_pieces(f"blocks.{index}", f"transformer_blocks.{index}", *sizes, StreamNames())
    for index in range(config.num_single_layers):
        yield from single_stream_pieces(f"single_blocks.{index}", f"single_transformer_blocks.{index}", *sizes)
    yield from linear_pieces("out_modulation.projection", [("norm_out.linear", 2 * dim)], dim)
    yield from linear_pieces("out", [("proj_out", num_channels * math.prod(config.patch))], dim)


LORA_NAMES = LoraNames(
    title="HunyuanVideo",
    originals={
        **block_names(
            "double_blocks.{}",
            "transformer_blocks.{}",
            {**VIDEO_DOUBLE_STREAM, "img_attn_qkv": QKV, "txt_attn_qkv": TEXT_QKV},
        ),
        **block_names(
            "single_blocks.{}",
            "single_transformer_blocks.{}",
            {
                **SINGLE_STREAM,
                "modulation.linear": "norm.linear",
                "q_norm": "attn.norm_q",
                "k_norm": "attn.norm_k",
            },
        ),
        **TOKEN_REFINER,
        "img_in.proj": "x_embedder.proj",
        **embedder_names("time_in", "time_text_embed.timestep_embedder"),
        **embedder_names("guidance_in", "time_text_embed.guidance_embedder"),
        **embedder_names("vector_in", "time_text_embed.text_embedder"),
        "final_layer.linear": "proj_out",
        "final_layer.adaLN_modulation.1": swapped_halves("norm_out.linear"),
    },
    absent={
        f"time_text_embed.guidance_embedder.linear_{index}": "models that take the guidance scale as an input"
        for index in (1, 2)
    },
    resized={"x_embedder.proj": "the patch embedding of a model with other inputs (text to video, or image to video)"},
    widths=frozenset({3072}),
    num_blocks=frozenset({20, 40}),
)
