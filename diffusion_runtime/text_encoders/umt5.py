"""UMT5 (Chung et al. 2023, arXiv:2304.09151) as a text encoder: model and tokenizer are transformers'."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.text_encoders.interface import Conditions, TextEncoder
from diffusion_runtime.text_encoders.prompt_cleaning import clean_prompt
from diffusion_runtime.text_encoders.quiet import quiet_transformers
from diffusion_runtime.text_encoders.tokenized import tokenize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, UMT5EncoderModel

# What the Wan transformers were trained with; tokenizers made for less say so in their model_max_length.
MAX_TOKENS = 512


class UMT5TextEncoder(TextEncoder):
    """`text_encoder/` and `tokenizer/` of a diffusers folder."""

    library = "transformers"

    def __init__(self, model: UMT5EncoderModel, tokenizer: PreTrainedTokenizerFast) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.max_tokens = min(MAX_TOKENS, tokenizer.model_max_length)
        self.implementation = str(model.config._attn_implementation)

    @torch.inference_mode()
    def encode(self, prompts: Sequence[str]) -> Conditions:
        rows = [tokenize(self.tokenizer, clean_prompt(prompt), self.max_tokens) for prompt in prompts]
        lengths = tuple(len(row.ids) for row in rows)
        # The encoder runs on the longest prompt's length, not on max_tokens: its positions are relative and padding is
        # masked, so what comes out is the same, for a fraction of the work.
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


def load_umt5(folder: Path, device: torch.device, dtype: torch.dtype) -> UMT5TextEncoder:
    """The text encoder of a model folder, from safetensors and without a network.

    Raises ModelLoadError when a file is missing, damaged, of another class, or lacks weights.
    """
    _check_class(folder / "text_encoder" / "config.json")
    with quiet_transformers():
        tokenizer = _load_tokenizer(folder / "tokenizer")
        model = _load_model(folder / "text_encoder", dtype)
    num_embeddings = model.config.vocab_size
    if len(tokenizer) > num_embeddings:
        raise ModelLoadError(
            f"{folder / 'tokenizer'}: has {len(tokenizer)} tokens, the text encoder beside it knows {num_embeddings}; "
            "the two are not of the same model"
        )
    torch.nn.Module.to(model, device)
    return UMT5TextEncoder(model, tokenizer)


def _check_class(config_file: Path) -> None:
    try:
        config: Any = json.loads(config_file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelLoadError(f"{config_file}: cannot be read ({error.strerror}); the folder is incomplete") from error
    except ValueError as error:
        raise ModelLoadError(f"{config_file}: expected JSON ({error}); the file is damaged, copy it again") from error
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind != "umt5":
        raise ModelLoadError(f"{config_file}: model_type: expected 'umt5', got {kind!r}; this is not supported")


def _load_model(folder: Path, dtype: torch.dtype) -> UMT5EncoderModel:
    from transformers.models.umt5.modeling_umt5 import UMT5EncoderModel

    # With output_loading_info it returns a pair, which its annotation does not say.
    load: Any = UMT5EncoderModel.from_pretrained
    try:
        model, found = load(folder, dtype=dtype, use_safetensors=True, local_files_only=True, output_loading_info=True)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        # transformers, tokenizers and safetensors raise a dozen kinds between them, some of them plain Exceptions.
        raise ModelLoadError(f"{folder}: the text encoder cannot be loaded: {_first_line(error)}") from error
    missing = sorted(found["missing_keys"])
    if missing:
        names = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise ModelLoadError(f"{folder}: the weights of the text encoder are incomplete, missing: {names}")
    encoder: UMT5EncoderModel = model.eval().requires_grad_(False)
    return encoder


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    if not (folder / "tokenizer.json").is_file():
        raise ModelLoadError(
            f"{folder / 'tokenizer.json'} is missing; copy or download the whole folder. Where there is a spiece.model "
            "alone, transformers converts it: T5TokenizerFast.from_pretrained(folder).save_pretrained(folder)"
        )
    try:
        tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        # The tokenizers library raises plain Exceptions for a damaged file.
        raise ModelLoadError(f"{folder}: the tokenizer cannot be loaded: {_first_line(error)}") from error
    return tokenizer


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
