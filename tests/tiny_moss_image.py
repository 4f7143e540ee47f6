"""Tiny MOSS-Image folders: weights that a formula makes, by the names and classes of the published ones."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_encoders import HIDDEN, tiny_qwen_tokenizer

CHANNELS, DIM, FFN_DIM, HEADS, LAYERS, WAVES = 8, 32, 40, 2, 3, 16
# 4 x 6 tokens.
TINY_SIZES: dict[str, int] = {"height": 16, "width": 24}


def write_tiny_moss_image(folder: Path, *, num_layers: int = LAYERS) -> Path:
    """Write a whole folder and return its path; its weights are the same always. num_layers: more than 22 of published
    models, whose block 22 guidance leaves out."""
    from tiny_flux2 import lively
    from tiny_flux3 import tiny_autoencoder
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        text_encoder, tokenizer = tiny_qwen3_5()
        parts = {"vae": tiny_autoencoder(), "text_encoder": lively(text_encoder), "tokenizer": tokenizer}
        for name, part in parts.items():
            part.save_pretrained(folder / name)
    sizes = {"dim": DIM, "ffn_dim": FFN_DIM, "num_heads": HEADS, "num_layers": num_layers, "text_dim": HIDDEN}
    sizes |= {"freq_dim": WAVES, "latent_channels": CHANNELS, "rope_base": 10000.0}
    scheduler = {"num_train_timesteps": 1000, "shift": 5.0, "training_shift": 1.0}
    files = {
        "transformer/config.json": {"_class_name": "MOSSImageTransformer", **sizes},
        "scheduler/scheduler_config.json": {"_class_name": "MOSSImageScheduler", **scheduler},
        "model_index.json": {
            "_class_name": "MOSSImagePipeline",
            "scheduler": ["pipeline_moss_image", "MOSSImageScheduler"],
            "transformer": ["pipeline_moss_image", "MOSSImageTransformer"],
            "vae": ["diffusers", "AutoencoderKLFlux2"],
            "text_encoder": ["transformers", "Qwen3_5TextModel"],
            "tokenizer": ["transformers", "Qwen2Tokenizer"],
        },
    }
    for name, values in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(values))
    save_file(tiny_weights(HIDDEN, num_layers), folder / "transformer" / "diffusion_pytorch_model.safetensors")
    return folder


def tiny_weights(text_dim: int, num_layers: int = LAYERS) -> dict[str, torch.Tensor]:
    """Sines of a number of each weight, in the order of their names, without the table of positions."""
    weights = {}
    for index, (name, shape) in enumerate(sorted(_shapes(text_dim, num_layers))):
        values = torch.sin(torch.arange(math.prod(shape), dtype=torch.float64) * 12.9898 + index)
        values = values * (0.2 if len(shape) == 1 else 1.5 * shape[-1] ** -0.5)
        weights[name] = values.view(shape).float() + ("norm" in name)
    return {**weights, "rope.bands": torch.ones(2)}


def _shapes(text_dim: int, num_layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    def linear(name: str, inward: int, out: int, *, bias: bool = True) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}.weight", (out, inward)
        if bias:
            yield f"{name}.bias", (out,)

    yield from linear("video_embedder", CHANNELS, DIM)
    yield from linear("text_embedder.proj", text_dim, DIM)
    yield from linear("time_embedding.0", WAVES, DIM)
    yield from linear("time_embedding.2", DIM, DIM)
    yield from linear("shared_block_modulation", DIM, 6 * DIM)
    yield from linear("video_head_modulation", DIM, 2 * DIM)
    yield from linear("final_linear_video", DIM, CHANNELS, bias=False)
    yield "final_norm_video.weight", (DIM,)
    blocks = [
        *(f"text_embedder.blocks.{index}" for index in range(2)),
        *(f"layers.{index}" for index in range(num_layers)),
    ]
    for block in blocks:
        for name, size in (("norm1", DIM), ("norm2", DIM), ("q_norm", DIM // HEADS), ("k_norm", DIM // HEADS)):
            yield f"{block}.{name}.weight", (size,)
        if block.startswith("text"):
            yield from linear(f"{block}.qkv", DIM, 3 * DIM)
            yield from linear(f"{block}.proj", DIM, DIM)
            yield from linear(f"{block}.ffn_gate", DIM, FFN_DIM)
            yield from linear(f"{block}.ffn_up", DIM, FFN_DIM)
            yield from linear(f"{block}.ffn_down", FFN_DIM, DIM)
        else:
            for name in "qkvo":
                yield from linear(f"{block}.proj.{name}", DIM, DIM, bias=False)
            yield from linear(f"{block}.proj.ffn_up_gate", DIM, 2 * FFN_DIM, bias=False)
            yield from linear(f"{block}.proj.ffn_down", FFN_DIM, DIM, bias=False)


def tiny_qwen3_5() -> tuple[Any, Any]:
    """Qwen3.5's language model, three layers of linear attention and one of the other, and a tokenizer with its chat
    format."""
    from transformers import Qwen3_5TextConfig, Qwen3_5TextModel

    tokenizer = tiny_qwen_tokenizer(("user", "assistant", "\n", "<think>"))
    tokenizer.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content | trim }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking %}<think>\n{% endif %}"
        "{% endif %}"
    )
    config = Qwen3_5TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
    )
    return Qwen3_5TextModel(config).eval(), tokenizer
