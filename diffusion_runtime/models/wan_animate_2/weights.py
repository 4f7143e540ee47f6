"""Weight map: the tensors of a Wan-Animate 2 checkpoint that make up each of ours, and names in LoRA files.

diffusers keeps most of the authors' names for this transformer, so that the checkpoint's names are Wan's in another
spelling; the authors' own files have each block in a module around it (`blocks.0.block`).
"""

from __future__ import annotations

import dataclasses
import re

from diffusion_runtime.models.wan.config import WanTransformerConfig
from diffusion_runtime.models.wan.weights import IMAGE_PARTS, PARTS
from diffusion_runtime.models.wan.weights import LORA_NAMES as WAN_NAMES
from diffusion_runtime.models.wan.weights import transformer_pieces as base_pieces
from diffusion_runtime.weights.checkpoint import Piece
from diffusion_runtime.weights.lora.names import LoraNames, Originals, block_names

# Names of Wan's modules in diffusers' folders -> in the authors' files.
_AUTHORS = {str(theirs): name for name, theirs in WAN_NAMES.originals.items() if not name.startswith(("vace", "far"))}
# Layers of attention alone keep diffusers' names within it.
_ATTENTION = {"attn1": "self_attn", "attn2": "cross_attn"}
_MODULE = re.compile(r"(?P<block>blocks\.\d+\.)?(?P<module>.+?)(?P<kind>\.weight|\.bias)?")


def transformer_pieces(config: WanTransformerConfig) -> dict[str, tuple[Piece, ...]]:
    """Return our parameter name -> the checkpoint tensors that fill it, one after the other."""
    return {
        name: tuple(dataclasses.replace(piece, name=_renamed(piece.name)) for piece in pieces)
        for name, pieces in base_pieces(config).items()
    }


def _renamed(name: str) -> str:
    """Return the name of a tensor in this checkpoint, from that in one of Wan."""
    match = _MODULE.fullmatch(name)
    assert match is not None
    block, module, kind = match["block"] or "", match["module"], match["kind"] or ""
    attention, _, layer = module.partition(".")
    if attention in _ATTENTION:
        return f"{block}{_ATTENTION[attention]}.{layer}{kind}"
    theirs = _AUTHORS[f"blocks.{{}}.{module}" if block else module]
    return f"{block}{theirs.removeprefix('blocks.{}.')}{kind}"


_NAMES: Originals = {
    **{f"self_attn.{name}": f"self_attn.{part}" for name, part in PARTS.items()},
    **{f"cross_attn.{name}": f"cross_attn.{part}" for name, part in {**PARTS, **IMAGE_PARTS}.items()},
    **{name: name for name in ("norm3", "ffn.0", "ffn.2", "modulation")},
}

LORA_NAMES = LoraNames(
    title="Wan-Animate 2",
    shares_names_of="Wan",
    same=tuple(name for name in _AUTHORS.values() if "{}" not in name),
    originals={
        **block_names("blocks.{}", "blocks.{}", _NAMES),
        **block_names("blocks.{}.block", "blocks.{}", _NAMES),
    },
    resized={"patch_embedding": "the patch embedding of a model with other inputs (text to video)"},
    widths=frozenset({5120}),
    num_blocks=frozenset({40}),
)
