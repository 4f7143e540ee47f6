"""Weight map: the tensors of a Qwen-Image 2.1 checkpoint that make up each of ours, and names in LoRA files."""

from __future__ import annotations

from collections.abc import Iterator

from diffusion_runtime.models.qwen_image_21.config import QwenImage21TransformerConfig
from diffusion_runtime.weights.checkpoint import Piece
from diffusion_runtime.weights.lora.names import LoraNames, each
from diffusion_runtime.weights.pieces import NamedPieces, linear_pieces, two_layer_pieces, up_down_pieces


def transformer_pieces(config: QwenImage21TransformerConfig) -> Iterator[NamedPieces]:
    """Yield our parameter names, and the checkpoint tensors that fill each, one after the other."""
    dim = config.dim
    yield "text_embedding.norm_offset", (Piece("txt_in.text_norm.weight", (config.text_dim,)),)
    widths = {
        "patch_embedding": ("img_in", dim, config.num_channels),
        "text_embedding.up": ("txt_in.in_layer", dim, config.text_dim),
        "text_embedding.down": ("txt_in.out_layer", dim, dim),
        "modulation.projection": ("modulation.1", 4 * dim, dim),
        "out_modulation": ("norm_out.linear", dim, dim),
        "out": ("proj_out", config.num_channels, dim),
    }
    for ours, (theirs, out_dim, in_dim) in widths.items():
        yield from linear_pieces(ours, [(theirs, out_dim)], in_dim, bias=False)
    timestep = "timestep_embedding", "time_text_embed.timestep_embedder"
    yield from two_layer_pieces(*timestep, config.num_waves, dim, bias=False)
    for index in range(config.num_layers):
        yield from _block(f"blocks.{index}", f"transformer_blocks.{index}", config)


def _block(ours: str, theirs: str, config: QwenImage21TransformerConfig) -> Iterator[NamedPieces]:
    dim, ffn_dim = config.dim, config.ffn_dim
    inward = [(f"{theirs}.attn.{name}", dim) for name in ("to_q", "to_k", "to_v")]
    yield from linear_pieces(f"{ours}.qkv", inward, dim, bias=False)
    for name in ("norm_q", "norm_k"):
        yield f"{ours}.{name}.weight", (Piece(f"{theirs}.attn.{name}.weight", (config.head_dim,)),)
    yield from linear_pieces(f"{ours}.out", [(f"{theirs}.attn.to_out.0", dim)], dim, bias=False)
    up = [(f"{theirs}.img_mlp.{name}", ffn_dim) for name in ("gate_layer", "proj")]
    yield from up_down_pieces(f"{ours}.feed_forward", up, f"{theirs}.img_mlp.out", dim, ffn_dim, bias=False)


LORA_NAMES = LoraNames(
    title="Qwen-Image 2.1",
    same=(
        *each("transformer_blocks.{}.attn", ("to_q", "to_k", "to_v", "to_out.0", "norm_q", "norm_k")),
        *each("transformer_blocks.{}.img_mlp", ("proj", "gate_layer", "out")),
        "img_in",
        *each("txt_in", ("text_norm", "in_layer", "out_layer")),
        *each("time_text_embed.timestep_embedder", ("linear_1", "linear_2")),
        "modulation.1",
        "norm_out.linear",
        "proj_out",
    ),
    originals={
        "transformer_blocks.{}.img_mlp.gate_up": each("transformer_blocks.{}.img_mlp", ("gate_layer", "proj")),
    },
    widths=frozenset({4096}),
    num_blocks=frozenset({32}),
)
