"""Weight map: the tensors of a SCAIL-2 checkpoint that make up each of ours, and names in LoRA files; the authors' own,
as in ComfyUI's files."""

from __future__ import annotations

from collections.abc import Iterator

from diffusion_runtime.models.scail_2.config import Scail2Config
from diffusion_runtime.models.wan.original_format import original_lora_names, original_pieces
from diffusion_runtime.weights.pieces import NamedPieces, convolution_pieces

_POSE, _MASK = "patch_embedding_pose", "patch_embedding_mask"


def transformer_pieces(config: Scail2Config) -> Iterator[NamedPieces]:
    """Yield our parameter names, and the checkpoint tensors that fill each, one after the other."""
    yield from original_pieces(config)
    embeddings = (("driving_embedding", _POSE, config.in_channels), ("mask_embedding", _MASK, config.mask_channels))
    for ours, theirs, channels in embeddings:
        yield from convolution_pieces(f"{ours}.projection", theirs, config.dim, (channels, *config.patch))


LORA_NAMES = original_lora_names("SCAIL-2", more=(_POSE, _MASK))
