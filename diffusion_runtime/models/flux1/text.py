"""T5 for the tokens and CLIP for one vector a prompt, as FLUX.1 reads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from diffusion_runtime.core.model_folder import AnyFolder
from diffusion_runtime.text_encoders.clip import CLIPPooledEncoder, load_clip
from diffusion_runtime.text_encoders.interface import Conditions, TextEncoder
from diffusion_runtime.text_encoders.t5 import T5TextEncoder, load_t5

# Tokens of T5: models distilled to few steps, which take no guidance scale, were trained on shorter prompts.
MAX_TOKENS, MAX_TOKENS_FEW_STEPS = 512, 256


class Flux1TextEncoder(TextEncoder):
    """T5 and CLIP as one encoder. The pooled vector is of the tokens that CLIP takes; T5 takes more. Tokens that either
    cuts are counted."""

    library = "transformers"

    def __init__(self, t5: T5TextEncoder, clip: CLIPPooledEncoder) -> None:
        self.t5 = t5
        self.clip = clip
        self.max_tokens = t5.max_tokens
        self.implementation = " and ".join(dict.fromkeys([t5.implementation, clip.implementation]))

    def encode(self, prompts: Sequence[str]) -> Conditions:
        pooled, cut = self.clip.encode(prompts)
        return dataclasses.replace(self.t5.encode(prompts), pooled=pooled, encoder="T5", further_cuts=(cut,))


def load_text_encoder(
    folder: AnyFolder, device: torch.device, dtype: torch.dtype, max_tokens: int = MAX_TOKENS
) -> Flux1TextEncoder:
    """Load both encoders of a diffusers folder. Raises ModelLoadError."""
    clip = load_clip(folder, device, dtype, encoder="text_encoder", tokenizer="tokenizer")
    t5 = load_t5(folder, device, dtype, max_tokens=max_tokens, encoder="text_encoder_2", tokenizer="tokenizer_2")
    return Flux1TextEncoder(t5, clip)
