"""T5 text encoder (Raffel et al., arXiv:1910.10683): model and tokenizer are transformers'."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from diffusion_runtime.text_encoders.interface import Conditions, TextEncoder
from diffusion_runtime.text_encoders.loading import check_model_type, check_vocabulary, load_encoder, load_tokenizer
from diffusion_runtime.text_encoders.tokenized import tokenize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, T5EncoderModel

_REMEDY = (
    "Where there is a spiece.model alone, transformers converts it: "
    "T5TokenizerFast.from_pretrained(folder).save_pretrained(folder)"
)


class T5TextEncoder(TextEncoder):
    """Prompts are padded to max_tokens without a mask, for T5 and for the transformer: some transformers were trained
    so."""

    library = "transformers"

    def __init__(self, model: T5EncoderModel, tokenizer: PreTrainedTokenizerFast, max_tokens: int) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.max_tokens = min(max_tokens, tokenizer.model_max_length)
        self.implementation = str(model.config._attn_implementation)

    @torch.inference_mode()
    def encode(self, prompts: Sequence[str]) -> Conditions:
        """See TextEncoder.encode. Every prompt is max_tokens long."""
        rows = [tokenize(self.tokenizer, prompt, self.max_tokens) for prompt in prompts]
        ids = torch.full((len(rows), self.max_tokens), self.tokenizer.pad_token_id or 0)
        for row, tokens in zip(ids, rows, strict=True):
            row[: len(tokens.ids)] = torch.tensor(tokens.ids, dtype=torch.long)
        return Conditions(
            embeddings=self.model(ids.to(self.model.device)).last_hidden_state,
            lengths=(self.max_tokens,) * len(rows),
            unknown_words=tuple(row.unknown_words for row in rows),
            num_cut_tokens=tuple(row.num_cut_tokens for row in rows),
        )


def load_t5(
    folder: Path, device: torch.device, dtype: torch.dtype, *, max_tokens: int, encoder: str, tokenizer: str
) -> T5TextEncoder:
    """T5 from two components of a model folder, from safetensors and without a network.

    Raises ModelLoadError when a file is missing, damaged, of another class, or lacks weights.
    """
    check_model_type(folder / encoder, ("t5",))
    # Imported late: transformers takes seconds.
    from transformers.models.t5.modeling_t5 import T5EncoderModel

    words = load_tokenizer(folder / tokenizer, remedy=_REMEDY)
    model = load_encoder(folder / encoder, T5EncoderModel, device, dtype)
    check_vocabulary(folder / tokenizer, len(words), model.config.vocab_size)
    return T5TextEncoder(model, words, max_tokens)
