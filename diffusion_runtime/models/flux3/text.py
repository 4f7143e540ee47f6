"""Text encoder of FLUX.3: the hidden states of eight layers of Qwen3-VL, side by side, padding included."""

from __future__ import annotations

import torch

from diffusion_runtime.core.model_folder import AnyFolder
from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.models.flux3.config import read_transformer_config
from diffusion_runtime.text_encoders.interface import TextEncoder
from diffusion_runtime.text_encoders.language_model import PromptTemplate, StackedStatesEncoder
from diffusion_runtime.text_encoders.language_model_loading import load_qwen3_vl

# The chat format; nothing of it is cut off.
TEMPLATE = PromptTemplate("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n", num_cropped=0)
LAYERS = (4, 8, 12, 16, 20, 24, 28, 32)
# Of a prompt with its template. Its authors' pipeline allows 8192, for which memory would be planned.
MAX_TOKENS = 2048
# Tokens that a prompt is padded to a multiple of; the transformer attends to the padding, as in training.
PAD_MULTIPLE = 80
# Tokens that stand for pictures and videos, of which there are none.
_REMOVED = ("<|image_pad|>", "<|video_pad|>")


def load_text_encoder(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> TextEncoder:
    """Load `text_encoder/` and `tokenizer/` of a model folder, without the layers after the last that is read.

    Raises ModelLoadError when a file is missing, damaged, of another class, or lacks weights, and when the encoder does
    not fit the transformer's size.
    """
    model, tokenizer = load_qwen3_vl(folder, device, dtype, num_layers=max(LAYERS))
    encoder = StackedStatesEncoder(
        model,
        tokenizer,
        TEMPLATE,
        layers=LAYERS,
        max_tokens=MAX_TOKENS,
        removed=_REMOVED,
        pad_multiple=PAD_MULTIPLE,
    )
    text_dim = read_transformer_config(folder).text_dim
    if encoder.dim != text_dim:
        raise ModelLoadError(
            f"{folder / 'text_encoder'}: {len(LAYERS)} layers of it make {encoder.dim} numbers per token, and the "
            f"transformer takes joint_attention_dim, {text_dim}; the two are not of the same model"
        )
    return encoder
