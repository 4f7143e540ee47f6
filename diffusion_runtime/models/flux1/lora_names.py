"""Module names in LoRA files of FLUX.1: the names of the authors, of XLabs' trainer, and diffusers'."""

from __future__ import annotations

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
