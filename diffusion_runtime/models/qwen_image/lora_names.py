"""Module names in LoRA files of Qwen-Image: its authors and diffusers use the same names."""

from __future__ import annotations

from diffusion_runtime.weights.lora.names import LoraNames, each

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
