"""Wan-Animate 2's text: UMT5 of the prompt as it is given, and of a fixed one that goes with the driving video."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from diffusion_runtime.core.model_folder import AnyFolder
from diffusion_runtime.models.text_encoder_weights import fill_text_encoder
from diffusion_runtime.models.wan_animate_2.config import read_transformer_config
from diffusion_runtime.text_encoders.interface import Conditions, TextEncoder, TextStream
from diffusion_runtime.text_encoders.t5 import UMT5TextEncoder, load_umt5

# "Reference video of a person's motion": the prompt of the driving video's pass, word for word that of training.
REFERENCE_PROMPT = "人物动作的参考视频"


class WanAnimate2TextEncoder(TextEncoder):
    """Encoder of prompts, whose first further stream is the reference prompt's, the same for every prompt."""

    def __init__(self, umt5: UMT5TextEncoder) -> None:
        self.umt5 = umt5
        self.max_tokens, self.library, self.implementation = umt5.max_tokens, umt5.library, umt5.implementation

    def encode(self, prompts: Sequence[str]) -> Conditions:
        conditions, reference = self.umt5.encode(prompts), self.umt5.encode([REFERENCE_PROMPT])
        stream = TextStream(reference.embeddings, reference.lengths).take([0] * len(prompts))
        return dataclasses.replace(conditions, further=(stream,))


def load_text_encoder(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> WanAnimate2TextEncoder:
    """Load the text encoder of a diffusers folder. Raises ModelLoadError."""
    max_tokens = read_transformer_config(folder).max_tokens
    umt5 = load_umt5(folder, device, dtype, max_tokens=max_tokens, fill=fill_text_encoder, cleans=False)
    return WanAnimate2TextEncoder(umt5)
