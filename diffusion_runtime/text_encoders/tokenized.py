"""Tokenization: text to token ids, with unknown words and the number of truncated tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from diffusion_runtime.errors import ModelLoadError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from diffusion_runtime.text_encoders.json_tokenizer import JsonTokenizer


@dataclass(frozen=True)
class TokenizedPrompt:
    """Tokens of a prompt. ids: those that fit; unknown_words: each once, in order; num_cut_tokens: truncated."""

    ids: tuple[int, ...]
    unknown_words: tuple[str, ...]
    num_cut_tokens: int


def tokenize(
    tokenizer: JsonTokenizer | PreTrainedTokenizerFast,
    text: str,
    max_tokens: int,
    first: int = 0,
    stop: int | None = None,
    *,
    add_special_tokens: bool = True,
) -> TokenizedPrompt:
    """Tokenize one cleaned prompt; special tokens are included and never truncated.

    first, stop: the range of the user's own words in the text; None is its end. Only these are remarked on.
    add_special_tokens: False for a text that holds all of its special tokens, which may then be truncated.
    """
    stop = len(text) if stop is None else stop
    # verbose=False: the tokenizer would print its own warning for a long prompt; the caller gives a better one.
    settings: Any = {"add_special_tokens": add_special_tokens, "verbose": False}
    try:
        whole = tokenizer(text, return_offsets_mapping=True, **settings)
        kept = tokenizer(text, truncation=True, max_length=max_tokens, **settings)
    except BaseException as error:
        # The tokenizers library panics over a damaged table of replacements, which is no Exception.
        if type(error).__name__ != "PanicException":
            raise
        raise ModelLoadError(f"the tokenizer is damaged: {first_line(error)}; copy its files again") from error
    unknown_id = tokenizer.unk_token_id
    unknown = [
        _word_around(text, start, end)
        for token, (start, end) in zip(whole["input_ids"], whole["offset_mapping"], strict=True)
        if token == unknown_id and end > start and first <= start < stop
    ]
    num_cut_tokens = len(whole["input_ids"]) - len(kept["input_ids"])
    return TokenizedPrompt(tuple(kept["input_ids"]), tuple(dict.fromkeys(filter(None, unknown))), num_cut_tokens)


def _word_around(text: str, start: int, stop: int) -> str:
    """Return text[start:stop] widened to whole words: a subword tokenizer may lack only a part of a word."""
    while start > 0 and text[start - 1].isalnum() and text[start].isalnum():
        start -= 1
    while stop < len(text) and text[stop].isalnum() and text[stop - 1].isalnum():
        stop += 1
    return text[start:stop].strip()
