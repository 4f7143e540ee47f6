"""Weight map: the tensors of a diffusers LTX-2 checkpoint that make up each of ours, and names in LoRA files.

Projections that read the same input are one tensor here: q, k, v of self-attention; k, v of every other one.

Published checkpoints turn the channels of a head by halves: channel i with channel i + head_dim / 2. Here neighbours
turn together, which is one complex multiplication. Attention does not care about the order of the channels as long as q
and k have the same, so the rows that make q and k are put in pairs once, after loading.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from diffusion_runtime.layers.across_heads_attention import AcrossHeadsCrossAttention, AcrossHeadsSelfAttention
from diffusion_runtime.models.ltx2.config import LTX2Config, StreamConfig
from diffusion_runtime.weights.checkpoint import Piece
from diffusion_runtime.weights.lora.names import LoraNames, block_names, each
from diffusion_runtime.weights.pieces import (
    NamedPieces,
    feed_forward_pieces,
    linear_pieces,
    pair_halves,
    turning_rows,
    two_layer_pieces,
)

# Channels of the sinusoidal timestep.
NUM_WAVES = 256

# The vector that marks tokens of keyframes, in a checkpoint.
KEYFRAME_MARKER = "keyframes_abs_pos_embedding"

# Rows that are added to float32 rows of the timestep.
FLOAT32 = ("*.modulation", "*.text_modulation", "*.exchange_modulation", "*out_modulation")


def transformer_pieces(config: LTX2Config) -> Iterator[NamedPieces]:
    """Yield our parameter names, and the checkpoint tensors that fill each, one after the other."""
    if config.marks_keyframes:
        yield "keyframe_marker", (Piece(KEYFRAME_MARKER, (1, config.video.dim)),)
    yield from _stream("video", "", config.video, config, between="video", gate="video_a2v")
    yield from _stream("audio", "audio_", config.audio, config, between="audio", gate="audio_v2a")
    for index in range(config.num_layers):
        ours, theirs = f"blocks.{index}", f"transformer_blocks.{index}"
        yield from _stream_block(f"{ours}.video", theirs, "", "video", config.video, config)
        yield from _stream_block(f"{ours}.audio", theirs, "audio_", "audio", config.audio, config)
        video, audio = config.video, config.audio
        for name, stream, other in (("audio_to_video", video, audio), ("video_to_audio", audio, video)):
            yield from _cross_attention(f"{ours}.{name}", f"{theirs}.{name}_attn", stream, other.dim, audio.dim)


def _stream(
    ours: str, prefix: str, stream: StreamConfig, config: LTX2Config, *, between: str, gate: str
) -> Iterator[NamedPieces]:
    """Yield the pieces of a Stream. prefix: of its names in the checkpoint; between, gate: in the exchange's names."""
    dim = stream.dim
    yield from linear_pieces(f"{ours}.embedding", [(f"{prefix}proj_in", dim)], stream.num_channels)
    if config.projects_text:
        yield from two_layer_pieces(f"{ours}.text_embedding", f"{prefix}caption_projection", stream.text_dim, dim)
    for name, theirs, num_rows in (
        ("time", f"{prefix}time_embed", config.num_rows),
        ("exchange", f"av_cross_attn_{between}_scale_shift", 4),
        ("exchange_gate", f"av_cross_attn_{gate}_gate", 1),
        *([("text_time", f"{prefix}prompt_adaln", 2)] if config.text_follows_time else ()),
    ):
        yield from two_layer_pieces(f"{ours}.{name}.embedding", f"{theirs}.emb.timestep_embedder", NUM_WAVES, dim)
        yield from linear_pieces(f"{ours}.{name}.projection", [(f"{theirs}.linear", num_rows * dim)], dim)
    yield f"{ours}.out_modulation", (Piece(f"{prefix}scale_shift_table", (2, dim)),)
    yield from linear_pieces(f"{ours}.out", [(f"{prefix}proj_out", stream.num_channels)], dim)


def _stream_block(
    ours: str, theirs: str, prefix: str, between: str, stream: StreamConfig, config: LTX2Config
) -> Iterator[NamedPieces]:
    """Yield the pieces of a StreamBlock."""
    dim = stream.dim
    yield f"{ours}.modulation", (Piece(f"{theirs}.{prefix}scale_shift_table", (config.num_rows, dim)),)
    if config.modulates_text:
        yield f"{ours}.text_modulation", (Piece(f"{theirs}.{prefix}prompt_scale_shift_table", (2, dim)),)
    table = f"{theirs}.{between}_a2v_cross_attn_scale_shift_table"
    yield f"{ours}.exchange_modulation", (Piece(table, (5, dim)),)
    mine, name = f"{ours}.self_attention", f"{theirs}.{prefix}attn1"
    yield from linear_pieces(f"{mine}.qkv", [(f"{name}.{part}", dim) for part in ("to_q", "to_k", "to_v")], dim)
    yield from _attention_rest(mine, name, stream, dim)
    yield from _cross_attention(f"{ours}.cross_attention", f"{theirs}.{prefix}attn2", stream, dim, dim)
    network = f"{theirs}.{prefix}ff"
    yield from feed_forward_pieces(f"{ours}.feed_forward", network, dim, stream.ffn_dim, bias=stream.has_ffn_bias)


def _cross_attention(
    ours: str, theirs: str, stream: StreamConfig, source_dim: int, inner_dim: int
) -> Iterator[NamedPieces]:
    """Yield the pieces of an AcrossHeadsCrossAttention. stream: that of the queries."""
    yield from linear_pieces(f"{ours}.q", [(f"{theirs}.to_q", inner_dim)], stream.dim)
    yield from linear_pieces(f"{ours}.kv", [(f"{theirs}.{part}", inner_dim) for part in ("to_k", "to_v")], source_dim)
    yield from _attention_rest(ours, theirs, stream, inner_dim)


def _attention_rest(ours: str, theirs: str, stream: StreamConfig, inner_dim: int) -> Iterator[NamedPieces]:
    """Yield norms of q and k, gates of the heads, and the projection after attention. stream: of the queries."""
    for name in ("norm_q", "norm_k"):
        yield f"{ours}.{name}.weight", (Piece(f"{theirs}.{name}.weight", (inner_dim,)),)
    if stream.has_gates:
        # The streams have equally many heads.
        yield from linear_pieces(f"{ours}.head_gate", [(f"{theirs}.to_gate_logits", stream.num_heads)], stream.dim)
    yield from linear_pieces(f"{ours}.out", [(f"{theirs}.to_out.0", stream.dim)], inner_dim)


def pair_channels(transformer: nn.Module, name: str, rows: torch.Tensor) -> None:
    """Make the channels of q and k that turn together adjacent, where parameter `name` makes any. rows: its values,
    changed in place."""
    turning = turning_rows(name, rows)
    # A text has no positions, so the attention over it turns nothing.
    if turning is None or ".cross_attention." in name:
        return
    attention = transformer.get_submodule(name.rsplit(".", 2)[0])
    assert isinstance(attention, AcrossHeadsSelfAttention | AcrossHeadsCrossAttention)
    pair_halves(turning, attention.norm_q.weight.shape[0] // attention.attention.num_heads)


_ATTENTIONS = ("attn1", "attn2", "audio_attn1", "audio_attn2", "audio_to_video_attn", "video_to_audio_attn")
_PARTS = ("to_q", "to_k", "to_v", "to_out.0", "to_gate_logits")
_EMBEDDERS = {
    "adaln_single": "time_embed",
    "audio_adaln_single": "audio_time_embed",
    "av_ca_video_scale_shift_adaln_single": "av_cross_attn_video_scale_shift",
    "av_ca_audio_scale_shift_adaln_single": "av_cross_attn_audio_scale_shift",
    "av_ca_a2v_gate_adaln_single": "av_cross_attn_video_a2v_gate",
    "av_ca_v2a_gate_adaln_single": "av_cross_attn_audio_v2a_gate",
    "prompt_adaln_single": "prompt_adaln",
    "audio_prompt_adaln_single": "audio_prompt_adaln",
}
_LAYERS = ("linear", "emb.timestep_embedder.linear_1", "emb.timestep_embedder.linear_2")

# Of diffusers' LTX2TextConnectors, between the text encoder and the transformer.
_CONNECTORS = LoraNames(
    title="LTX-2",
    originals={
        "text_embedding_projection.aggregate_embed": "text_proj_in",
        **{
            f"text_embedding_projection.{stream}_aggregate_embed": f"{stream}_text_proj_in"
            for stream in ("video", "audio")
        },
        **{
            name: target
            for stream in ("video", "audio")
            for name, target in block_names(
                f"{stream}_embeddings_connector.transformer_1d_blocks.{{}}",
                f"{stream}_connector.transformer_blocks.{{}}",
                {
                    **{f"attn1.{part}": f"attn1.{part}" for part in _PARTS},
                    **{f"ff.{part}": f"ff.{part}" for part in ("net.0.proj", "net.2")},
                },
            ).items()
        },
    },
)

LORA_NAMES = LoraNames(
    title="LTX-2",
    same=(
        *(f"transformer_blocks.{{}}.{name}.{part}" for name in _ATTENTIONS for part in _PARTS),
        *each(
            "transformer_blocks.{}", [f"{ff}.{part}" for ff in ("ff", "audio_ff") for part in ("net.0.proj", "net.2")]
        ),
        *each(
            "transformer_blocks.{}",
            [f"{of}{name}" for of in ("", "audio_") for name in ("scale_shift_table", "prompt_scale_shift_table")],
        ),
        *(f"{name}.linear_{index}" for name in ("caption_projection", "audio_caption_projection") for index in (1, 2)),
        "scale_shift_table",
        "audio_scale_shift_table",
        "proj_out",
        "audio_proj_out",
    ),
    originals={
        **block_names(
            "transformer_blocks.{}",
            "transformer_blocks.{}",
            {f"{name}.{part}_norm": f"{name}.norm_{part}" for name in _ATTENTIONS for part in ("q", "k")},
        ),
        **block_names(
            "transformer_blocks.{}",
            "transformer_blocks.{}",
            {f"scale_shift_table_a2v_ca_{of}": f"{of}_a2v_cross_attn_scale_shift_table" for of in ("video", "audio")},
        ),
        "patchify_proj": "proj_in",
        "audio_patchify_proj": "audio_proj_in",
        **{f"{name}.{layer}": f"{target}.{layer}" for name, target in _EMBEDDERS.items() for layer in _LAYERS},
    },
    components={"connectors": _CONNECTORS},
    widths=frozenset({2048, 4096}),
    num_blocks=frozenset({48}),
)
