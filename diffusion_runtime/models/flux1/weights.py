"""Weight map: the tensors of a diffusers FLUX.1 checkpoint that make up each of ours, and names in LoRA files."""

from __future__ import annotations

from collections.abc import Iterator

from diffusion_runtime.models.flux1.config import Flux1TransformerConfig
from diffusion_runtime.weights.lora.names import LoraNames, Originals, block_names, swapped_halves
from diffusion_runtime.weights.lora.stream_names import (
    DOUBLE_STREAM_ATTENTION,
    DOUBLE_STREAM_FEED_FORWARD,
    DOUBLE_STREAM_MODULATION,
    QKV,
    SINGLE_STREAM,
    TEXT_QKV,
    embedder_names,
)
from diffusion_runtime.weights.pieces import (
    NamedPieces,
    StreamNames,
    double_stream_pieces,
    linear_pieces,
    single_stream_pieces,
    two_layer_pieces,
)


def transformer_pieces(config: Flux1TransformerConfig) -> Iterator[NamedPieces]:
    """Yield our parameter names, and the checkpoint tensors that fill each, one after the other."""
    dim = config.dim
    yield from linear_pieces("patch_embedding.projection", [("x_embedder", dim)], config.input_channels)
    yield from linear_pieces("text_embedding", [("context_embedder", dim)], config.text_dim)
    embedders = [("timestep", "timestep_embedder", config.num_waves)]
    if config.pooled_dim is not None:
        embedders.append(("pooled", "text_embedder", config.pooled_dim))
    if config.embeds_guidance:
        embedders.append(("guidance", "guidance_embedder", config.num_waves))
    for ours, theirs, in_dim in embedders:
        yield from two_layer_pieces(f"condition_embedding.{ours}", f"time_text_embed.{theirs}", in_dim, dim)
    for index in range(config.num_double_layers):
        names = f"double_blocks.{index}", f"transformer_blocks.{index}"
        yield from double_stream_pieces(*names, dim, config.head_dim, config.ffn_dim, StreamNames())
    for index in range(config.num_single_layers):
        names = f"single_blocks.{index}", f"single_transformer_blocks.{index}"
        yield from single_stream_pieces(*names, dim, config.head_dim, config.ffn_dim)
    yield from linear_pieces("out_modulation.projection", [("norm_out.linear", 2 * dim)], dim)
    yield from linear_pieces("out", [("proj_out", config.patch_channels)], dim)


# Names of XLabs' trainer for the processors of attention.
_XLABS_DOUBLE: Originals = {
    "processor.qkv_lora1": QKV,
    "processor.qkv_lora2": TEXT_QKV,
    "processor.proj_lora1": "attn.to_out.0",
    "processor.proj_lora2": "attn.to_add_out",
}
_XLABS_SINGLE: Originals = {"processor.qkv_lora": QKV, "processor.proj_lora": "proj_out"}
_GUIDANCE = "time_text_embed.guidance_embedder"

LORA_NAMES = LoraNames(
    title="FLUX.1",
    originals={
        **block_names(
            "double_blocks.{}",
            "transformer_blocks.{}",
            {**DOUBLE_STREAM_ATTENTION, **DOUBLE_STREAM_FEED_FORWARD, **DOUBLE_STREAM_MODULATION, **_XLABS_DOUBLE},
        ),
        **block_names("single_blocks.{}", "single_transformer_blocks.{}", {**SINGLE_STREAM, **_XLABS_SINGLE}),
        "img_in": "x_embedder",
        "txt_in": "context_embedder",
        **embedder_names("time_in", "time_text_embed.timestep_embedder"),
        **embedder_names("guidance_in", _GUIDANCE),
        **embedder_names("vector_in", "time_text_embed.text_embedder"),
        "final_layer.linear": "proj_out",
        "final_layer.adaLN_modulation.1": swapped_halves("norm_out.linear"),
    },
    resized={"x_embedder": "the image embedding of a model with other inputs (text, editing, Fill, Canny or Depth)"},
    absent={f"{_GUIDANCE}.linear_{index}": "the guidance embedding of FLUX.1 [dev]" for index in (1, 2)},
    widths=frozenset({3072}),
    num_blocks=frozenset({19, 38}),
)
