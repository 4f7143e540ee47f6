"""Module names in LoRA files of FLUX.2: the authors' names, and diffusers'."""

from __future__ import annotations

from diffusion_runtime.weights.lora.names import LoraNames, Originals, block_names, swapped_halves
from diffusion_runtime.weights.lora.stream_names import DOUBLE_STREAM_ATTENTION, embedder_names

_MODULATIONS = ("double_stream_modulation_img", "double_stream_modulation_txt", "single_stream_modulation")
_GUIDANCE = "time_guidance_embed.guidance_embedder"
_FEED_FORWARD: Originals = {
    "img_mlp.0": "ff.linear_in",
    "img_mlp.2": "ff.linear_out",
    "txt_mlp.0": "ff_context.linear_in",
    "txt_mlp.2": "ff_context.linear_out",
}
# diffusers keeps q, k, v and both halves of the feed-forward network in one matrix, as the authors do.
_SINGLE: Originals = {
    "linear1": "to_qkv_mlp_proj",
    "linear2": "to_out",
    "norm.query_norm": "norm_q",
    "norm.key_norm": "norm_k",
}

LORA_NAMES = LoraNames(
    title="FLUX.2",
    originals={
        **block_names("double_blocks.{}", "transformer_blocks.{}", {**DOUBLE_STREAM_ATTENTION, **_FEED_FORWARD}),
        **block_names("single_blocks.{}", "single_transformer_blocks.{}.attn", _SINGLE),
        "img_in": "x_embedder",
        "txt_in": "context_embedder",
        **embedder_names("time_in", "time_guidance_embed.timestep_embedder"),
        **embedder_names("guidance_in", _GUIDANCE),
        **{f"{name}.lin": f"{name}.linear" for name in _MODULATIONS},
        "final_layer.linear": "proj_out",
        "final_layer.adaLN_modulation.1": swapped_halves("norm_out.linear"),
    },
    absent={f"{_GUIDANCE}.linear_{index}": "the guidance embedding of FLUX.2 [dev]" for index in (1, 2)},
    widths=frozenset({3072, 4096, 6144}),
    num_blocks=frozenset({20, 24, 48}),
)
