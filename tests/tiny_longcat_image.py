"""Tiny LongCat-Image folders with random weights, written by diffusers' own classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_encoders import HIDDEN, tiny_qwen2_5_vl

CHANNELS = 4
# 8 x 12 latents, 4 x 6 tokens.
TINY_SIZES: dict[str, int] = {"height": 16, "width": 24}


def write_tiny_longcat_image(folder: Path) -> Path:
    """Write a whole folder and return its path; its weights are the same always."""
    import torch
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, LongCatImagePipeline
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        text_encoder, tokenizer = tiny_qwen2_5_vl()
        vae = AutoencoderKL(
            block_out_channels=(8, 8),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            latent_channels=CHANNELS,
            norm_num_groups=4,
            use_quant_conv=False,
            use_post_quant_conv=False,
            scaling_factor=0.3611,
            shift_factor=1.5,
        )
        pipeline = LongCatImagePipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
            vae=vae.eval(),
            text_encoder=text_encoder,
            tokenizer=tokenizer,
            # Rewrites prompts, and nothing else; the published one prepares pictures too, by torchvision.
            text_processor=tokenizer,
            transformer=tiny_transformer(),
        )
    pipeline.save_pretrained(folder)
    return folder


def tiny_transformer() -> Any:
    import torch
    from diffusers import LongCatImageTransformer2DModel

    model = LongCatImageTransformer2DModel(
        in_channels=4 * CHANNELS,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=HIDDEN,
        pooled_projection_dim=HIDDEN,
        axes_dims_rope=[4, 6, 6],
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norm weights of exactly one would hide a norm that is left out; small projections a prompt that is.
            if "norm_" in name and parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif parameter.dim() == 2:
                parameter.mul_(2.0)
    return model.eval()
