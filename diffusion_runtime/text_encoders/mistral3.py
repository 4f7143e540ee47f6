"""The language model of Mistral Small 3 (https://mistral.ai/news/mistral-small-3-1) as a text encoder."""

from __future__ import annotations

from pathlib import Path

import torch

from diffusion_runtime.text_encoders.language_model import PromptTemplate
from diffusion_runtime.text_encoders.loading import check_model_type, check_vocabulary, load_encoder, load_tokenizer
from diffusion_runtime.text_encoders.stacked_states import StackedStatesEncoder

# The placeholder token of a picture; text prompts have none.
_IMAGE_TOKEN = "[IMG]"


def mistral3_template(system_message: str) -> PromptTemplate:
    """Mistral's chat format (V7-Tekken), written here: a folder's own template is a program (Jinja)."""
    return PromptTemplate(f"<s>[SYSTEM_PROMPT]{system_message}[/SYSTEM_PROMPT][INST]", "[/INST]", num_cropped=0)


def load_mistral3(
    folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    template: PromptTemplate,
    *,
    max_tokens: int,
    layers: tuple[int, ...],
) -> StackedStatesEncoder:
    """`text_encoder/` and `tokenizer/` of a model folder, from safetensors and without a network; the output layer and
    the layers after the last of `layers` are not read, and the vision half stays on the CPU and is dropped.

    Raises ModelLoadError when a file is missing, damaged, of another class, or lacks weights.
    """
    check_model_type(folder / "text_encoder", ("mistral3",))
    # Imported late: transformers takes seconds.
    from transformers.models.mistral3.modeling_mistral3 import Mistral3Model

    tokenizer = load_tokenizer(folder / "tokenizer")
    if "padding_side" not in tokenizer.init_kwargs:
        # The class that published folders name pads there by default, so their files do not set it.
        tokenizer.padding_side = "left"
    whole = load_encoder(folder / "text_encoder", Mistral3Model, torch.device("cpu"), dtype, num_layers=max(layers))
    model = whole.language_model
    check_vocabulary(folder / "tokenizer", len(tokenizer), model.config.vocab_size)
    return StackedStatesEncoder(
        model.to(device), tokenizer, template, layers=layers, max_tokens=max_tokens, removed=(_IMAGE_TOKEN,)
    )
