"""Module names in LoRA files of HunyuanVideo-1.5: the authors' names, ComfyUI's, and diffusers'."""

from __future__ import annotations

from diffusion_runtime.weights.lora.names import LoraNames, block_names, swapped_halves
from diffusion_runtime.weights.lora.stream_names import TOKEN_REFINER, VIDEO_DOUBLE_STREAM, embedder_names

_IMAGE = {"proj.0": "norm_in", "proj.1": "linear_1", "proj.3": "linear_2", "proj.4": "norm_out"}

LORA_NAMES = LoraNames(
    title="HunyuanVideo-1.5",
    originals={
        **block_names(
            "double_blocks.{}",
            "transformer_blocks.{}",
            {
                **VIDEO_DOUBLE_STREAM,
                **{f"img_attn_{part}": f"attn.to_{part}" for part in "qkv"},
                **{f"txt_attn_{part}": f"attn.add_{part}_proj" for part in "qkv"},
            },
        ),
        **TOKEN_REFINER,
        "byt5_in.layernorm": "context_embedder_2.norm",
        **{f"byt5_in.fc{index}": f"context_embedder_2.linear_{index}" for index in (1, 2, 3)},
        **{f"vision_in.{name}": f"image_embedder.{part}" for name, part in _IMAGE.items()},
        "img_in.proj": "x_embedder.proj",
        "cond_type_embedding": "cond_type_embed",
        **embedder_names("time_in", "time_embed.timestep_embedder"),
        "final_layer.linear": "proj_out",
        "final_layer.adaLN_modulation.1": swapped_halves("norm_out.linear"),
    },
    widths=frozenset({2048}),
    num_blocks=frozenset({54}),
)
