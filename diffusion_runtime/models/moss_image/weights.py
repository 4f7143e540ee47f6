"""Weight map: the tensors of a MOSS-Image checkpoint that make up each of ours, and names in LoRA files.

Published checkpoints turn the channels of a head by halves: channel i with channel i + head_dim / 2. Here neighbours
turn together, so that these channels of q and k move next to each other as they are read.
"""

from __future__ import annotations

from collections.abc import Iterator

from diffusion_runtime.models.moss_image.config import MossImageConfig
from diffusion_runtime.weights.lora.names import LoraNames, each
from diffusion_runtime.weights.pieces import (
    NamedPieces,
    linear_pieces,
    norm_pieces,
    up_down_pieces,
)


def transformer_pieces(config: MossImageConfig) -> Iterator[NamedPieces]:
    """Yield our parameter names, and the checkpoint tensors that fill each, one after the other."""
    dim, ffn_dim = config.dim, config.ffn_dim
    yield from linear_pieces("patch_embedding", [("video_embedder", dim)], config.num_channels)
    yield from linear_pieces("text_embedding", [("text_embedder.proj", dim)], config.text_dim)
    yield from linear_pieces("timestep_embedding.up", [("time_embedding.0", dim)], config.num_waves)
    yield from linear_pieces("timestep_embedding.down", [("time_embedding.2", dim)], dim)
    yield from linear_pieces("modulation", [("shared_block_modulation", 6 * dim)], dim)
    yield from linear_pieces("out_modulation", [("video_head_modulation", 2 * dim)], dim)
    for index in range(config.num_text_blocks):
        ours, theirs = f"text_blocks.{index}", f"text_embedder.blocks.{index}"
        yield from linear_pieces(f"{ours}.qkv", [(f"{theirs}.qkv", 3 * dim)], dim)
        yield from linear_pieces(f"{ours}.out", [(f"{theirs}.proj", dim)], dim)
        up = [(f"{theirs}.{name}", ffn_dim) for name in ("ffn_up", "ffn_gate")]
        yield from up_down_pieces(f"{ours}.feed_forward", up, f"{theirs}.ffn_down", dim, ffn_dim, bias=True)
        yield from _norms(ours, theirs, config)
    for index in range(config.num_layers):
        ours, theirs = f"blocks.{index}", f"layers.{index}"
        inward = [(f"{theirs}.proj.{name}", dim) for name in "qkv"]
        yield from linear_pieces(f"{ours}.qkv", inward, dim, bias=False)
        yield from linear_pieces(f"{ours}.out", [(f"{theirs}.proj.o", dim)], dim, bias=False)
        up = [(f"{theirs}.proj.ffn_up_gate", 2 * ffn_dim)]
        yield from up_down_pieces(f"{ours}.feed_forward", up, f"{theirs}.proj.ffn_down", dim, ffn_dim, bias=False)
        yield from _norms(ours, theirs, config)
    yield from norm_pieces("out_norm", "final_norm_video", dim)
    yield from linear_pieces("out", [("final_linear_video", config.num_channels)], dim, bias=False)


def _norms(ours: str, theirs: str, config: MossImageConfig) -> Iterator[NamedPieces]:
    sizes = {"norm": ("norm1", config.dim), "ffn_norm": ("norm2", config.dim)}
    sizes |= {"norm_q": ("q_norm", config.head_dim), "norm_k": ("k_norm", config.head_dim)}
    for mine, (name, size) in sizes.items():
        yield from norm_pieces(f"{ours}.{mine}", f"{theirs}.{name}", size)


_NORMS = ("norm1", "norm2", "q_norm", "k_norm")
# The authors' names alone: diffusers has no such class.
LORA_NAMES = LoraNames(
    title="MOSS-Image",
    same=(
        *each("layers.{}", (*(f"proj.{name}" for name in ("q", "k", "v", "o", "ffn_up_gate", "ffn_down")), *_NORMS)),
        *each("text_embedder.blocks.{}", ("qkv", "proj", "ffn_gate", "ffn_up", "ffn_down", *_NORMS)),
        *("video_embedder", "text_embedder.proj", "time_embedding.0", "time_embedding.2"),
        *("shared_block_modulation", "video_head_modulation", "final_norm_video", "final_linear_video"),
    ),
    widths=frozenset({3072}),
    num_blocks=frozenset({42}),
)
