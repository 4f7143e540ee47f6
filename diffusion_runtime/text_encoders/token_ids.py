"""Token ids as a stream of conditions, for transformers that embed the tokens themselves.

Conditions are converted to the model's dtype, in which ids are not exact; whole numbers up to 256 are, in every one, so
that an id is given in two digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from diffusion_runtime.text_encoders.interface import EncoderCut, TextStream
from diffusion_runtime.text_encoders.tokenized import tokenize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

NUM_DIGITS, _BASE = 2, 256


def digits_of(ids: torch.Tensor) -> torch.Tensor:
    """Return token ids [...], below 2 ** 16, in their digits, [..., 2]."""
    return torch.stack([ids // _BASE, ids % _BASE], dim=-1)


def ids_of(digits: torch.Tensor) -> torch.Tensor:
    """Return the token ids [...] of digits_of, int64."""
    high, low = digits.round().long().unbind(-1)
    return high * _BASE + low


class TokenIds:
    """Source of the ids of prompts. name: of the tokenizer, for users; max_tokens: capacity for one prompt."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, name: str, max_tokens: int) -> None:
        self.tokenizer = tokenizer
        self.name = name
        self.max_tokens = max_tokens

    def of(self, prompts: Sequence[str]) -> tuple[TextStream, EncoderCut]:
        """Return the ids of each prompt in digits, [batch, tokens, 2], float32; and what was truncated."""
        rows = [tokenize(self.tokenizer, prompt, self.max_tokens) for prompt in prompts]
        lengths = tuple(len(row.ids) for row in rows)
        ids = torch.zeros(len(rows), max(1, *lengths), dtype=torch.int64)
        for values, row in zip(ids, rows, strict=True):
            values[: len(row.ids)] = torch.tensor(row.ids, dtype=torch.int64)
        cut = EncoderCut(self.name, tuple(row.num_cut_tokens for row in rows), self.max_tokens)
        return TextStream(digits_of(ids).float(), lengths), cut
