"""Tiny Qwen-Image folders with random weights, written by diffusers' own classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiny_encoders import HIDDEN, tiny_qwen2_5_vl

CHANNELS = 4
# 8 x 12 latents, 4 x 6 tokens.
TINY_SIZES: dict[str, int] = {"height": 32, "width": 48}


def write_tiny_qwen_image(folder: Path, *, edits: str | None = None) -> Path:
    """Write a whole folder and return its path; its settings are the published model's, its weights the same always.
    edits: the class of a pipeline for editing, in place of the one for text alone."""
    import torch
    from diffusers import FlowMatchEulerDiscreteScheduler, QwenImagePipeline
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        text_encoder, tokenizer = tiny_qwen2_5_vl(TEMPLATE_WORDS, sees=edits is not None)
        vae = tiny_autoencoder(CHANNELS)
        scheduler = FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True,
            base_shift=0.5,
            max_shift=0.9,
            base_image_seq_len=256,
            max_image_seq_len=8192,
            shift_terminal=0.02,
        )
        pipeline = QwenImagePipeline(
            scheduler=scheduler,
            vae=vae,
            text_encoder=text_encoder,
            tokenizer=tokenizer,
            transformer=tiny_transformer(),
        )
    pipeline.save_pretrained(folder)
    if edits is not None:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        index = json.loads((folder / "model_index.json").read_text())
        index |= {"_class_name": edits, "processor": ["transformers", "Qwen2VLProcessor"]}
        (folder / "model_index.json").write_text(json.dumps(index))
        Qwen2VLImageProcessorPil().save_pretrained(folder / "processor")
    return folder


# The words of the pipeline's template, so that each is one token and the template as long as the published one's.
TEMPLATE_WORDS = (
    "Describe the image by detailing the color, shape, size, texture, quantity, text, spatial relationships of the "
    "objects and background:",
    "system",
    "user",
    "assistant",
    "\n",
)


def tiny_autoencoder(num_channels: int) -> Any:
    import torch
    from diffusers import AutoencoderKLQwenImage

    model = AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=num_channels,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True],
        latents_mean=(0.3 * torch.randn(num_channels)).tolist(),
        latents_std=(0.5 + torch.rand(num_channels)).tolist(),
    )
    return model.eval()


def tiny_transformer() -> Any:
    import torch
    from diffusers import QwenImageTransformer2DModel

    model = QwenImageTransformer2DModel(
        in_channels=4 * CHANNELS,
        out_channels=CHANNELS,
        num_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=HIDDEN,
        axes_dims_rope=(4, 6, 6),
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norm weights of exactly one would hide a norm that is left out; small projections a prompt that is.
            if "norm" in name and parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif parameter.dim() == 2:
                parameter.mul_(2.0)
    return model.eval()
