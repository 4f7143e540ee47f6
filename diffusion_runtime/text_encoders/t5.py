"""T5 (Raffel et al., arXiv:1910.10683), UMT5 (Chung et al. 2023, arXiv:2304.09151) and ByT5 (Xue et al.,
arXiv:2105.13626) text encoders: models and tokenizers are transformers', but for the UMT5 of umt5_model.py."""

from __future__ import annotations

import html
import importlib.util
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch import nn

from diffusion_runtime.core.empty_modules import empty_modules
from diffusion_runtime.core.model_folder import AnyFolder, read_json_in
from diffusion_runtime.errors import ModelLoadError, first_line
from diffusion_runtime.text_encoders.interface import Conditions, EncoderCut, TextEncoder, TextStream
from diffusion_runtime.text_encoders.json_tokenizer import JsonTokenizer, load_json_tokenizer
from diffusion_runtime.text_encoders.loading import (
    check_model_type,
    check_vocabulary,
    load_encoder,
    load_tokenizer,
    quiet_transformers,
)
from diffusion_runtime.text_encoders.sentencepiece_tokenizer import FILE as SENTENCEPIECE
from diffusion_runtime.text_encoders.sentencepiece_tokenizer import load_t5_sentencepiece
from diffusion_runtime.text_encoders.tokenized import TokenizedPrompt, tokenize
from diffusion_runtime.text_encoders.umt5_model import UMT5Encoder, UMT5Sizes, sizes_of

if TYPE_CHECKING:
    from transformers import ByT5Tokenizer, PreTrainedTokenizerFast, T5EncoderModel, UMT5EncoderModel


_REMEDY = (
    "Where there is a spiece.model alone, transformers converts it: "
    "T5TokenizerFast.from_pretrained(folder).save_pretrained(folder)"
)


# Which models see the padding of a prompt to max_tokens: T5 and the transformer, T5 alone, or none.
Padding: TypeAlias = Literal["seen", "seen_by_t5", "hidden"]


class T5TextEncoder(TextEncoder):
    """Encoder of prompts padded to max_tokens. padding: which models see that, as the transformer was trained. Where it
    is hidden from the transformer, max_tokens holds whatever the tokenizer's own config specifies."""

    library = "transformers"

    def __init__(
        self,
        model: T5EncoderModel,
        tokenizer: PreTrainedTokenizerFast,
        max_tokens: int,
        *,
        padding: Padding = "seen",
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.padding = padding
        self.max_tokens = min(max_tokens, tokenizer.model_max_length) if padding == "seen" else max_tokens
        self.implementation = str(model.config._attn_implementation)

    @torch.inference_mode()
    def encode(self, prompts: Sequence[str]) -> Conditions:
        """Encode prompts, each padded to max_tokens where the transformer sees the padding."""
        rows = [tokenize(self.tokenizer, prompt, self.max_tokens) for prompt in prompts]
        ids = torch.full((len(rows), self.max_tokens), self.tokenizer.pad_token_id or 0)
        for row, tokens in zip(ids, rows, strict=True):
            row[: len(tokens.ids)] = torch.tensor(tokens.ids, dtype=torch.long)
        lengths = (self.max_tokens,) * len(rows) if self.padding == "seen" else tuple(len(row.ids) for row in rows)
        is_real = (torch.arange(self.max_tokens)[None] < torch.tensor(lengths)[:, None]).to(self.model.device)
        mask = is_real if self.padding == "hidden" else None
        hidden = self.model(ids.to(self.model.device), attention_mask=mask).last_hidden_state
        return Conditions(
            embeddings=hidden if self.padding == "seen" else hidden * is_real[..., None],
            lengths=lengths,
            unknown_words=tuple(row.unknown_words for row in rows),
            num_cut_tokens=tuple(row.num_cut_tokens for row in rows),
        )


def load_t5(
    folder: AnyFolder,
    device: torch.device,
    dtype: torch.dtype,
    *,
    max_tokens: int,
    encoder: str,
    tokenizer: str,
    padding: Padding = "seen",
) -> T5TextEncoder:
    """Load T5 from two components of a model folder, from safetensors and without a network.

    Raises ModelLoadError when a file is missing, damaged, of another class, or lacks weights.
    """
    check_model_type(folder / encoder, ("t5",))
    # Imported late: transformers takes seconds.
    from transformers.models.t5.modeling_t5 import T5EncoderModel

    words = load_t5_tokenizer(folder / tokenizer)
    model = load_encoder(folder / encoder, T5EncoderModel, device, dtype)
    check_vocabulary(folder / tokenizer, len(words), model.config.vocab_size)
    return T5TextEncoder(model, words, max_tokens, padding=padding)


def load_t5_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer in a folder, from tokenizer.json or spiece.model. Raises ModelLoadError."""
    has_json = (folder / "tokenizer.json").is_file() or not (folder / SENTENCEPIECE).is_file()
    return load_tokenizer(folder, remedy=_REMEDY) if has_json else load_t5_sentencepiece(folder)


# The separators U+001C to U+001F are whitespace in Python, but not in Unicode, which diffusers follows here.
_WHITESPACE = re.compile(r"[^\S\x1c-\x1f]+")
# Printable ASCII, except what begins an entity.
_PLAIN = re.compile(r"[ -%'-~]*")


def clean_prompt(prompt: str) -> str:
    """Return the prompt without html entities and with single spaces; mojibake is repaired where ftfy is installed."""
    # It changes nothing in plain English text; its import takes 0.1 s.
    if _PLAIN.fullmatch(prompt) is None and importlib.util.find_spec("ftfy") is not None:
        import ftfy

        prompt = ftfy.fix_text(prompt)
    prompt = html.unescape(html.unescape(prompt)).strip()
    return _WHITESPACE.sub(" ", prompt).strip()


# (module of ours on the meta device, its folder, device, dtype): reads its weights. Raises ModelLoadError.
Fill: TypeAlias = Callable[[nn.Module, Path, torch.device, torch.dtype], None]

# The length that the published Wan transformers were trained with, whatever the tokenizer's own config.
MAX_TOKENS = 512


class UMT5TextEncoder(TextEncoder):
    """Encoder of `text_encoder/` and `tokenizer/` of a diffusers folder. max_tokens: prompts are padded to it with
    zeros, which the transformer attends to. model: ours, or transformers'. cleans: whether prompts go through
    clean_prompt."""

    def __init__(
        self,
        model: UMT5Encoder | UMT5EncoderModel,
        tokenizer: JsonTokenizer | PreTrainedTokenizerFast,
        max_tokens: int,
        *,
        cleans: bool = True,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self._cleans = cleans
        if isinstance(model, UMT5Encoder):
            self.library, self.implementation = "torch", "sdpa"
        else:
            self.library, self.implementation = "transformers", str(model.config._attn_implementation)

    @torch.inference_mode()
    def encode(self, prompts: Sequence[str]) -> Conditions:
        texts = [clean_prompt(prompt) if self._cleans else prompt for prompt in prompts]
        rows = [tokenize(self.tokenizer, text, self.max_tokens) for text in texts]
        lengths = tuple(len(row.ids) for row in rows)
        # The encoder runs on the longest prompt's length, not on max_tokens: its positions are relative and padding is
        # masked, so the result is the same, for a fraction of the work.
        ids = torch.full((len(rows), max(1, *lengths)), self.tokenizer.pad_token_id or 0)
        for row, tokens in zip(ids, rows, strict=True):
            row[: len(tokens.ids)] = torch.tensor(tokens.ids, dtype=torch.long)
        hidden = self._hidden(ids, torch.arange(ids.shape[1])[None] < torch.tensor(lengths)[:, None])
        embeddings = hidden.new_zeros(len(rows), self.max_tokens, hidden.shape[-1])
        for index, length in enumerate(lengths):
            embeddings[index, :length] = hidden[index, :length]
        return Conditions(
            embeddings=embeddings,
            lengths=lengths,
            unknown_words=tuple(row.unknown_words for row in rows),
            num_cut_tokens=tuple(row.num_cut_tokens for row in rows),
            known_words=self._known_words(rows),
        )

    def _known_words(self, rows: Sequence[TokenizedPrompt]) -> tuple[str, ...]:
        has_unknown = any(row.unknown_words for row in rows)
        return self.tokenizer.whole_words if has_unknown and isinstance(self.tokenizer, JsonTokenizer) else ()

    def _hidden(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the hidden states, [batch, seq, dim]. ids: [batch, seq], mask: [batch, seq], both on the CPU."""
        device = self.model.device
        if isinstance(self.model, UMT5Encoder):
            ours: torch.Tensor = self.model(ids.to(device), None if bool(mask.all()) else mask.to(device))
            return ours
        theirs: torch.Tensor = self.model(ids.to(device), mask.long().to(device)).last_hidden_state
        return theirs


def umt5_library(folder: AnyFolder, dtype: torch.dtype) -> str:
    """Return the library whose attention `load_umt5` loads: "torch" for a module of ours, else "transformers"."""
    return "transformers" if _known_umt5(folder, dtype) is None else "torch"


def _known_umt5(folder: AnyFolder, dtype: torch.dtype) -> UMT5Sizes | None:
    """Return the sizes of a UMT5 that UMT5Encoder computes as transformers does; None for others, such as float16, of
    which transformers keeps a part in float32."""
    return sizes_of(read_json_in(folder, "text_encoder", "config.json")) if dtype != torch.float16 else None


def load_umt5(
    folder: AnyFolder,
    device: torch.device,
    dtype: torch.dtype,
    *,
    max_tokens: int = MAX_TOKENS,
    fill: Fill | None = None,
    cleans: bool = True,
) -> UMT5TextEncoder:
    """Load the text encoder of a model folder, from safetensors and without a network.

    fill: reads the weights of a module of ours; None leaves every folder to transformers. cleans: as of
    UMT5TextEncoder.

    Raises ModelLoadError when a file is missing, damaged, of another class, or lacks weights.
    """
    check_model_type(folder / "text_encoder", ("umt5",))
    tokenizer = load_json_tokenizer(folder / "tokenizer") or load_tokenizer(folder / "tokenizer", remedy=_REMEDY)
    sizes = None if fill is None else _known_umt5(folder, dtype)
    if sizes is not None and fill is not None:
        check_vocabulary(folder / "tokenizer", len(tokenizer), sizes.vocab_size)
        with empty_modules():
            encoder = UMT5Encoder(sizes)
        fill(encoder, folder / "text_encoder", device, dtype)
        return UMT5TextEncoder(encoder, tokenizer, max_tokens, cleans=cleans)
    # Imported late: transformers takes seconds.
    from transformers.models.umt5.modeling_umt5 import UMT5EncoderModel

    model = load_encoder(folder / "text_encoder", UMT5EncoderModel, device, dtype)
    check_vocabulary(folder / "tokenizer", len(tokenizer), model.config.vocab_size)
    return UMT5TextEncoder(model, tokenizer, max_tokens, cleans=cleans)


class ByT5Encoder:
    """Encoder of short texts. max_tokens: capacity for one text, its end token included; one token is a byte."""

    library = "transformers"

    def __init__(self, model: T5EncoderModel, tokenizer: ByT5Tokenizer, max_tokens: int) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.implementation = str(model.config._attn_implementation)

    @torch.inference_mode()
    def encode(self, texts: Sequence[str]) -> tuple[TextStream, EncoderCut]:
        """Return the tokens of each text, padded to the longest, none of an empty one; and what was truncated.

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
        """Return the token ids of a text. max_tokens: None for all of them."""
        # verbose=False: the tokenizer would print its own warning for a long text; the caller gives a better one.
        tokens: list[int] = self.tokenizer(
            text, truncation=max_tokens is not None, max_length=max_tokens, verbose=False
        ).input_ids
        return tokens


def load_byt5(
    folder: AnyFolder,
    device: torch.device,
    dtype: torch.dtype,
    *,
    max_tokens: int,
    encoder: str = "text_encoder_2",
    tokenizer: str = "tokenizer_2",
) -> ByT5Encoder:
    """Load ByT5 from two components of a model folder, from safetensors and json and without a network.

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
