"""Module names in LoRA files of the Wan family: Wan's own names, and diffusers'."""

from __future__ import annotations

from diffusion_runtime.models.wan.config import GATE
from diffusion_runtime.weights.lora.names import LoraNames, block_names

_PARTS = {"q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out.0", "norm_q": "norm_q", "norm_k": "norm_k"}
# A second cross-attention, over an image, only in Wan 2.1 I2V and FLF2V.
_IMAGE_PARTS = {"k_img": "add_k_proj", "v_img": "add_v_proj", "norm_k_img": "norm_added_k"}
_IMAGE_EMBEDDER = {
    "img_emb.proj.0": "condition_embedder.image_embedder.norm1",
    "img_emb.proj.1": "condition_embedder.image_embedder.ff.net.0.proj",
    "img_emb.proj.3": "condition_embedder.image_embedder.ff.net.2",
    "img_emb.proj.4": "condition_embedder.image_embedder.norm2",
}
_IMAGE = "the image attention of Wan 2.1 I2V"
_CONTROL = "the control blocks of VACE"
_HISTORY = "the larger patches of AnyFlow-FAR's history"
_BLOCK = {
    **{f"self_attn.{name}": f"attn1.{part}" for name, part in _PARTS.items()},
    **{f"cross_attn.{name}": f"attn2.{part}" for name, part in _PARTS.items()},
    "norm3": "norm2",
    "ffn.0": "ffn.net.0.proj",
    "ffn.2": "ffn.net.2",
    "modulation": "scale_shift_table",
}
_CONTROL_BLOCK = {**_BLOCK, "before_proj": "proj_in", "after_proj": "proj_out"}

LORA_NAMES = LoraNames(
    title="Wan",
    originals={
        **block_names(
            "blocks.{}",
            "blocks.{}",
            {
                **_BLOCK,
                **{f"cross_attn.{name}": f"attn2.{part}" for name, part in _IMAGE_PARTS.items()},
                f"self_attn.{GATE}": GATE,
            },
        ),
        **block_names("vace_blocks.{}", "vace_blocks.{}", _CONTROL_BLOCK),
        "patch_embedding": "patch_embedding",
        "vace_patch_embedding": "vace_patch_embedding",
        "far_patch_embedding": "far_patch_embedding",
        "time_embedding.0": "condition_embedder.time_embedder.linear_1",
        "time_embedding.2": "condition_embedder.time_embedder.linear_2",
        "time_projection.1": "condition_embedder.time_proj",
        "text_embedding.0": "condition_embedder.text_embedder.linear_1",
        "text_embedding.2": "condition_embedder.text_embedder.linear_2",
        "head.head": "proj_out",
        "head.modulation": "scale_shift_table",
        **_IMAGE_EMBEDDER,
    },
    absent={
        **{f"blocks.{{}}.attn2.{part}": _IMAGE for part in _IMAGE_PARTS.values()},
        **dict.fromkeys(_IMAGE_EMBEDDER.values(), _IMAGE),
        **{f"vace_blocks.{{}}.{part}": _CONTROL for part in _CONTROL_BLOCK.values()},
        "vace_patch_embedding": _CONTROL,
        "far_patch_embedding": _HISTORY,
    },
    resized={"patch_embedding": "the patch embedding of a model with other inputs (text to video, or image to video)"},
    widths=frozenset({1536, 3072, 5120}),
    num_blocks=frozenset({30, 40}),
)
