"""Weight map: the tensors of a diffusers Wan checkpoint that make up each of ours, and names in LoRA files.

Projections that read the same input are one tensor here (q, k, v of self-attention; k, v of cross-attention), and the
patch convolution is a linear map of the same numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from diffusion_runtime.models.wan.config import GATE, WanTransformerConfig
from diffusion_runtime.models.wan.flow_map import embedding_pieces
from diffusion_runtime.weights.checkpoint import Piece
from diffusion_runtime.weights.lora.names import LoraNames, block_names
from diffusion_runtime.weights.pieces import (
    NamedPieces,
    convolution_pieces,
    feed_forward_pieces,
    layer_norm_pieces,
    linear_pieces,
    norm_pieces,
    two_layer_pieces,
)

# Left over in some published checkpoints, and read by nothing.
IGNORED_SUFFIXES = ("norm_added_q.weight",)

FLOAT32 = (
    *("time_embedding.*", "out_modulation", "*.modulation", "*.cross_norm.*"),
    *("image_embedding.norm_in.*", "image_embedding.norm_out.*"),
)


def transformer_pieces(config: WanTransformerConfig) -> Iterator[NamedPieces]:
    """Yield our parameter names, and the checkpoint tensors that fill each, one after the other."""
    dim = config.dim
    kernel = (config.in_channels, *config.patch)
    yield from convolution_pieces("patch_embedding.projection", "patch_embedding", dim, kernel)
    yield "out_modulation", (Piece("scale_shift_table", (1, 2, dim)),)
    if config.history is not None:
        kernel = (config.in_channels, *config.history.patch)
        yield from convolution_pieces("history_embedding.projection", "far_patch_embedding", dim, kernel)
    embedder = "condition_embedder"
    if config.flow_map is None:
        yield from two_layer_pieces("time_embedding", f"{embedder}.time_embedder", config.num_waves, dim)
    else:
        yield from embedding_pieces("time_embedding", embedder, config.num_waves, dim)
    yield from linear_pieces("time_projection", [(f"{embedder}.time_proj", 6 * dim)], dim)
    yield from two_layer_pieces("text_embedding", f"{embedder}.text_embedder", config.text_dim, dim)
    yield from linear_pieces("out", [("proj_out", config.patch_channels)], dim)
    yield from _image_embedding("image_embedding", f"{embedder}.image_embedder", config)
    for index in range(config.num_layers):
        yield from _block(f"blocks.{index}", f"blocks.{index}", config)
    yield from _control(config)


def _control(config: WanTransformerConfig) -> Iterator[NamedPieces]:
    """Yield the pieces of VACE. A control block is numbered there, and here a part of the block it adds to."""
    if not config.control_layers:
        return
    dim = config.dim
    kernel = (config.control_channels, *config.patch)
    yield from convolution_pieces("control_embedding.projection", "vace_patch_embedding", dim, kernel)
    yield from linear_pieces("control_in", [("vace_blocks.0.proj_in", dim)], dim)
    plain = dataclasses.replace(config, has_gate=False)
    for number, index in enumerate(config.control_layers):
        yield from _block(f"blocks.{index}.control", f"vace_blocks.{number}", plain)
        yield from linear_pieces(f"blocks.{index}.hint", [(f"vace_blocks.{number}.proj_out", dim)], dim)


def _image_embedding(ours: str, theirs: str, config: WanTransformerConfig) -> Iterator[NamedPieces]:
    image_dim = config.image_dim
    if image_dim is None:
        return
    yield from layer_norm_pieces(f"{ours}.norm_in", f"{theirs}.norm1", image_dim)
    yield from linear_pieces(f"{ours}.up", [(f"{theirs}.ff.net.0.proj", image_dim)], image_dim)
    yield from linear_pieces(f"{ours}.down", [(f"{theirs}.ff.net.2", config.dim)], image_dim)
    yield from layer_norm_pieces(f"{ours}.norm_out", f"{theirs}.norm2", config.dim)
    if config.num_placed_tokens is not None:
        yield f"{ours}.positions", (Piece(f"{theirs}.pos_embed", (1, config.num_placed_tokens, image_dim)),)


def _block(block: str, stored: str, config: WanTransformerConfig) -> Iterator[NamedPieces]:
    """Yield the pieces of a block. block: our name of it; stored: the checkpoint's."""
    dim = config.dim
    yield f"{block}.modulation", (Piece(f"{stored}.scale_shift_table", (1, 6, dim)),)
    ours, theirs = f"{block}.self_attention", f"{stored}.attn1"
    yield from linear_pieces(f"{ours}.qkv", [(f"{theirs}.{name}", dim) for name in ("to_q", "to_k", "to_v")], dim)
    yield from _attention_rest(ours, theirs, dim)
    if config.has_gate:
        yield from linear_pieces(f"{ours}.gate", [(f"{stored}.{GATE}", dim)], dim)
    ours, theirs = f"{block}.cross_attention", f"{stored}.attn2"
    yield from linear_pieces(f"{ours}.q", [(f"{theirs}.to_q", dim)], dim)
    yield from linear_pieces(f"{ours}.kv", [(f"{theirs}.to_k", dim), (f"{theirs}.to_v", dim)], dim)
    yield from _attention_rest(ours, theirs, dim)
    if config.image_dim is not None:
        added = [(f"{theirs}.add_k_proj", dim), (f"{theirs}.add_v_proj", dim)]
        yield from linear_pieces(f"{ours}.image.kv", added, dim)
        yield from norm_pieces(f"{ours}.image.norm_k", f"{theirs}.norm_added_k", dim)
    if config.norm_cross:
        yield from layer_norm_pieces(f"{block}.cross_norm", f"{stored}.norm2", dim)
    yield from feed_forward_pieces(f"{block}.feed_forward", f"{stored}.ffn", dim, config.ffn_dim)


def _attention_rest(ours: str, theirs: str, dim: int) -> Iterator[NamedPieces]:
    """Yield the norms of q and k, and the projection after attention."""
    for name in ("norm_q", "norm_k"):
        yield from norm_pieces(f"{ours}.{name}", f"{theirs}.{name}", dim)
    yield from linear_pieces(f"{ours}.out", [(f"{theirs}.to_out.0", dim)], dim)


PARTS = {"q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out.0", "norm_q": "norm_q", "norm_k": "norm_k"}
# A second cross-attention, over an image, only in Wan 2.1 I2V and FLF2V.
IMAGE_PARTS = {"k_img": "add_k_proj", "v_img": "add_v_proj", "norm_k_img": "norm_added_k"}
_IMAGE_EMBEDDER = {
    "img_emb.proj.0": "condition_embedder.image_embedder.norm1",
    "img_emb.proj.1": "condition_embedder.image_embedder.ff.net.0.proj",
    "img_emb.proj.3": "condition_embedder.image_embedder.ff.net.2",
    "img_emb.proj.4": "condition_embedder.image_embedder.norm2",
}
_IMAGE = "the image attention of Wan 2.1 I2V"
_CONTROL = "the control blocks of VACE"
_HISTORY = "the larger patches of AnyFlow-FAR's history"
_BLOCK = {
    **{f"self_attn.{name}": f"attn1.{part}" for name, part in PARTS.items()},
    **{f"cross_attn.{name}": f"attn2.{part}" for name, part in PARTS.items()},
    "norm3": "norm2",
    "ffn.0": "ffn.net.0.proj",
    "ffn.2": "ffn.net.2",
    "modulation": "scale_shift_table",
}
_CONTROL_BLOCK = {**_BLOCK, "before_proj": "proj_in", "after_proj": "proj_out"}

LORA_NAMES = LoraNames(
    title="Wan",
    originals={
        **block_names(
            "blocks.{}",
            "blocks.{}",
            {
                **_BLOCK,
                **{f"cross_attn.{name}": f"attn2.{part}" for name, part in IMAGE_PARTS.items()},
                f"self_attn.{GATE}": GATE,
            },
        ),
        **block_names("vace_blocks.{}", "vace_blocks.{}", _CONTROL_BLOCK),
        "patch_embedding": "patch_embedding",
        "vace_patch_embedding": "vace_patch_embedding",
        "far_patch_embedding": "far_patch_embedding",
        "time_embedding.0": "condition_embedder.time_embedder.linear_1",
        "time_embedding.2": "condition_embedder.time_embedder.linear_2",
        "time_projection.1": "condition_embedder.time_proj",
        "text_embedding.0": "condition_embedder.text_embedder.linear_1",
        "text_embedding.2": "condition_embedder.text_embedder.linear_2",
        "head.head": "proj_out",
        "head.modulation": "scale_shift_table",
        **_IMAGE_EMBEDDER,
    },
    absent={
        **{f"blocks.{{}}.attn2.{part}": _IMAGE for part in IMAGE_PARTS.values()},
        **dict.fromkeys(_IMAGE_EMBEDDER.values(), _IMAGE),
        **{f"vace_blocks.{{}}.{part}": _CONTROL for part in _CONTROL_BLOCK.values()},
        "vace_patch_embedding": _CONTROL,
        "far_patch_embedding": _HISTORY,
    },
    resized={"patch_embedding": "the patch embedding of a model with other inputs (text to video, or image to video)"},
    widths=frozenset({1536, 3072, 5120}),
    num_blocks=frozenset({30, 40}),
)
