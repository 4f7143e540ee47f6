"""Module names in LoRA files of Qwen-Image 2.1: its authors and diffusers use the same names; ComfyUI has gate and up
projection in one, the gate's rows first."""

from __future__ import annotations

from diffusion_runtime.weights.lora.names import LoraNames, each

LORA_NAMES = LoraNames(
    title="Qwen-Image 2.1",
    same=(
        *each("transformer_blocks.{}.attn", ("to_q", "to_k", "to_v", "to_out.0", "norm_q", "norm_k")),
        *each("transformer_blocks.{}.img_mlp", ("proj", "gate_layer", "out")),
        "img_in",
        *each("txt_in", ("text_norm", "in_layer", "out_layer")),
        *each("time_text_embed.timestep_embedder", ("linear_1", "linear_2")),
        "modulation.1",
        "norm_out.linear",
        "proj_out",
    ),
    originals={
        "transformer_blocks.{}.img_mlp.gate_up": each("transformer_blocks.{}.img_mlp", ("gate_layer", "proj")),
    },
    widths=frozenset({4096}),
    num_blocks=frozenset({32}),
)
