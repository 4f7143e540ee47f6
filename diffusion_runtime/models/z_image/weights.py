"""Weight map: the tensors of a diffusers Z-Image checkpoint that make up each of ours, and names in LoRA files."""

from __future__ import annotations

from collections.abc import Iterator

from diffusion_runtime.models.z_image.config import ZImageTransformerConfig
from diffusion_runtime.weights.checkpoint import Piece
from diffusion_runtime.weights.lora.names import LoraNames, Originals, block_names, each
from diffusion_runtime.weights.pieces import (
    NamedPieces,
    linear_pieces,
    norm_pieces,
    self_attention_pieces,
    up_down_pieces,
)

# The one patch size of the published models, as the checkpoint spells it.
_PATCH = "2-1"


def transformer_pieces(config: ZImageTransformerConfig) -> Iterator[NamedPieces]:
    """Yield our parameter names, and the checkpoint tensors that fill each, one after the other."""
    dim, narrow = config.dim, config.conditioning_dim
    yield from linear_pieces("patch_embedding", [(f"all_x_embedder.{_PATCH}", dim)], config.patch_channels)
    hidden = config.timestep_hidden_dim
    yield from linear_pieces("timestep_embedding.up", [("t_embedder.mlp.0", hidden)], config.num_waves)
    yield from linear_pieces("timestep_embedding.down", [("t_embedder.mlp.2", narrow)], hidden)
    yield from norm_pieces("text_norm", "cap_embedder.0", config.text_dim)
    yield from linear_pieces("text_embedding", [("cap_embedder.1", dim)], config.text_dim)
    yield "grid_filler", (Piece("x_pad_token", (1, dim)),)
    yield "text_filler", (Piece("cap_pad_token", (1, dim)),)
    for index in range(config.num_refiner_layers):
        yield from _block_pieces(f"text_refiner.{index}", f"context_refiner.{index}", config, is_modulated=False)
        yield from _block_pieces(f"grid_refiner.{index}", f"noise_refiner.{index}", config, is_modulated=True)
    for index in range(config.num_layers):
        yield from _block_pieces(f"blocks.{index}", f"layers.{index}", config, is_modulated=True)
    last = f"all_final_layer.{_PATCH}"
    yield from linear_pieces("out_modulation.projection", [(f"{last}.adaLN_modulation.1", dim)], narrow)
    yield from linear_pieces("out", [(f"{last}.linear", config.patch_channels)], dim)


def _block_pieces(
    ours: str, theirs: str, config: ZImageTransformerConfig, *, is_modulated: bool
) -> Iterator[NamedPieces]:
    dim = config.dim
    attention = f"{ours}.self_attention", f"{theirs}.attention"
    yield from self_attention_pieces(*attention, dim, dim, config.head_dim)
    norms = {
        "attention_norm": "attention_norm1",
        "attention_out_norm": "attention_norm2",
        "ffn_norm": "ffn_norm1",
        "ffn_out_norm": "ffn_norm2",
    }
    for mine, name in norms.items():
        yield from norm_pieces(f"{ours}.{mine}", f"{theirs}.{name}", dim)
    mine, name, ffn_dim = f"{ours}.feed_forward", f"{theirs}.feed_forward", config.ffn_dim
    up = [(f"{name}.{part}", ffn_dim) for part in ("w1", "w3")]
    yield from up_down_pieces(mine, up, f"{name}.w2", dim, ffn_dim, bias=False)
    if is_modulated:
        yield from linear_pieces(
            f"{ours}.modulation.projection", [(f"{theirs}.adaLN_modulation.0", 4 * dim)], config.conditioning_dim
        )


_BLOCKS = ("layers.{}", "noise_refiner.{}", "context_refiner.{}")
_SAME = (
    *(f"feed_forward.w{index}" for index in (1, 2, 3)),
    "attention_norm1",
    "attention_norm2",
    "ffn_norm1",
    "ffn_norm2",
    "adaLN_modulation.0",
)


_ATTENTION: Originals = {
    "attention.qkv": each("attention", ("to_q", "to_k", "to_v")),
    "attention.out": "attention.to_out.0",
    "attention.q_norm": "attention.norm_q",
    "attention.k_norm": "attention.norm_k",
}


LORA_NAMES = LoraNames(
    title="Z-Image",
    same=(
        *(template for name in _BLOCKS for template in each(name, _SAME)),
        "t_embedder.mlp.0",
        "t_embedder.mlp.2",
        "cap_embedder.0",
        "cap_embedder.1",
        "x_pad_token",
        "cap_pad_token",
    ),
    originals={
        **{theirs: ours for name in _BLOCKS for theirs, ours in block_names(name, name, _ATTENTION).items()},
        "x_embedder": "all_x_embedder.2-1",
        "final_layer.linear": "all_final_layer.2-1.linear",
        "final_layer.adaLN_modulation.1": "all_final_layer.2-1.adaLN_modulation.1",
    },
    widths=frozenset({3840}),
    num_blocks=frozenset({30}),
)
