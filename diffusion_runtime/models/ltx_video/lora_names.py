"""Module names in LoRA files of LTX-Video: the authors' names, and diffusers'."""

from __future__ import annotations

from diffusion_runtime.weights.lora.names import LoraNames, block_names, each

_ATTENTIONS = ("attn1", "attn2")
_PARTS = ("to_q", "to_k", "to_v", "to_out.0")

LORA_NAMES = LoraNames(
    title="LTX-Video",
    same=(
        *(f"transformer_blocks.{{}}.{name}.{part}" for name in _ATTENTIONS for part in _PARTS),
        *each("transformer_blocks.{}", ("ff.net.0.proj", "ff.net.2", "scale_shift_table")),
        *(f"caption_projection.linear_{index}" for index in (1, 2)),
        "scale_shift_table",
        "proj_out",
    ),
    originals={
        **block_names(
            "transformer_blocks.{}",
            "transformer_blocks.{}",
            {f"{name}.{part}_norm": f"{name}.norm_{part}" for name in _ATTENTIONS for part in ("q", "k")},
        ),
        "patchify_proj": "proj_in",
        **{
            f"adaln_single.{layer}": f"time_embed.{layer}"
            for layer in ("linear", "emb.timestep_embedder.linear_1", "emb.timestep_embedder.linear_2")
        },
    },
    widths=frozenset({2048, 4096}),
    num_blocks=frozenset({28, 48}),
)
