"""Tiny Anima folders with random weights, of diffusers' and transformers' own classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiny_encoders import HIDDEN, tiny_qwen3, tiny_t5
from tiny_qwen_image import tiny_autoencoder

CHANNELS = 4
# Wider than the language model's states, and than the conditioner inside.
TEXT_DIM, CONDITIONER_DIM = 40, 48
MIN_TOKENS = 24
# 8 x 12 latents, 4 x 6 tokens.
TINY_SIZES: dict[str, int] = {"height": 32, "width": 48}


def write_tiny_anima(folder: Path) -> Path:
    """Write a whole folder and return its path; its weights are the same always. Its index is that of the ordinary
    pipeline which the modular one is opened as."""
    import torch
    from diffusers import FlowMatchEulerDiscreteScheduler
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        text_encoder, tokenizer = tiny_qwen3()
        t5_tokenizer = tiny_t5(512)[1]
        parts = {
            "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0),
            "vae": tiny_autoencoder(CHANNELS),
            "text_encoder": text_encoder,
            "tokenizer": tokenizer,
            "t5_tokenizer": t5_tokenizer,
            # Ids above 255 have two digits.
            "text_conditioner": tiny_conditioner(len(t5_tokenizer) + 300),
            "transformer": tiny_transformer(),
        }
    for name, part in parts.items():
        part.save_pretrained(folder / name)
    index = {name: ["diffusers", type(part).__name__] for name, part in parts.items()}
    index["text_encoder"] = ["transformers", "Qwen3Model"]
    index["tokenizer"], index["t5_tokenizer"] = (
        ["transformers", each] for each in ("Qwen2Tokenizer", "T5TokenizerFast")
    )
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "AnimaPipeline", **index}))
    return folder


def tiny_transformer() -> Any:
    from diffusers import CosmosTransformer3DModel

    return lively(
        CosmosTransformer3DModel(
            in_channels=CHANNELS,
            out_channels=CHANNELS,
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=3,
            mlp_ratio=3.0,
            text_embed_dim=TEXT_DIM,
            adaln_lora_dim=12,
            max_size=(8, 96, 96),
            rope_scale=(1.0, 4.0, 3.0),
            extra_pos_embed_type=None,
        )
    )


def tiny_conditioner(vocab_size: int) -> Any:
    from diffusers import AnimaTextConditioner

    return lively(
        AnimaTextConditioner(
            source_dim=HIDDEN,
            target_dim=TEXT_DIM,
            model_dim=CONDITIONER_DIM,
            num_layers=2,
            num_attention_heads=4,
            mlp_ratio=2.0,
            target_vocab_size=vocab_size,
            min_sequence_length=MIN_TOKENS,
        )
    )


def lively(model: Any) -> Any:
    """Norm weights of exactly one would hide a norm that is left out; small projections a prompt that is."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif parameter.dim() == 2:
                parameter.mul_(2.0)
    return model.eval()
