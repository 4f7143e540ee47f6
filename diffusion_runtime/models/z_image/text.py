"""How Z-Image reads a prompt: as a user's message to Qwen3, by the hidden states before its last layer."""

from __future__ import annotations

from pathlib import Path

import torch

from diffusion_runtime.text_encoders.interface import TextEncoder
from diffusion_runtime.text_encoders.language_model import PromptTemplate
from diffusion_runtime.text_encoders.qwen3 import load_qwen3

MAX_TOKENS = 512
# Qwen3's chat format; nothing of it is cut off.
TEMPLATE = PromptTemplate("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n", num_cropped=0)


def load_text_encoder(folder: Path, device: torch.device, dtype: torch.dtype) -> TextEncoder:
    """Raises ModelLoadError when a file is missing, damaged, of another class, or lacks weights."""
    return load_qwen3(folder, device, dtype, TEMPLATE, max_tokens=MAX_TOKENS, num_layers_left_out=1)
