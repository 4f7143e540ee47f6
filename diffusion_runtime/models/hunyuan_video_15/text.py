"""HunyuanVideo-1.5's text: a language model asked to describe a video, and the bytes of the text to be drawn."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import torch

from diffusion_runtime.core.model_folder import AnyFolder
from diffusion_runtime.text_encoders.interface import Conditions, TextEncoder
from diffusion_runtime.text_encoders.language_model import LanguageModelEncoder, PromptTemplate
from diffusion_runtime.text_encoders.language_model_loading import load_qwen2_5_vl
from diffusion_runtime.text_encoders.t5 import ByT5Encoder, load_byt5

# The template that the transformer was trained with, word for word and blank for blank.
_ASPECTS = (
    "1. The main content and theme of the video.",
    "2. The color, shape, size, texture, quantity, text, and spatial relationships of the objects.",
    "3. Actions, events, behaviors temporal relationships, physical movement changes of the objects.",
    "4. background environment, light, style and atmosphere.",
    "5. camera angles, movements, and transitions used in the video.",
)
_INSTRUCTION = (" " * 9).join(
    ("You are a helpful assistant. Describe the video by detailing the following aspects:", *_ASPECTS)
)
TEMPLATE = PromptTemplate(
    before=f"<|im_start|>system\n{_INSTRUCTION}<|im_end|>\n<|im_start|>user\n",
    after="<|im_end|>\n<|im_start|>assistant\n",
    num_cropped=108,
)
MAX_TOKENS = 1000
MAX_GLYPH_TOKENS = 256
# The transformer reads the third-last layer.
_NUM_LAYERS_LEFT_OUT = 2

_QUOTED = re.compile(r"\"(.*?)\"|“(.*?)”")


def glyph_text(prompt: str) -> str:
    """Return each text that a prompt puts in quotation marks once, as the byte encoder was trained to read it; empty
    when there is nothing in them."""
    quoted = dict.fromkeys(straight or curly for straight, curly in _QUOTED.findall(prompt))
    return "".join(f'Text "{text}". ' for text in quoted)


class HunyuanVideo15TextEncoder(TextEncoder):
    """Both encoders as one: the language model's tokens, and those of the quoted text as the first further stream."""

    library = "transformers"

    def __init__(self, language_model: LanguageModelEncoder, byt5: ByT5Encoder) -> None:
        self.language_model = language_model
        self.byt5 = byt5
        self.max_tokens = language_model.max_tokens
        self.implementation = ", ".join(dict.fromkeys([language_model.implementation, byt5.implementation]))

    def encode(self, prompts: Sequence[str]) -> Conditions:
        """Encode prompts. An empty prompt is a blank. Tokens that either encoder cuts are counted."""
        conditions = self.language_model.encode([prompt or " " for prompt in prompts])
        written, cut = self.byt5.encode([glyph_text(prompt) for prompt in prompts])
        return dataclasses.replace(conditions, further=(written,), encoder="the language model", further_cuts=(cut,))


def load_text_encoder(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> HunyuanVideo15TextEncoder:
    """Load both text encoders of a diffusers folder. Raises ModelLoadError."""
    return HunyuanVideo15TextEncoder(
        load_qwen2_5_vl(
            folder, device, dtype, TEMPLATE, max_tokens=MAX_TOKENS, num_layers_left_out=_NUM_LAYERS_LEFT_OUT
        ),
        load_byt5(folder, device, dtype, max_tokens=MAX_GLYPH_TOKENS),
    )
