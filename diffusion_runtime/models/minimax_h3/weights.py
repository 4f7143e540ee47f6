"""Weight map: the tensors of a diffusers MiniMax-H3 checkpoint that make up each of ours, and names in LoRA files.

Published checkpoints turn the channels of a head by halves of those that turn: channel i with channel i + 48 of 96.
Here neighbours turn together. The gate of a feed-forward network follows its features there and comes first here. Both
are put in order once, after loading.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from diffusion_runtime.models.minimax_h3.config import GATE, TIME_TABLE, MiniMaxH3Config
from diffusion_runtime.weights.checkpoint import Piece
from diffusion_runtime.weights.lora.names import LoraNames, Originals, Rows, block_names
from diffusion_runtime.weights.pieces import (
    NamedPieces,
    linear_pieces,
    norm_pieces,
    pair_halves,
    self_attention_pieces,
    turning_rows,
    up_down_pieces,
)

FLOAT32 = ("patch_embedding.*", "audio_embedding.*", "time_embedding.*", "out.*", "audio_out.*")


def transformer_pieces(config: MiniMaxH3Config) -> Iterator[NamedPieces]:
    """Yield our parameter names, and the checkpoint tensors that fill each, one after the other."""
    dim = config.dim
    yield from linear_pieces("patch_embedding", [("proj_in", dim)], config.patch_channels)
    yield from linear_pieces("audio_embedding", [("audio_proj_in", dim)], config.num_audio_channels)
    yield from linear_pieces("text_embedding", [("context_embedder", dim)], config.text_dim)
    hidden_dim, time_dim = config.time_hidden_dim, config.time_dim
    if config.table_size:
        yield "time_embedding.table", (Piece(TIME_TABLE, (config.table_size, time_dim)),)
    else:
        yield from linear_pieces("time_embedding.up", [("time_embedder.linear_1", hidden_dim)], config.num_waves)
        yield from linear_pieces("time_embedding.down", [("time_embedder.linear_2", time_dim)], hidden_dim)
    for index in range(config.num_refiner_layers):
        yield from _block(f"text_refiner.blocks.{index}", f"token_refiner.refiner_blocks.{index}", config)
    yield from norm_pieces("text_refiner.norm", "token_refiner.final_norm", dim)
    for index in range(config.num_layers):
        ours, theirs = f"blocks.{index}", f"transformer_blocks.{index}"
        modulation = [(f"{theirs}.adaln_proj.linear", 18 * dim)]
        yield from linear_pieces(f"{ours}.modulation.projection", modulation, config.time_dim)
        yield from _block(ours, theirs, config)
        gate = [(f"{theirs}.{GATE}", config.inner_dim)]
        yield from linear_pieces(f"{ours}.self_attention.gate", gate, dim, bias=False)
    yield from norm_pieces("out_norm", "norm_out.norm", dim)
    yield from linear_pieces("out_modulation.projection", [("norm_out.linear", 2 * dim)], config.time_dim)
    yield from linear_pieces("out", [("proj_out", config.patch_channels)], dim)
    yield from linear_pieces("audio_out", [("audio_proj_out", config.num_audio_channels)], dim)


def _block(ours: str, theirs: str, config: MiniMaxH3Config) -> Iterator[NamedPieces]:
    dim, inner_dim = config.dim, config.inner_dim
    attention = f"{ours}.self_attention"
    yield from norm_pieces(f"{ours}.attention_norm", f"{theirs}.norm1", dim)
    yield from self_attention_pieces(attention, f"{theirs}.attn", dim, inner_dim, config.head_dim)
    yield from norm_pieces(f"{ours}.ffn_norm", f"{theirs}.norm2", dim)
    up = [(f"{theirs}.ff.net.0.proj", 2 * config.ffn_dim)]
    yield from up_down_pieces(f"{ours}.feed_forward", up, f"{theirs}.ff.net.2", dim, config.ffn_dim, bias=False)


def arrange(transformer: nn.Module, name: str, rows: torch.Tensor) -> None:
    """Put the rows of parameter `name` in our order, in place: gate before features, and channels of q and k that turn
    together next to each other."""
    turning, config = turning_rows(name, rows), transformer.config
    assert isinstance(config, MiniMaxH3Config)
    if name.endswith(".feed_forward.up.weight"):
        rows.copy_(torch.cat(rows.chunk(2)[::-1]))
    elif turning is not None and name.startswith("blocks."):
        pair_halves(turning, config.head_dim, config.num_turned)


# The authors' names. Their files of one tensor for q, k and v have these one after the other, as every single file that
# is published; the shards of the hub alone interleave them by head.
def _originals(theirs: str, ours: str, *, is_refiner: bool = False) -> Originals:
    names: dict[str, str | tuple[str | Rows, ...]] = {
        "attn.qkv_proj": tuple(f"attn.{name}" for name in ("to_q", "to_k", "to_v")),
        "attn.out_proj": "attn.to_out.0",
        "attn.q_norm": "attn.norm_q",
        "attn.k_norm": "attn.norm_k",
        # Gate before features, which diffusers has the other way round.
        "mlp.fc1": (Rows(f"{ours}.ff.net.0.proj", 1, 2), Rows(f"{ours}.ff.net.0.proj", 0, 2)),
        "mlp.fc2": "ff.net.2",
        "norm1": "norm1",
        "norm2": "norm2",
    }
    if not is_refiner:
        names |= {"adaln_proj.linear": "adaln_proj.linear", GATE: GATE}
    return block_names(theirs, ours, names)


_MODULATION = "the modulation of a model with another input of it: whole, or pruned with a table of times"

LORA_NAMES = LoraNames(
    title="MiniMax-H3",
    originals={
        **_originals("blocks.{}", "transformer_blocks.{}"),
        **_originals("token_refiner.blocks.{}", "token_refiner.refiner_blocks.{}", is_refiner=True),
        "token_refiner.final_norm": "token_refiner.final_norm",
        "time_embedder.proj_in": "time_embedder.linear_1",
        "time_embedder.proj_out": "time_embedder.linear_2",
        "video_patch_proj": "proj_in",
        "audio_patch_proj": "audio_proj_in",
        "condition_proj": "context_embedder",
        "final_layer.norm": "norm_out.norm",
        "final_layer.adaln_proj.linear": "norm_out.linear",
        "final_layer.video_out": "proj_out",
        "final_layer.audio_out": "audio_proj_out",
    },
    # Of the published model 2688, of pruned files 16 or so.
    resized={"transformer_blocks.{}.adaln_proj.linear": _MODULATION, "norm_out.linear": _MODULATION},
    undecided=("attn.qkv_proj",),
    widths=frozenset({5376}),
    num_blocks=frozenset({50}),
)
