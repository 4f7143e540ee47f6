"""Text of Anima: the last states of Qwen3, and the same prompt as token ids of T5, which the transformer embeds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from diffusion_runtime.core.model_folder import AnyFolder
from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.models.anima.config import read_transformer_config
from diffusion_runtime.text_encoders.interface import Conditions, TextEncoder
from diffusion_runtime.text_encoders.language_model import LanguageModelEncoder, PromptTemplate
from diffusion_runtime.text_encoders.language_model_loading import load_language_model
from diffusion_runtime.text_encoders.loading import check_vocabulary
from diffusion_runtime.text_encoders.t5 import load_t5_tokenizer
from diffusion_runtime.text_encoders.token_ids import TokenIds

# Of either tokenizer, as diffusers' pipeline truncates.
MAX_TOKENS = 512
T5_TOKENIZER = "t5_tokenizer"
_NO_TEMPLATE = PromptTemplate("", "", num_cropped=0)


class AnimaTextEncoder(TextEncoder):
    """The language model's states of a prompt, and T5's ids of it as the first further stream."""

    library = "transformers"

    def __init__(self, language_model: LanguageModelEncoder, t5_ids: TokenIds) -> None:
        self.language_model = language_model
        self.t5_ids = t5_ids
        self.max_tokens = language_model.max_tokens
        self.implementation = language_model.implementation

    def encode(self, prompts: Sequence[str]) -> Conditions:
        """Encode prompts. Tokens that either tokenizer cuts are counted."""
        states, (ids, cut) = self.language_model.encode(prompts), self.t5_ids.of(prompts)
        ids = ids.to(states.embeddings.device, states.embeddings.dtype)
        return dataclasses.replace(states, further=(ids,), encoder="the language model", further_cuts=(cut,))


def load_text_encoder(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> AnimaTextEncoder:
    """Load `text_encoder/` and both tokenizers of a diffusers folder. Raises ModelLoadError also where the encoder or
    the tokens are not those of the text conditioner."""
    model = load_language_model(
        "qwen3", folder, device, dtype, _NO_TEMPLATE, max_tokens=MAX_TOKENS, num_layers_left_out=0
    )
    config = read_transformer_config(folder).conditioner
    width = int(model.model.config.hidden_size)
    if width != config.source_dim:
        raise ModelLoadError(
            f"{folder / 'text_encoder'}: its states are {width} wide, and the text conditioner takes source_dim, "
            f"{config.source_dim}; the two are not of the same model"
        )
    tokenizer = load_t5_tokenizer(folder / T5_TOKENIZER)
    check_vocabulary(folder / T5_TOKENIZER, len(tokenizer), config.vocab_size)
    return AnimaTextEncoder(model, TokenIds(tokenizer, "T5's tokenizer", MAX_TOKENS))
