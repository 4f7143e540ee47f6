"""The kind of a tensor file, told by its tensors' names: a text encoder, an autoencoder, a transformer, a LoRA."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from diffusion_runtime.weights.lora.keys import parse_key
from diffusion_runtime.weights.lora.names import LoraNames
from diffusion_runtime.weights.tensor_names import families_of_tensors, transformer_tensors

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class FileKind:
    """title: as people call it. model_types: of transformers, which a text encoder of this kind has in its config.json.
    component: the flag's part that such a file is for, empty for none. signs: patterns of names, each of which one
    tensor of such a file has. may_be_quantised: of an autoencoder, whether it is read in 8 bits with scales."""

    title: str
    signs: tuple[str, ...]
    model_types: tuple[str, ...] = ()
    component: str = ""
    may_be_quantised: bool = False


# The first one whose signs are all there. Layers are numbered 0 and 1 so that a tiny model has them.
_KINDS = (
    FileKind(
        "a UMT5 text encoder",
        (r"encoder\.block\.1\.layer\.0\.SelfAttention\.relative_attention_bias\.weight",),
        ("umt5",),
        "text_encoder",
    ),
    FileKind(
        "a UMT5 text encoder with Wan's own names",
        (r"blocks\.0\.pos_embedding\.embedding\.weight", r"token_embedding\.weight"),
        ("umt5",),
    ),
    FileKind("a T5 text encoder", (r"encoder\.block\.0\.layer\.0\.SelfAttention\.q\.weight",), ("t5",), "text_encoder"),
    FileKind(
        "a CLIP image encoder",
        (r"(vision_model\.)?encoder\.layers\.0\.self_attn\.q_proj\.weight", r".*embeddings\.patch_embedding\.weight"),
        ("clip_vision_model", "siglip_vision_model"),
        "image_encoder",
    ),
    FileKind(
        "a CLIP text encoder",
        (r"(text_model\.)?encoder\.layers\.0\.self_attn\.q_proj\.weight",),
        ("clip_text_model",),
        "text_encoder",
    ),
    FileKind(
        "Qwen2.5-VL",
        (r"(model\.)?(language_model\.)?(model\.)?layers\.0\.self_attn\.q_proj\.bias",),
        ("qwen2_5_vl", "qwen2_5_vl_text", "qwen2"),
        "text_encoder",
    ),
    FileKind(
        "Gemma 4",
        (r"(language_model\.)?(model\.)?(language_model\.)?layers\.0\.layer_scalar",),
        ("gemma4_unified", "gemma4_unified_text"),
        "text_encoder",
    ),
    FileKind(
        "Gemma 3",
        (r"(language_model\.)?(model\.)?(language_model\.)?layers\.0\.pre_feedforward_layernorm\.weight",),
        ("gemma3", "gemma3_text"),
        "text_encoder",
    ),
    FileKind(
        "Qwen3",
        (r"(model\.)?(language_model\.)?layers\.0\.self_attn\.q_norm\.weight",),
        ("qwen3", "qwen3_vl"),
        "text_encoder",
    ),
    # The first of its layers is one of linear attention.
    FileKind(
        "Qwen3.5",
        (r"(model\.)?(language_model\.)?layers\.0\.linear_attn\.in_proj_qkv\.weight",),
        ("qwen3_5", "qwen3_5_text"),
        "text_encoder",
    ),
    FileKind(
        "a language model such as Llama or Mistral",
        (r"(language_model\.)?(model\.)?(language_model\.)?layers\.0\.self_attn\.q_proj\.weight",),
        ("llama", "llava", "mistral3", "mistral"),
        "text_encoder",
    ),
    # In GGUF: a safetensors file has the language model beside it.
    FileKind(
        "the half of Qwen2.5-VL or Qwen3-VL that reads pictures",
        (r"visual\.blocks\.0\.attn\.qkv\.weight", r"visual\.patch_embed\.proj\.weight"),
    ),
    FileKind(
        "the autoencoder of Wan or Qwen-Image, with its authors' names",
        (r"(vae\.)?decoder\.upsamples\.0\.(upsamples\.0\.)?residual\.0\.gamma",),
        component="vae",
    ),
    FileKind(
        "an autoencoder of images, with its authors' names",
        (r"(vae\.|first_stage_model\.)?decoder\.up\.0\.block\.0\.norm1\.weight",),
        component="vae",
    ),
    FileKind(
        "the autoencoder of HunyuanVideo-1.5, with its authors' names",
        (r"(vae\.)?decoder\.up\.0\.block\.0\.norm1\.gamma",),
        component="vae",
    ),
    FileKind(
        "a video autoencoder, with its authors' names",
        (r"(vae\.)?decoder\.up_blocks\.0\.res_blocks\.0\.conv1\.conv\.weight",),
        component="vae",
    ),
    FileKind(
        "the video autoencoder of MiniMax-H3",
        (r"decoder\.register_tokens", r"decoder\.transformer_blocks\.0\.attn\.to_(q|qkv)\.weight"),
        component="vae",
        may_be_quantised=True,
    ),
    FileKind(
        "an autoencoder",
        (r"(vae\.)?decoder\.mid_block\.resnets\.0\.(norm1|conv1|norm)\..*", r"(vae\.)?(en|de)coder\.conv_in\..*"),
        component="vae",
    ),
)


def kind_of(names: Sequence[str]) -> FileKind | None:
    """The kind of text encoder or autoencoder that a file of these tensors holds; None for any other file."""
    for kind in _KINDS:
        if all(any(re.fullmatch(sign, name) for name in names) for sign in kind.signs):
            return kind
    return None


def describe_file(shapes: Shapes, known: Callable[[], Sequence[LoraNames]]) -> str:
    """Return what a file of these tensors holds, for a message. known: the names of all families."""
    names = tuple(shapes)
    if any(parse_key(name) for name in names):
        return "a LoRA"
    kind = kind_of(names)
    if kind is not None:
        return kind.title
    families = families_of_tensors({name: shapes[name] for name in transformer_tensors(names)}, known())
    return f"the transformer of {' or '.join(families)}" if families else "nothing that is known here"
