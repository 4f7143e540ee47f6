"""Text encoder of Qwen-Image 2.1: the hidden states of Qwen3-VL after its last layer, before its final norm.

With images to edit, the language model sees them before the prompt. The states of their own tokens are dropped: the
transformer has the images' latents in their place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from diffusion_runtime.core.model_folder import AnyFolder
from diffusion_runtime.models.qwen_image_21.editing import scaled
from diffusion_runtime.text_encoders.interface import Conditions, TextEncoder
from diffusion_runtime.text_encoders.language_model import LanguageModelEncoder, PromptTemplate
from diffusion_runtime.text_encoders.language_model_loading import load_qwen3_vl
from diffusion_runtime.text_encoders.picture_language_model import (
    PictureLanguageEncoder,
    has_preparation_of_pictures,
    read_preparation_of_pictures,
    without_marks,
)

# The template that the model was trained with; the tokens of the system message are dropped.
SYSTEM_MESSAGE = "<|im_start|>system\nComprehend and analyze the provided prompt.<|im_end|>\n"
_BEFORE, _AFTER = f"{SYSTEM_MESSAGE}<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
# Before the picture of a number; a space between two.
_LABEL = " <image{}>"
# Tokens of a prompt with the template. Its authors' pipeline has no limit; the positions end at 8192.
MAX_TOKENS = 2048


class QwenImage21TextEncoder(LanguageModelEncoder):
    """Encoder of the prompt as a user's message."""

    def encode(self, prompts: Sequence[str]) -> Conditions:
        """Encode prompts. An empty prompt is a space, as in training."""
        return super().encode([without_marks(prompt) or " " for prompt in prompts])


class QwenImage21PictureEncoder(PictureLanguageEncoder):
    """Encoder of the prompt as a user's message after pictures, where there are any."""

    def encode(self, prompts: Sequence[str]) -> Conditions:
        """Encode prompts. An empty prompt is a space, as in training."""
        return super().encode([without_marks(prompt) or " " for prompt in prompts])


def load_text_encoder(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> TextEncoder:
    """Load `text_encoder/` of a model folder, and the tokenizer and the preprocessing of pictures in `processor/`;
    without that the encoder sees none. Raises ModelLoadError."""
    sees = has_preparation_of_pictures(folder)
    model, tokenizer = load_qwen3_vl(folder, device, dtype, tokenizer_in="processor", sees=sees)
    template = PromptTemplate(_BEFORE, _AFTER, num_cropped=len(tokenizer(SYSTEM_MESSAGE)["input_ids"]))
    # The transformer was trained on the last layer's output.
    (model.language_model if sees else model).norm = torch.nn.Identity()
    if not sees:
        return QwenImage21TextEncoder(model, tokenizer, template, max_tokens=MAX_TOKENS, num_layers_left_out=0)
    return QwenImage21PictureEncoder(
        model,
        tokenizer,
        read_preparation_of_pictures(folder),
        template,
        scaled,
        label=_LABEL,
        max_tokens=MAX_TOKENS,
        keeps_pictures=False,
    )
