"""Module names in LoRA files of LTX-2: the authors' names, and diffusers'."""

from __future__ import annotations

from diffusion_runtime.weights.lora.names import LoraNames, block_names, each

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
