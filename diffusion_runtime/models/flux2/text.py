"""Text encoder of FLUX.2: hidden states of three layers of a language model, which reads the prompt as a message."""

from __future__ import annotations

import torch

from diffusion_runtime.core.model_folder import AnyFolder
from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.models.flux2.config import read_pipeline_config, read_transformer_config
from diffusion_runtime.text_encoders.interface import TextEncoder
from diffusion_runtime.text_encoders.language_model import PromptTemplate
from diffusion_runtime.text_encoders.language_model_loading import load_mistral3, load_stacked_qwen3, mistral3_template

MAX_TOKENS = 512
# It contains the line break, as in training.
SYSTEM_MESSAGE = (
    "You are an AI that reasons about image descriptions. You give structured responses focusing on object "
    "relationships, object\nattribution and actions without speculation."
)
DEV_TEMPLATE, DEV_LAYERS = mistral3_template(SYSTEM_MESSAGE), (10, 20, 30)
# Qwen3's chat format, for an answer without thinking first.
KLEIN_TEMPLATE = PromptTemplate(
    "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n", num_cropped=0
)
KLEIN_LAYERS = (9, 18, 27)


def load_text_encoder(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> TextEncoder:
    """Load Mistral Small 3 for [dev], Qwen3 for [klein].

    Raises ModelLoadError when a file is missing, damaged, of another class, or lacks weights, and when the encoder does
    not fit the transformer's size.
    """
    if read_pipeline_config(folder).is_klein:
        encoder = load_stacked_qwen3(folder, device, dtype, KLEIN_TEMPLATE, max_tokens=MAX_TOKENS, layers=KLEIN_LAYERS)
    else:
        encoder = load_mistral3(folder, device, dtype, DEV_TEMPLATE, max_tokens=MAX_TOKENS, layers=DEV_LAYERS)
    text_dim = read_transformer_config(folder).text_dim
    if encoder.dim != text_dim:
        raise ModelLoadError(
            f"{folder / 'text_encoder'}: three layers of it make {encoder.dim} numbers per token, and the transformer "
            f"takes joint_attention_dim, {text_dim}; the two are not of the same model"
        )
    return encoder
