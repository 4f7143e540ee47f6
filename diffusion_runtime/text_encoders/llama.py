"""LLaMA (Touvron et al. 2023, arXiv:2302.13971; version 3: arXiv:2407.21783) as a text encoder."""

from __future__ import annotations

from pathlib import Path

import torch

from diffusion_runtime.text_encoders.language_model import LanguageModelEncoder, PromptTemplate
from diffusion_runtime.text_encoders.loading import check_model_type, check_vocabulary, load_encoder, load_tokenizer


def load_llama(
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
    check_model_type(folder / "text_encoder", ("llama",))
    # Imported late: transformers takes seconds.
    from transformers.models.llama.modeling_llama import LlamaModel

    tokenizer = load_tokenizer(folder / "tokenizer")
    model = load_encoder(folder / "text_encoder", LlamaModel, device, dtype)
    check_vocabulary(folder / "tokenizer", len(tokenizer), model.config.vocab_size)
    return LanguageModelEncoder(
        model, tokenizer, template, max_tokens=max_tokens, num_layers_left_out=num_layers_left_out
    )
