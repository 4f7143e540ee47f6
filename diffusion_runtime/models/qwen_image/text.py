"""The prompt as Qwen-Image's language model is asked about it."""

from __future__ import annotations

from pathlib import Path

import torch

from diffusion_runtime.text_encoders.interface import TextEncoder
from diffusion_runtime.text_encoders.language_model import PromptTemplate
from diffusion_runtime.text_encoders.qwen2_5_vl import load_qwen2_5_vl

# What the model was trained with (arXiv:2508.02324, figure 7); the 34 tokens before the prompt are not handed on.
TEMPLATE = PromptTemplate(
    before=(
        "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
        "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n"
    ),
    after="<|im_end|>\n<|im_start|>assistant\n",
    num_cropped=34,
)
# Of the prompt and the five tokens behind it.
MAX_TOKENS = 512


def load_text_encoder(folder: Path, device: torch.device, dtype: torch.dtype) -> TextEncoder:
    """The last hidden states of the folder's Qwen2.5-VL. Raises ModelLoadError."""
    return load_qwen2_5_vl(folder, device, dtype, TEMPLATE, max_tokens=MAX_TOKENS, num_layers_left_out=0)
