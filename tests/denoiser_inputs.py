"""Inputs of a transformer in tests: embeddings as the text encoder would give them, and a clip of some size."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.models.interface import DenoiserInputs
from diffusion_runtime.text_encoders.interface import Conditions


def text_inputs(embeddings: torch.Tensor, lengths: Sequence[int] | None = None) -> DenoiserInputs:
    """A prediction conditioned on text alone. embeddings: [batch, tokens, dim]."""
    return DenoiserInputs(text=Conditions.of(embeddings, lengths), size=ClipSize(32, 32, 5, 16))
