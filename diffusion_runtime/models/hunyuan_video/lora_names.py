"""Module names in LoRA files of HunyuanVideo: the authors' names, ComfyUI's, and diffusers'."""

from __future__ import annotations

from diffusion_runtime.weights.lora.names import LoraNames, block_names, swapped_halves
from diffusion_runtime.weights.lora.stream_names import (
    QKV,
    SINGLE_STREAM,
    TEXT_QKV,
    TOKEN_REFINER,
    VIDEO_DOUBLE_STREAM,
    embedder_names,
)

LORA_NAMES = LoraNames(
    title="HunyuanVideo",
    originals={
        **block_names(
            "double_blocks.{}",
            "transformer_blocks.{}",
            {**VIDEO_DOUBLE_STREAM, "img_attn_qkv": QKV, "txt_attn_qkv": TEXT_QKV},
        ),
        **block_names(
            "single_blocks.{}",
            "single_transformer_blocks.{}",
            {
                **SINGLE_STREAM,
                "modulation.linear": "norm.linear",
                "q_norm": "attn.norm_q",
                "k_norm": "attn.norm_k",
            },
        ),
        **TOKEN_REFINER,
        "img_in.proj": "x_embedder.proj",
        **embedder_names("time_in", "time_text_embed.timestep_embedder"),
        **embedder_names("guidance_in", "time_text_embed.guidance_embedder"),
        **embedder_names("vector_in", "time_text_embed.text_embedder"),
        "final_layer.linear": "proj_out",
        "final_layer.adaLN_modulation.1": swapped_halves("norm_out.linear"),
    },
    absent={
        f"time_text_embed.guidance_embedder.linear_{index}": "models that take the guidance scale as an input"
        for index in (1, 2)
    },
    resized={"x_embedder.proj": "the patch embedding of a model with other inputs (text to video, or image to video)"},
    widths=frozenset({3072}),
    num_blocks=frozenset({20, 40}),
)
