"""ByT5 encoder (Xue et al., arXiv:2105.13626), which reads bytes: for text that is to be rendered in an image."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from diffusion_runtime.errors import ModelLoadError, first_line
from diffusion_runtime.text_encoders.interface import EncoderCut, TextStream
from diffusion_runtime.text_encoders.loading import check_model_type, check_vocabulary, load_encoder
from diffusion_runtime.text_encoders.quiet import quiet_transformers

if TYPE_CHECKING:
    from transformers import ByT5Tokenizer, T5EncoderModel


class ByT5Encoder:
    """max_tokens: capacity for one text, its end token included; one token is a byte."""

    library = "transformers"

    def __init__(self, model: T5EncoderModel, tokenizer: ByT5Tokenizer, max_tokens: int) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.implementation = str(model.config._attn_implementation)

    @torch.inference_mode()
    def encode(self, texts: Sequence[str]) -> tuple[TextStream, EncoderCut]:
        """The tokens of each text, padded to the longest, none of an empty one; and what was truncated.

        Positions are relative and padding is masked, so padding to the longest text is enough.
        """
        rows = [self._tokens(text, self.max_tokens) if text else [] for text in texts]
        lengths = tuple(len(row) for row in rows)
        # At least one token: an empty tensor would need special cases everywhere.
        ids = torch.full((len(rows), max(1, *lengths)), self.tokenizer.pad_token_id or 0)
        mask = torch.zeros_like(ids)
        for index, row in enumerate(rows):
            ids[index, : len(row)] = torch.tensor(row, dtype=torch.long)
            mask[index, : len(row)] = 1
        some = [index for index, length in enumerate(lengths) if length]
        embeddings = torch.zeros(
            *ids.shape, self.model.config.d_model, dtype=self.model.dtype, device=self.model.device
        )
        if some:
            hidden = self.model(ids[some].to(self.model.device), mask[some].to(self.model.device)).last_hidden_state
            for index, tokens in zip(some, hidden, strict=True):
                embeddings[index, : lengths[index]] = tokens[: lengths[index]]
        whole = (len(self._tokens(text, None)) if text else 0 for text in texts)
        num_cut = tuple(total - length for total, length in zip(whole, lengths, strict=True))
        return TextStream(embeddings, lengths), EncoderCut("ByT5", num_cut, self.max_tokens)

    def _tokens(self, text: str, max_tokens: int | None) -> list[int]:
        """max_tokens: None for all of them."""
        # verbose=False: the tokenizer would print its own warning for a long text; the caller gives a better one.
        tokens: list[int] = self.tokenizer(
            text, truncation=max_tokens is not None, max_length=max_tokens, verbose=False
        ).input_ids
        return tokens


def load_byt5(
    folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    *,
    max_tokens: int,
    encoder: str = "text_encoder_2",
    tokenizer: str = "tokenizer_2",
) -> ByT5Encoder:
    """ByT5 from two components of a model folder, from safetensors and json and without a network.

    Raises ModelLoadError when a file is missing, damaged, of another class, or lacks weights.
    """
    check_model_type(folder / encoder, ("t5",))
    # Imported late: transformers takes seconds.
    from transformers.models.t5.modeling_t5 import T5EncoderModel

    letters = _load_tokenizer(folder / tokenizer)
    model = load_encoder(folder / encoder, T5EncoderModel, device, dtype)
    check_vocabulary(folder / tokenizer, len(letters), model.config.vocab_size)
    return ByT5Encoder(model, letters, max_tokens)


def _load_tokenizer(folder: Path) -> ByT5Tokenizer:
    from transformers.models.byt5.tokenization_byt5 import ByT5Tokenizer

    # Its vocabulary is the bytes: it has no vocabulary file, only settings.
    if not (folder / "tokenizer_config.json").is_file():
        raise ModelLoadError(f"{folder / 'tokenizer_config.json'} is missing; copy or download the whole folder")
    try:
        with quiet_transformers():
            tokenizer: ByT5Tokenizer = ByT5Tokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # any exception: damaged json makes it raise several kinds
        raise ModelLoadError(f"{folder}: the tokenizer cannot be loaded: {first_line(error)}") from error
    return tokenizer
