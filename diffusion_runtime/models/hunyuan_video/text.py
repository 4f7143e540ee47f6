"""HunyuanVideo's text: a language model asked to describe a video, and CLIP's summary of the prompt. In models that
start from an image the language model sees it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from diffusion_runtime.core.model_folder import AnyFolder
from diffusion_runtime.models.hunyuan_video.config import LATENT_CONCAT, TOKEN_REPLACE, read_transformer_config
from diffusion_runtime.text_encoders.clip import CLIPPooledEncoder, load_clip
from diffusion_runtime.text_encoders.interface import Conditions, TextEncoder
from diffusion_runtime.text_encoders.language_model import PromptTemplate
from diffusion_runtime.text_encoders.language_model_loading import load_language_model
from diffusion_runtime.text_encoders.llava import load_llava

# The template that the transformer was trained with, word for word. There is no space between the sentences.
_ASPECTS = (
    "1. The main content and theme of the video."
    "2. The color, shape, size, texture, quantity, text, and spatial relationships of the objects."
    "3. Actions, events, behaviors temporal relationships, physical movement changes of the objects."
    "4. background environment, light, style and atmosphere."
    "5. camera angles, movements, and transitions used in the video:"
)
TEMPLATE = PromptTemplate(
    before=(
        "<|start_header_id|>system<|end_header_id|>\n\n"
        f"Describe the video by detailing the following aspects: {_ASPECTS}<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\n"
    ),
    after="<|eot_id|>",
    num_cropped=95,
)
IMAGE_TEMPLATE = PromptTemplate(
    before=(
        "<|start_header_id|>system<|end_header_id|>\n\n<image>\n"
        f"Describe the video by detailing the following aspects according to the reference image: {_ASPECTS}<|eot_id|>"
        "\n\n<|start_header_id|>user<|end_header_id|>\n\n"
    ),
    after="<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    num_cropped=103,
)
# Stride over the language model's image tokens: the ones that the transformer gets.
_STRIDES = {LATENT_CONCAT: 2, TOKEN_REPLACE: 4}
MAX_TOKENS = 256
# For an image of 336 x 336 in patches of 14, every second one: with negative prompts in all models.
MAX_IMAGE_TOKENS = 288
# The transformer reads the third-last layer.
_NUM_LAYERS_LEFT_OUT = 2


class HunyuanVideoTextEncoder(TextEncoder):
    """Both encoders as one: the language model's tokens, and CLIP's vector as `pooled`."""

    library = "transformers"

    def __init__(self, language_model: TextEncoder, clip: CLIPPooledEncoder) -> None:
        self.language_model = language_model
        self.clip = clip
        self.max_tokens = language_model.max_tokens
        self.implementation = ", ".join(dict.fromkeys([language_model.implementation, clip.implementation]))

    def of_pictures(self, paths: Sequence[str]) -> HunyuanVideoTextEncoder:
        return HunyuanVideoTextEncoder(self.language_model.of_pictures(paths), self.clip)

    def of_negative(self) -> HunyuanVideoTextEncoder:
        other = self.language_model.of_negative()
        return self if other is self.language_model else HunyuanVideoTextEncoder(other, self.clip)

    def encode(self, prompts: Sequence[str]) -> Conditions:
        """Encode prompts. Tokens that either encoder cuts are counted: CLIP takes fewer."""
        pooled, cut = self.clip.encode(prompts)
        conditions = self.language_model.encode(prompts)
        cuts = (*conditions.further_cuts, cut)
        return dataclasses.replace(conditions, pooled=pooled, encoder="the language model", further_cuts=cuts)


def load_text_encoder(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> HunyuanVideoTextEncoder:
    """Load both text encoders of a diffusers folder. Raises ModelLoadError."""
    kind = read_transformer_config(folder).image_condition
    language_model: TextEncoder
    if kind is None:
        language_model = load_language_model(
            "llama",
            folder,
            device,
            dtype,
            TEMPLATE,
            max_tokens=MAX_TOKENS,
            num_layers_left_out=_NUM_LAYERS_LEFT_OUT,
        )
    else:
        language_model = load_llava(
            folder,
            device,
            dtype,
            IMAGE_TEMPLATE,
            stride=_STRIDES[kind],
            max_tokens=MAX_TOKENS,
            num_layers_left_out=_NUM_LAYERS_LEFT_OUT,
        )
    return HunyuanVideoTextEncoder(language_model, load_clip(folder, device, dtype))
