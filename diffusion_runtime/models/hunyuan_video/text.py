"""HunyuanVideo's text: a language model asked to describe a video, and CLIP's summary of the prompt."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from diffusion_runtime.model_folder import AnyFolder
from diffusion_runtime.text_encoders.clip import CLIPPooledEncoder, load_clip
from diffusion_runtime.text_encoders.interface import Conditions, TextEncoder
from diffusion_runtime.text_encoders.language_model import LanguageModelEncoder, PromptTemplate
from diffusion_runtime.text_encoders.language_model_loading import load_language_model

# What the transformer was trained with, word for word. No space stands between the sentences.
_INSTRUCTION = (
    "Describe the video by detailing the following aspects: "
    "1. The main content and theme of the video."
    "2. The color, shape, size, texture, quantity, text, and spatial relationships of the objects."
    "3. Actions, events, behaviors temporal relationships, physical movement changes of the objects."
    "4. background environment, light, style and atmosphere."
    "5. camera angles, movements, and transitions used in the video:"
)
TEMPLATE = PromptTemplate(
    before=(
        f"<|start_header_id|>system<|end_header_id|>\n\n{_INSTRUCTION}<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\n"
    ),
    after="<|eot_id|>",
    num_cropped=95,
)
MAX_TOKENS = 256
# The transformer reads the last layer but two.
_NUM_LAYERS_LEFT_OUT = 2


class HunyuanVideoTextEncoder(TextEncoder):
    """Both encoders as one: the language model's tokens, and CLIP's vector as `pooled`."""

    library = "transformers"

    def __init__(self, language_model: LanguageModelEncoder, clip: CLIPPooledEncoder) -> None:
        self.language_model = language_model
        self.clip = clip
        self.max_tokens = language_model.max_tokens
        self.implementation = ", ".join(dict.fromkeys([language_model.implementation, clip.implementation]))

    def encode(self, prompts: Sequence[str]) -> Conditions:
        """See TextEncoder.encode. Tokens that either encoder cuts are counted: CLIP takes fewer."""
        pooled, cut = self.clip.encode(prompts)
        conditions = self.language_model.encode(prompts)
        return dataclasses.replace(conditions, pooled=pooled, encoder="the language model", further_cuts=(cut,))


def load_text_encoder(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> HunyuanVideoTextEncoder:
    """Both text encoders of a diffusers folder. Raises ModelLoadError."""
    return HunyuanVideoTextEncoder(
        load_language_model(
            "llama",
            folder,
            device,
            dtype,
            TEMPLATE,
            max_tokens=MAX_TOKENS,
            num_layers_left_out=_NUM_LAYERS_LEFT_OUT,
        ),
        load_clip(folder, device, dtype),
    )
