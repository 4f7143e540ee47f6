"""Qwen3 (Yang et al., arXiv:2505.09388) as a text encoder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from diffusion_runtime.text_encoders.language_model import LanguageModelEncoder, PromptTemplate
from diffusion_runtime.text_encoders.loading import check_model_type, check_vocabulary, load_encoder, load_tokenizer
from diffusion_runtime.text_encoders.stacked_states import StackedStatesEncoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def load_qwen3(
    folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    template: PromptTemplate,
    *,
    max_tokens: int,
    num_layers_left_out: int,
) -> LanguageModelEncoder:
    """`text_encoder/` and `tokenizer/` of a model folder, from safetensors and without a network.

    Raises ModelLoadError when a file is missing, damaged, of another class, or lacks weights.
    """
    model, tokenizer = _load(folder, device, dtype)
    return LanguageModelEncoder(
        model, tokenizer, template, max_tokens=max_tokens, num_layers_left_out=num_layers_left_out
    )


def load_stacked_qwen3(
    folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    template: PromptTemplate,
    *,
    max_tokens: int,
    layers: tuple[int, ...],
) -> StackedStatesEncoder:
    """As load_qwen3, for transformers that read several layers; those after the last of them are not read.

    Raises ModelLoadError when a file is missing, damaged, of another class, or lacks weights.
    """
    model, tokenizer = _load(folder, device, dtype, num_layers=max(layers))
    return StackedStatesEncoder(model, tokenizer, template, layers=layers, max_tokens=max_tokens)


def _load(
    folder: Path, device: torch.device, dtype: torch.dtype, *, num_layers: int | None = None
) -> tuple[Any, PreTrainedTokenizerFast]:
    check_model_type(folder / "text_encoder", ("qwen3",))
    # Imported late: transformers takes seconds.
    from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Model

    tokenizer = load_tokenizer(folder / "tokenizer", Qwen2Tokenizer)
    model = load_encoder(folder / "text_encoder", Qwen3Model, device, dtype, num_layers=num_layers)
    check_vocabulary(folder / "tokenizer", len(tokenizer), model.config.vocab_size)
    return model, tokenizer
