"""Weight map: the tensors of a Wan-Animate 2 checkpoint that make up each of ours, and names in LoRA files.

diffusers keeps most of the authors' names for this transformer, so that the checkpoint's names are Wan's in another
spelling; the authors' own files have each block in a module around it (`blocks.0.block`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from diffusion_runtime.models.wan.config import WanTransformerConfig
from diffusion_runtime.models.wan.weights import transformer_pieces as base_pieces
from diffusion_runtime.weights.checkpoint import Piece
from diffusion_runtime.weights.lora.names import LoraNames, Originals, block_names

# Names in a block of Wan's checkpoints -> here.
_IN_BLOCK = {
    "attn1": "self_attn",
    "attn2": "cross_attn",
    "norm2": "norm3",
    "ffn.net.0.proj": "ffn.0",
    "ffn.net.2": "ffn.2",
    "scale_shift_table": "modulation",
}
_OUTSIDE = {
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "condition_embedder.image_embedder.norm1": "img_emb.proj.0",
    "condition_embedder.image_embedder.ff.net.0.proj": "img_emb.proj.1",
    "condition_embedder.image_embedder.ff.net.2": "img_emb.proj.3",
    "condition_embedder.image_embedder.norm2": "img_emb.proj.4",
    "proj_out": "head.head",
    "scale_shift_table": "head.modulation",
}
_BLOCK = re.compile(r"(blocks\.\d+)\.(.+)")


def transformer_pieces(config: WanTransformerConfig) -> dict[str, tuple[Piece, ...]]:
    """Return our parameter name -> the checkpoint tensors that fill it, one after the other."""
    return {
        name: tuple(dataclasses.replace(piece, name=_renamed(piece.name)) for piece in pieces)
        for name, pieces in base_pieces(config).items()
    }


def _renamed(name: str) -> str:
    """Return the name of a tensor in this checkpoint, from that in one of Wan."""
    match = _BLOCK.fullmatch(name)
    if match is None:
        return _with_prefix(name, _OUTSIDE)
    return f"{match[1]}.{_with_prefix(match[2], _IN_BLOCK)}"


def _with_prefix(name: str, table: Mapping[str, str]) -> str:
    for theirs, ours in table.items():
        if name == theirs or name.startswith(f"{theirs}."):
            return ours + name[len(theirs) :]
    return name


_PARTS = {"q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out.0", "norm_q": "norm_q", "norm_k": "norm_k"}
_IMAGE_PARTS = {"k_img": "add_k_proj", "v_img": "add_v_proj", "norm_k_img": "norm_added_k"}
_NAMES: Originals = {
    **{f"self_attn.{name}": f"self_attn.{part}" for name, part in _PARTS.items()},
    **{f"cross_attn.{name}": f"cross_attn.{part}" for name, part in {**_PARTS, **_IMAGE_PARTS}.items()},
    **{name: name for name in ("norm3", "ffn.0", "ffn.2", "modulation")},
}

LORA_NAMES = LoraNames(
    title="Wan-Animate 2",
    shares_names_of="Wan",
    same=("patch_embedding", *_OUTSIDE.values()),
    originals={
        **block_names("blocks.{}", "blocks.{}", _NAMES),
        **block_names("blocks.{}.block", "blocks.{}", _NAMES),
    },
    resized={"patch_embedding": "the patch embedding of a model with other inputs (text to video)"},
    widths=frozenset({5120}),
    num_blocks=frozenset({40}),
)
