"""Authors' names of what several families share: double-stream and single-stream blocks, the token refiner."""

from __future__ import annotations

from diffusion_runtime.weights.lora.names import Originals, block_names

QKV = ("attn.to_q", "attn.to_k", "attn.to_v")
TEXT_QKV = ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")

# Attention of a double-stream block, in the files of its authors and of ComfyUI.
DOUBLE_STREAM_ATTENTION: Originals = {
    "img_attn.qkv": QKV,
    "txt_attn.qkv": TEXT_QKV,
    "img_attn.proj": "attn.to_out.0",
    "txt_attn.proj": "attn.to_add_out",
    "img_attn.norm.query_norm": "attn.norm_q",
    "img_attn.norm.key_norm": "attn.norm_k",
    "txt_attn.norm.query_norm": "attn.norm_added_q",
    "txt_attn.norm.key_norm": "attn.norm_added_k",
}

# The same where the stream is part of the name, as in `img_attn_qkv`; one file of ours uses either.
_JOINED_ATTENTION: Originals = {
    "img_attn_proj": "attn.to_out.0",
    "txt_attn_proj": "attn.to_add_out",
    "img_attn_q_norm": "attn.norm_q",
    "img_attn_k_norm": "attn.norm_k",
    "txt_attn_q_norm": "attn.norm_added_q",
    "txt_attn_k_norm": "attn.norm_added_k",
}

# Feed-forward networks, as ComfyUI and as the authors of video models number their layers.
DOUBLE_STREAM_FEED_FORWARD: Originals = {
    "img_mlp.0": "ff.net.0.proj",
    "img_mlp.2": "ff.net.2",
    "txt_mlp.0": "ff_context.net.0.proj",
    "txt_mlp.2": "ff_context.net.2",
}
_NAMED_FEED_FORWARD: Originals = {
    "img_mlp.fc1": "ff.net.0.proj",
    "img_mlp.fc2": "ff.net.2",
    "txt_mlp.fc1": "ff_context.net.0.proj",
    "txt_mlp.fc2": "ff_context.net.2",
}

DOUBLE_STREAM_MODULATION: Originals = {"img_mod.lin": "norm1.linear", "txt_mod.lin": "norm1_context.linear"}
_NAMED_MODULATION: Originals = {"img_mod.linear": "norm1.linear", "txt_mod.linear": "norm1_context.linear"}

# A double-stream block of a video model: names of the authors, and ComfyUI's.
VIDEO_DOUBLE_STREAM: Originals = {
    **DOUBLE_STREAM_ATTENTION,
    **_JOINED_ATTENTION,
    **DOUBLE_STREAM_FEED_FORWARD,
    **_NAMED_FEED_FORWARD,
    **DOUBLE_STREAM_MODULATION,
    **_NAMED_MODULATION,
}

SINGLE_STREAM: Originals = {
    "linear1": (*QKV, "proj_mlp"),
    "linear2": "proj_out",
    "modulation.lin": "norm.linear",
    "norm.query_norm": "attn.norm_q",
    "norm.key_norm": "attn.norm_k",
}

_TEXT = "context_embedder.time_text_embed"

# The way of a text into a video model, with the token refiner: layers are called alike or numbered.
TOKEN_REFINER: Originals = {
    **block_names(
        "txt_in.individual_token_refiner.blocks.{}",
        "context_embedder.token_refiner.refiner_blocks.{}",
        {
            "self_attn_qkv": QKV,
            "self_attn.qkv": QKV,
            "self_attn_proj": "attn.to_out.0",
            "self_attn.proj": "attn.to_out.0",
            "norm1": "norm1",
            "norm2": "norm2",
            "mlp.fc1": "ff.net.0.proj",
            "mlp.fc2": "ff.net.2",
            "mlp.0": "ff.net.0.proj",
            "mlp.2": "ff.net.2",
            "adaLN_modulation.1": "norm_out.linear",
        },
    ),
    "txt_in.input_embedder": "context_embedder.proj_in",
    "txt_in.t_embedder.mlp.0": f"{_TEXT}.timestep_embedder.linear_1",
    "txt_in.t_embedder.mlp.2": f"{_TEXT}.timestep_embedder.linear_2",
    "txt_in.t_embedder.in_layer": f"{_TEXT}.timestep_embedder.linear_1",
    "txt_in.t_embedder.out_layer": f"{_TEXT}.timestep_embedder.linear_2",
    "txt_in.c_embedder.linear_1": f"{_TEXT}.text_embedder.linear_1",
    "txt_in.c_embedder.linear_2": f"{_TEXT}.text_embedder.linear_2",
    "txt_in.c_embedder.in_layer": f"{_TEXT}.text_embedder.linear_1",
    "txt_in.c_embedder.out_layer": f"{_TEXT}.text_embedder.linear_2",
}


def embedder_names(theirs: str, ours: str) -> Originals:
    """An embedding of two layers, numbered as in `mlp.0` or named as in `in_layer`."""
    return {
        f"{theirs}.{layer}": f"{ours}.linear_{number}"
        for layer, number in (("mlp.0", 1), ("mlp.2", 2), ("in_layer", 1), ("out_layer", 2))
    }
