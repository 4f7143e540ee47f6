"""Weights of a text encoder that is a module of ours, with transformers' tensor names."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from diffusion_runtime.layers.waiting_weights import let_wait
from diffusion_runtime.models.text_encoder_files import open_text
from diffusion_runtime.weights.checkpoint import Piece
from diffusion_runtime.weights.weight_loading import load_weights, own_pieces

# The embeddings, and their name in some files.
_EMBEDDINGS, _ALIAS = "shared.weight", "encoder.embed_tokens.weight"


def fill_text_encoder(module: nn.Module, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
    """Fill a module on the meta device, from one file or shards, a variant of either, or a GGUF file. Tensors of
    a decoder, and all others that the encoder does not have, are not read; with `device` the meta device none are, and
    all wait.

    Raises ModelLoadError for files that are missing or damaged, and for weights that are missing or of another shape.
    """
    if device.type == "meta":
        let_wait(module, dtype)
        return
    with open_text(folder) as checkpoint:
        pieces = own_pieces(module)
        if _EMBEDDINGS not in checkpoint.shapes and _ALIAS in checkpoint.shapes:
            pieces[_EMBEDDINGS] = (Piece(_ALIAS, pieces[_EMBEDDINGS][0].shape),)
        load_weights(module, checkpoint, pieces, device, dtype, ignored=lambda _: True)
