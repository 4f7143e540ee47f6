"""UMT5 text encoder (Chung et al. 2023, arXiv:2304.09151): model and tokenizer are transformers'."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from diffusion_runtime.text_encoders.interface import Conditions, TextEncoder
from diffusion_runtime.text_encoders.loading import (
    check_model_type,
    check_vocabulary,
    load_encoder,
    load_tokenizer,
)
from diffusion_runtime.text_encoders.prompt_cleaning import clean_prompt
from diffusion_runtime.text_encoders.tokenized import tokenize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, UMT5EncoderModel

# The length the published Wan transformers were trained with, whatever the tokenizer's own config.
MAX_TOKENS = 512

_CONVERSION = (
    "Where there is a spiece.model alone, transformers converts it: "
    "T5TokenizerFast.from_pretrained(folder).save_pretrained(folder)"
)


class UMT5TextEncoder(TextEncoder):
    """`text_encoder/` and `tokenizer/` of a diffusers folder. max_tokens: prompts are padded to it with zeros, which
    the transformer attends to."""

    library = "transformers"

    def __init__(self, model: UMT5EncoderModel, tokenizer: PreTrainedTokenizerFast, max_tokens: int) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.implementation = str(model.config._attn_implementation)

    @torch.inference_mode()
    def encode(self, prompts: Sequence[str]) -> Conditions:
        rows = [tokenize(self.tokenizer, clean_prompt(prompt), self.max_tokens) for prompt in prompts]
        lengths = tuple(len(row.ids) for row in rows)
        # The encoder runs on the longest prompt's length, not on max_tokens: its positions are relative and padding is
        # masked, so the result is the same, for a fraction of the work.
        ids = torch.full((len(rows), max(1, *lengths)), self.tokenizer.pad_token_id or 0)
        for row, tokens in zip(ids, rows, strict=True):
            row[: len(tokens.ids)] = torch.tensor(tokens.ids, dtype=torch.long)
        device = self.model.device
        mask = torch.arange(ids.shape[1])[None] < torch.tensor(lengths)[:, None]
        hidden = self.model(ids.to(device), mask.long().to(device)).last_hidden_state
        embeddings = hidden.new_zeros(len(rows), self.max_tokens, hidden.shape[-1])
        for index, length in enumerate(lengths):
            embeddings[index, :length] = hidden[index, :length]
        return Conditions(
            embeddings=embeddings,
            lengths=lengths,
            unknown_words=tuple(row.unknown_words for row in rows),
            num_cut_tokens=tuple(row.num_cut_tokens for row in rows),
        )


def load_umt5(
    folder: Path, device: torch.device, dtype: torch.dtype, *, max_tokens: int = MAX_TOKENS
) -> UMT5TextEncoder:
    """The text encoder of a model folder, from safetensors and without a network.

    Raises ModelLoadError when a file is missing, damaged, of another class, or lacks weights.
    """
    check_model_type(folder / "text_encoder", ("umt5",))
    # Imported late: transformers takes seconds.
    from transformers.models.umt5.modeling_umt5 import UMT5EncoderModel

    tokenizer = load_tokenizer(folder / "tokenizer", remedy=_CONVERSION)
    model = load_encoder(folder / "text_encoder", UMT5EncoderModel, device, dtype)
    check_vocabulary(folder / "tokenizer", len(tokenizer), model.config.vocab_size)
    return UMT5TextEncoder(model, tokenizer, max_tokens)
