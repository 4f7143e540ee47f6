"""Tiny Krea 2 folders with random weights, written by diffusers' own classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_encoders import HIDDEN
from tiny_qwen_image import TEMPLATE_WORDS, tiny_autoencoder
from tiny_qwen_image_21 import tiny_qwen3_vl

CHANNELS = 4
# 8 x 12 latents, 4 x 6 tokens.
TINY_SIZES: dict[str, int] = {"height": 32, "width": 48}
# The input of the language model is one of them, and its last layer is none.
TEXT_LAYERS = (0, 1, 2)


def write_tiny_krea2(folder: Path, *, is_distilled: bool = False) -> Path:
    """Write a whole folder and return its path; its weights are the same always."""
    import torch
    from diffusers import FlowMatchEulerDiscreteScheduler, Krea2Pipeline
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        text_encoder, tokenizer = tiny_qwen3_vl(TEMPLATE_WORDS)
        pipeline = Krea2Pipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(
                use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15, base_image_seq_len=16, max_image_seq_len=4096
            ),
            vae=tiny_autoencoder(CHANNELS),
            text_encoder=text_encoder.model,
            tokenizer=tokenizer,
            transformer=tiny_transformer(),
            text_encoder_select_layers=TEXT_LAYERS,
            is_distilled=is_distilled,
        )
    pipeline.save_pretrained(folder)
    return folder


def tiny_transformer() -> Any:
    """Twice as many heads of queries as of keys in the joint blocks, three times in those of the text."""
    import torch
    from diffusers import Krea2Transformer2DModel

    model = Krea2Transformer2DModel(
        in_channels=4 * CHANNELS,
        num_layers=3,
        attention_head_dim=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=96,
        timestep_embed_dim=16,
        text_hidden_dim=HIDDEN,
        num_text_layers=len(TEXT_LAYERS),
        text_num_attention_heads=4,
        text_num_key_value_heads=2,
        text_intermediate_size=48,
        axes_dims_rope=(4, 6, 6),
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Weights of zero would hide a norm or a table that is left out; small projections a prompt that is.
            if "norm" in name or "table" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif parameter.dim() == 2:
                parameter.mul_(2.0)
    return model.eval()
