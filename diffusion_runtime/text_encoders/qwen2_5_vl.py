"""The language model of Qwen2.5-VL (Bai et al., arXiv:2502.13923) as a text encoder."""

from __future__ import annotations

from pathlib import Path

import torch

from diffusion_runtime.text_encoders.language_model import LanguageModelEncoder, PromptTemplate
from diffusion_runtime.text_encoders.loading import check_model_type, check_vocabulary, load_encoder, load_tokenizer

# The whole model with its vision half, and the language model alone.
_WHOLE, _TEXT_ALONE = "qwen2_5_vl", "qwen2_5_vl_text"


def load_qwen2_5_vl(
    folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    template: PromptTemplate,
    *,
    max_tokens: int,
    num_layers_left_out: int,
) -> LanguageModelEncoder:
    """`text_encoder/` and `tokenizer/` of a model folder, from safetensors and without a network.

    Text has the same position on all three axes of the model, so that the language model alone computes what the whole
    one does. Raises ModelLoadError when a file is missing, damaged, of another class, or lacks weights.
    """
    kind = check_model_type(folder / "text_encoder", (_WHOLE, _TEXT_ALONE))
    # Imported late: transformers takes seconds.
    from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as modeling

    tokenizer = load_tokenizer(folder / "tokenizer", Qwen2Tokenizer)
    if kind == _WHOLE:
        # Vision and output layers stay behind on the CPU.
        whole = load_encoder(
            folder / "text_encoder", modeling.Qwen2_5_VLForConditionalGeneration, torch.device("cpu"), dtype
        )
        model = whole.model.language_model.to(device)
    else:
        model = load_encoder(folder / "text_encoder", modeling.Qwen2_5_VLTextModel, device, dtype)
    check_vocabulary(folder / "tokenizer", len(tokenizer), model.config.vocab_size)
    return LanguageModelEncoder(
        model, tokenizer, template, max_tokens=max_tokens, num_layers_left_out=num_layers_left_out
    )
