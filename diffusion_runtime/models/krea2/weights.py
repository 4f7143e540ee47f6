"""Weight map: the tensors of a diffusers Krea 2 checkpoint that make up each of ours, and names in LoRA files."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from diffusion_runtime.models.krea2.config import BlockSizes, Krea2TransformerConfig
from diffusion_runtime.weights.checkpoint import Piece
from diffusion_runtime.weights.lora.names import LoraNames, Originals, block_names
from diffusion_runtime.weights.pieces import NamedPieces, linear_pieces, two_layer_pieces


def is_norm(name: str) -> bool:
    """Return whether our parameter is the weight of a norm: in float32 in a model of any dtype, as in training."""
    return "norm" in name.split(".")[-2:][0]


def add_one(module: nn.Module, name: str, values: torch.Tensor) -> None:  # noqa: ARG001 - an Arrange
    """Add 1 to the weight of a norm: files have it without."""
    if is_norm(name):
        values.add_(1.0)


def transformer_pieces(config: Krea2TransformerConfig) -> dict[str, tuple[Piece, ...]]:
    """Return our parameter name -> the checkpoint tensors that fill it, one after the other."""
    return dict(_all_pieces(config))


def _all_pieces(config: Krea2TransformerConfig) -> Iterator[NamedPieces]:
    dim, text_dim = config.dim, config.text.dim
    text = {"text_layers": ("layerwise_blocks", config.num_layer_blocks)}
    text["text_refiner"] = ("refiner_blocks", config.num_refiner_blocks)
    for ours, (theirs, count) in text.items():
        for index in range(count):
            yield from _block(f"{ours}.{index}", f"text_fusion.{theirs}.{index}", config.text)
    yield from linear_pieces("text_mix", [("text_fusion.projector", 1)], config.num_text_layers, bias=False)
    yield "text_norm.weight", (Piece("txt_in.norm.weight", (text_dim,)),)
    yield from two_layer_pieces("text_embedding", "txt_in", text_dim, dim)
    yield from linear_pieces("patch_embedding", [("img_in", dim)], config.patch_channels)
    yield from two_layer_pieces("timestep_embedding", "time_embed", config.num_waves, dim)
    yield from linear_pieces("time_projection", [("time_mod_proj", 6 * dim)], dim)
    for index in range(config.num_layers):
        theirs = f"transformer_blocks.{index}"
        yield f"blocks.{index}.table", (Piece(f"{theirs}.scale_shift_table", (6, dim)),)
        yield from _block(f"blocks.{index}", theirs, config.joint)
    yield "out_table", (Piece("final_layer.scale_shift_table", (2, dim)),)
    yield "out_norm.weight", (Piece("final_layer.norm.weight", (dim,)),)
    yield from linear_pieces("out", [("final_layer.linear", config.patch_channels)], dim)


def _block(ours: str, theirs: str, sizes: BlockSizes) -> Iterator[NamedPieces]:
    dim, attention = sizes.dim, f"{ours}.self_attention"
    widths = {"to_q": dim, "to_k": sizes.kv_dim, "to_v": sizes.kv_dim, "to_gate": dim}
    inward = [(f"{theirs}.attn.{name}", width) for name, width in widths.items()]
    yield from linear_pieces(f"{attention}.qkv_gate", inward, dim, bias=False)
    for name in ("norm_q", "norm_k"):
        yield f"{attention}.{name}.weight", (Piece(f"{theirs}.attn.{name}.weight", (sizes.head_dim,)),)
    yield from linear_pieces(f"{attention}.out", [(f"{theirs}.attn.to_out.0", dim)], dim, bias=False)
    for mine, name in {"attention_norm": "norm1", "ffn_norm": "norm2"}.items():
        yield f"{ours}.{mine}.weight", (Piece(f"{theirs}.{name}.weight", (dim,)),)
    up = [(f"{theirs}.ff.{name}", sizes.ffn_dim) for name in ("gate", "up")]
    yield from linear_pieces(f"{ours}.feed_forward.up", up, dim, bias=False)
    yield from linear_pieces(f"{ours}.feed_forward.down", [(f"{theirs}.ff.down", dim)], sizes.ffn_dim, bias=False)


_BLOCK: Originals = {
    "attn.wq": "attn.to_q",
    "attn.wk": "attn.to_k",
    "attn.wv": "attn.to_v",
    "attn.wo": "attn.to_out.0",
    "attn.gate": "attn.to_gate",
    "attn.qknorm.qnorm": "attn.norm_q",
    "attn.qknorm.knorm": "attn.norm_k",
    "prenorm": "norm1",
    "postnorm": "norm2",
    **{f"mlp.{name}": f"ff.{name}" for name in ("gate", "up", "down")},
}
LORA_NAMES = LoraNames(
    title="Krea 2",
    originals={
        **block_names("blocks.{}", "transformer_blocks.{}", {**_BLOCK, "mod.lin": "scale_shift_table"}),
        **block_names("txtfusion.layerwise_blocks.{}", "text_fusion.layerwise_blocks.{}", _BLOCK),
        **block_names("txtfusion.refiner_blocks.{}", "text_fusion.refiner_blocks.{}", _BLOCK),
        "txtfusion.projector": "text_fusion.projector",
        "txtmlp.0": "txt_in.norm",
        "txtmlp.1": "txt_in.linear_1",
        "txtmlp.3": "txt_in.linear_2",
        "first": "img_in",
        "tmlp.0": "time_embed.linear_1",
        "tmlp.2": "time_embed.linear_2",
        "tproj.1": "time_mod_proj",
        "last.linear": "final_layer.linear",
        "last.norm": "final_layer.norm",
        "last.modulation.lin": "final_layer.scale_shift_table",
    },
    widths=frozenset({6144}),
    num_blocks=frozenset({28}),
)
