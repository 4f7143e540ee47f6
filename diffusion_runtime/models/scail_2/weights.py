"""Weight map: the tensors of a SCAIL-2 checkpoint that make up each of ours, and names in LoRA files; the authors' own,
as in ComfyUI's files."""

from __future__ import annotations

from diffusion_runtime.models.scail_2.config import Scail2Config
from diffusion_runtime.models.wan.original_format import original_lora_names, original_pieces
from diffusion_runtime.weights.checkpoint import Piece

_POSE, _MASK = "patch_embedding_pose", "patch_embedding_mask"


def transformer_pieces(config: Scail2Config) -> dict[str, tuple[Piece, ...]]:
    """Return our parameter name -> the checkpoint tensors that fill it, one after the other."""
    pieces = original_pieces(config)
    embeddings = (("driving_embedding", _POSE, config.in_channels), ("mask_embedding", _MASK, config.mask_channels))
    for ours, theirs, channels in embeddings:
        shape = (config.dim, channels, *config.patch)
        pieces[f"{ours}.projection.weight"] = (Piece(f"{theirs}.weight", shape),)
        pieces[f"{ours}.projection.bias"] = (Piece(f"{theirs}.bias", (config.dim,)),)
    return pieces


LORA_NAMES = original_lora_names("SCAIL-2", more=(_POSE, _MASK))
