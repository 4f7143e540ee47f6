"""Weight map of LongCat-Image: FLUX.1's, whose embedding of the timestep has another name, and names in LoRA files."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from diffusion_runtime.models.flux1.config import Flux1TransformerConfig
from diffusion_runtime.models.flux1.weights import LORA_NAMES as ORIGINAL_NAMES
from diffusion_runtime.models.flux1.weights import transformer_pieces as original_pieces
from diffusion_runtime.weights.lora.stream_names import embedder_names
from diffusion_runtime.weights.pieces import NamedPieces


def transformer_pieces(config: Flux1TransformerConfig) -> Iterator[NamedPieces]:
    """Yield our parameter names, and the checkpoint tensors that fill each."""
    for name, pieces in original_pieces(config):
        yield (
            name,
            tuple(
                dataclasses.replace(piece, name=piece.name.replace("time_text_embed", "time_embed")) for piece in pieces
            ),
        )


# FLUX.1's, apart from its embeddings of guidance scale and pooled text.
_SHARED = {
    name: target
    for name, target in ORIGINAL_NAMES.originals.items()
    if not name.startswith(("time_in", "guidance_in", "vector_in"))
}
LORA_NAMES = dataclasses.replace(
    ORIGINAL_NAMES,
    title="LongCat-Image",
    originals={**_SHARED, **embedder_names("time_in", "time_embed.timestep_embedder")},
    absent={},
    resized={},
    num_blocks=frozenset({10, 20}),
)
