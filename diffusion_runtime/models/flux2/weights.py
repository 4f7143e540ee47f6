"""Weight map: the tensors of a diffusers FLUX.2 checkpoint that make up each of ours, and names in LoRA files."""

from __future__ import annotations

from collections.abc import Iterator

from diffusion_runtime.models.flux2.config import Flux2TransformerConfig
from diffusion_runtime.weights.checkpoint import Piece
from diffusion_runtime.weights.lora.names import LoraNames, Originals, block_names, swapped_halves
from diffusion_runtime.weights.lora.stream_names import DOUBLE_STREAM_ATTENTION, embedder_names
from diffusion_runtime.weights.pieces import (
    NamedPieces,
    joint_attention_pieces,
    linear_pieces,
    two_layer_pieces,
    up_down_pieces,
)


def transformer_pieces(config: Flux2TransformerConfig) -> Iterator[NamedPieces]:
    """Yield our parameter names, and the checkpoint tensors that fill each, one after the other."""
    dim = config.dim
    widths = {
        "patch_embedding": ("x_embedder", dim, config.num_channels),
        "text_embedding": ("context_embedder", dim, config.text_dim),
        "double_modulation.projection": ("double_stream_modulation_img.linear", 6 * dim, dim),
        "double_text_modulation.projection": ("double_stream_modulation_txt.linear", 6 * dim, dim),
        "single_modulation.projection": ("single_stream_modulation.linear", 3 * dim, dim),
        "out_modulation.projection": ("norm_out.linear", 2 * dim, dim),
        "out": ("proj_out", config.num_channels, dim),
    }
    for ours, (theirs, out_dim, in_dim) in widths.items():
        yield from linear_pieces(ours, [(theirs, out_dim)], in_dim, bias=False)
    for name in ("timestep", "guidance") if config.embeds_guidance else ("timestep",):
        names = f"condition_embedding.{name}", f"time_guidance_embed.{name}_embedder"
        yield from two_layer_pieces(*names, config.num_waves, dim, bias=False)
    for index in range(config.num_double_layers):
        yield from _double_block(f"double_blocks.{index}", f"transformer_blocks.{index}", config)
    for index in range(config.num_single_layers):
        yield from _single_block(f"single_blocks.{index}", f"single_transformer_blocks.{index}.attn", config)


def _double_block(ours: str, theirs: str, config: Flux2TransformerConfig) -> Iterator[NamedPieces]:
    dim, ffn_dim = config.dim, config.ffn_dim
    yield from joint_attention_pieces(f"{ours}.joint_attention", f"{theirs}.attn", dim, config.head_dim, bias=False)
    for mine, name in (("feed_forward", "ff"), ("text_feed_forward", "ff_context")):
        up, down = [(f"{theirs}.{name}.linear_in", 2 * ffn_dim)], f"{theirs}.{name}.linear_out"
        yield from up_down_pieces(f"{ours}.{mine}", up, down, dim, ffn_dim, bias=False)


def _single_block(ours: str, theirs: str, config: Flux2TransformerConfig) -> Iterator[NamedPieces]:
    dim, ffn_dim = config.dim, config.ffn_dim
    inward = [(f"{theirs}.to_qkv_mlp_proj", 3 * dim + 2 * ffn_dim)]
    yield from linear_pieces(f"{ours}.qkv_up", inward, dim, bias=False)
    for name in ("norm_q", "norm_k"):
        yield f"{ours}.{name}.weight", (Piece(f"{theirs}.{name}.weight", (config.head_dim,)),)
    yield from linear_pieces(f"{ours}.out", [(f"{theirs}.to_out", dim)], dim + ffn_dim, bias=False)


_MODULATIONS = ("double_stream_modulation_img", "double_stream_modulation_txt", "single_stream_modulation")
_GUIDANCE = "time_guidance_embed.guidance_embedder"
_FEED_FORWARD: Originals = {
    "img_mlp.0": "ff.linear_in",
    "img_mlp.2": "ff.linear_out",
    "txt_mlp.0": "ff_context.linear_in",
    "txt_mlp.2": "ff_context.linear_out",
}
# diffusers keeps q, k, v and both halves of the feed-forward network in one matrix, as the authors do.
_SINGLE: Originals = {
    "linear1": "to_qkv_mlp_proj",
    "linear2": "to_out",
    "norm.query_norm": "norm_q",
    "norm.key_norm": "norm_k",
}

LORA_NAMES = LoraNames(
    title="FLUX.2",
    originals={
        **block_names("double_blocks.{}", "transformer_blocks.{}", {**DOUBLE_STREAM_ATTENTION, **_FEED_FORWARD}),
        **block_names("single_blocks.{}", "single_transformer_blocks.{}.attn", _SINGLE),
        "img_in": "x_embedder",
        "txt_in": "context_embedder",
        **embedder_names("time_in", "time_guidance_embed.timestep_embedder"),
        **embedder_names("guidance_in", _GUIDANCE),
        **{f"{name}.lin": f"{name}.linear" for name in _MODULATIONS},
        "final_layer.linear": "proj_out",
        "final_layer.adaLN_modulation.1": swapped_halves("norm_out.linear"),
    },
    absent={f"{_GUIDANCE}.linear_{index}": "the guidance embedding of FLUX.2 [dev]" for index in (1, 2)},
    widths=frozenset({3072, 4096, 6144}),
    num_blocks=frozenset({20, 24, 48}),
)
