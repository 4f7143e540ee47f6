"""Weight map: the tensors of a diffusers Qwen-Image checkpoint that make up each of ours, and names in LoRA files."""

from __future__ import annotations

from collections.abc import Iterator

from diffusion_runtime.models.qwen_image.config import QwenImageTransformerConfig
from diffusion_runtime.weights.lora.names import LoraNames, each
from diffusion_runtime.weights.pieces import (
    NamedPieces,
    StreamNames,
    double_stream_pieces,
    linear_pieces,
    norm_pieces,
    two_layer_pieces,
)

STREAMS = StreamNames("img_mod.1", "txt_mod.1", "img_mlp", "txt_mlp")


def embedding_pieces(config: QwenImageTransformerConfig) -> Iterator[NamedPieces]:
    """Yield the pieces of the layers before the blocks, of the transformer and of a ControlNet alike."""
    dim = config.dim
    yield from norm_pieces("text_norm", "txt_norm", config.text_dim)
    yield from linear_pieces("patch_embedding.projection", [("img_in", dim)], config.patch_channels)
    yield from linear_pieces("text_embedding", [("txt_in", dim)], config.text_dim)
    timestep = "timestep_embedding", "time_text_embed.timestep_embedder"
    yield from two_layer_pieces(*timestep, config.num_waves, dim)


def transformer_pieces(config: QwenImageTransformerConfig) -> Iterator[NamedPieces]:
    """Yield our parameter names, and the checkpoint tensors that fill each, one after the other."""
    dim = config.dim
    yield from embedding_pieces(config)
    for index in range(config.num_layers):
        names = f"blocks.{index}", f"transformer_blocks.{index}"
        yield from double_stream_pieces(*names, dim, config.head_dim, config.ffn_dim, STREAMS)
    yield from linear_pieces("out_modulation.projection", [("norm_out.linear", 2 * dim)], dim)
    yield from linear_pieces("out", [("proj_out", config.patch_channels)], dim)


_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
_NORMS = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")
_STREAMS = [f"{stream}_{part}" for stream in ("img", "txt") for part in ("mlp.net.0.proj", "mlp.net.2", "mod.1")]

LORA_NAMES = LoraNames(
    title="Qwen-Image",
    same=(
        *each("transformer_blocks.{}.attn", (*_ATTENTION, *_NORMS)),
        *each("transformer_blocks.{}", _STREAMS),
        "img_in",
        "txt_in",
        "txt_norm",
        *each("time_text_embed.timestep_embedder", ("linear_1", "linear_2")),
        "norm_out.linear",
        "proj_out",
    ),
    widths=frozenset({3072}),
    num_blocks=frozenset({60}),
)
