"""Text encoder of MOSS-Image: the last states of Qwen3.5 for the prompt as a user's message, thinking on."""

from __future__ import annotations

import torch

from diffusion_runtime.core.model_folder import AnyFolder
from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.models.moss_image.config import read_transformer_config
from diffusion_runtime.text_encoders.interface import TextEncoder
from diffusion_runtime.text_encoders.language_model import LanguageModelEncoder, PromptTemplate
from diffusion_runtime.text_encoders.language_model_loading import load_qwen3_5
from diffusion_runtime.text_encoders.tokenized import TokenizedPrompt

# Qwen3.5's chat format, written here: a folder's own template is a program (Jinja). Nothing of it is cut off.
TEMPLATE = PromptTemplate("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n<think>\n", num_cropped=0)
# Of a prompt with its template.
MAX_TOKENS = 4096


class MossImageTextEncoder(LanguageModelEncoder):
    """Encoder of prompts without the blanks around them, which the chat format takes off."""

    def tokenized(self, prompt: str) -> TokenizedPrompt:
        """Tokenize a prompt in its template."""
        return super().tokenized(prompt.strip())


def load_text_encoder(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> TextEncoder:
    """Load `text_encoder/` and `tokenizer/` of a model folder. Raises ModelLoadError also where the encoder is not of
    the transformer's width."""
    model, tokenizer = load_qwen3_5(folder, device, dtype)
    width, expected = int(model.config.hidden_size), read_transformer_config(folder).text_dim
    if width != expected:
        raise ModelLoadError(
            f"{folder / 'text_encoder'}: its states are {width} wide, and the transformer takes text_dim, {expected}; "
            "the two are not of the same model"
        )
    return MossImageTextEncoder(model, tokenizer, TEMPLATE, max_tokens=MAX_TOKENS, num_layers_left_out=0)
