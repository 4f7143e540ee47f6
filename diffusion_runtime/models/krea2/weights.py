"""Weight map: the tensors of a diffusers Krea 2 checkpoint that make up each of ours, and names in LoRA files."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator

import torch
from torch import nn

from diffusion_runtime.models.krea2.config import BlockSizes, Krea2TransformerConfig
from diffusion_runtime.weights.checkpoint import Piece
from diffusion_runtime.weights.lora.names import LoraNames, Originals, block_names
from diffusion_runtime.weights.pieces import NamedPieces, linear_pieces, two_layer_pieces, up_down_pieces

# Weights of norms, as in training.
FLOAT32 = ("*norm*.weight",)


def add_one(module: nn.Module, name: str, values: torch.Tensor) -> None:  # noqa: ARG001 - an Arrange
    """Add 1 to the weight of a norm: files have it without."""
    if fnmatch.fnmatchcase(name, *FLOAT32):
        values.add_(1.0)


def transformer_pieces(config: Krea2TransformerConfig) -> Iterator[NamedPieces]:
    """Yield our parameter names, and the checkpoint tensors that fill each, one after the other."""
    dim, text = config.joint.dim, config.text
    yield from _blocks("text_layers", "text_fusion.layerwise_blocks", config.num_layer_blocks, text)
    yield from linear_pieces("text_mix", [("text_fusion.projector", 1)], config.num_text_layers, bias=False)
    yield from _blocks("text_refiner", "text_fusion.refiner_blocks", config.num_refiner_blocks, text)
    yield from two_layer_pieces("text_embedding", "txt_in", text.dim, dim)
    yield from linear_pieces("patch_embedding", [("img_in", dim)], config.patch_channels)
    yield from two_layer_pieces("timestep_embedding", "time_embed", config.num_waves, dim)
    yield from linear_pieces("time_projection", [("time_mod_proj", 6 * dim)], dim)
    yield from _blocks("blocks", "transformer_blocks", config.num_layers, config.joint)
    for index in range(config.num_layers):
        yield f"blocks.{index}.table", (Piece(f"transformer_blocks.{index}.scale_shift_table", (6, dim)),)
    yield "out_table", (Piece("final_layer.scale_shift_table", (2, dim)),)
    yield from linear_pieces("out", [("final_layer.linear", config.patch_channels)], dim)
    for ours, (theirs, width) in {"text_norm": ("txt_in", text.dim), "out_norm": ("final_layer", dim)}.items():
        yield f"{ours}.weight", (Piece(f"{theirs}.norm.weight", (width,)),)


def _blocks(ours: str, theirs: str, count: int, sizes: BlockSizes) -> Iterator[NamedPieces]:
    dim, ffn_dim = sizes.dim, sizes.ffn_dim
    widths = {"to_q": dim, "to_k": sizes.kv_dim, "to_v": sizes.kv_dim, "to_gate": dim}
    norms = {"self_attention.norm_q": ("attn.norm_q", sizes.head_dim), "attention_norm": ("norm1", dim)}
    norms |= {"self_attention.norm_k": ("attn.norm_k", sizes.head_dim), "ffn_norm": ("norm2", dim)}
    for mine, block in ((f"{ours}.{index}", f"{theirs}.{index}") for index in range(count)):
        inward = [(f"{block}.attn.{name}", width) for name, width in widths.items()]
        yield from linear_pieces(f"{mine}.self_attention.qkv_gate", inward, dim, bias=False)
        yield from linear_pieces(f"{mine}.self_attention.out", [(f"{block}.attn.to_out.0", dim)], dim, bias=False)
        up = [(f"{block}.ff.{name}", ffn_dim) for name in ("gate", "up")]
        yield from up_down_pieces(f"{mine}.feed_forward", up, f"{block}.ff.down", dim, ffn_dim, bias=False)
        for norm, (name, width) in norms.items():
            yield f"{mine}.{norm}.weight", (Piece(f"{block}.{name}.weight", (width,)),)


_BLOCK: Originals = {
    **{"attn.wq": "attn.to_q", "attn.wk": "attn.to_k", "attn.wv": "attn.to_v", "attn.wo": "attn.to_out.0"},
    **{"attn.gate": "attn.to_gate", "attn.qknorm.qnorm": "attn.norm_q", "attn.qknorm.knorm": "attn.norm_k"},
    **{"prenorm": "norm1", "postnorm": "norm2", "mlp.gate": "ff.gate", "mlp.up": "ff.up", "mlp.down": "ff.down"},
}
LORA_NAMES = LoraNames(
    title="Krea 2",
    originals={
        **block_names("blocks.{}", "transformer_blocks.{}", {**_BLOCK, "mod.lin": "scale_shift_table"}),
        **block_names("txtfusion.layerwise_blocks.{}", "text_fusion.layerwise_blocks.{}", _BLOCK),
        **block_names("txtfusion.refiner_blocks.{}", "text_fusion.refiner_blocks.{}", _BLOCK),
        **{"txtfusion.projector": "text_fusion.projector", "first": "img_in", "tproj.1": "time_mod_proj"},
        **{"txtmlp.0": "txt_in.norm", "txtmlp.1": "txt_in.linear_1", "txtmlp.3": "txt_in.linear_2"},
        **{"tmlp.0": "time_embed.linear_1", "tmlp.2": "time_embed.linear_2", "last.linear": "final_layer.linear"},
        **{"last.norm": "final_layer.norm", "last.modulation.lin": "final_layer.scale_shift_table"},
    },
    widths=frozenset({6144}),
    num_blocks=frozenset({28}),
)
