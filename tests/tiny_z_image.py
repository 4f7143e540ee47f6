"""Tiny Z-Image folders with random weights, written by diffusers' own classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_encoders import HIDDEN, tiny_qwen3

CHANNELS = 4
# 8 x 12 latents, 4 x 6 tokens: 8 more fill them up to 32.
TINY_SIZES: dict[str, int] = {"height": 16, "width": 24}


def write_tiny_z_image(folder: Path, *, flow_shift: float = 3.0) -> Path:
    """Write a whole folder and return its path; its weights are the same always. flow_shift: 6 of the model before
    distillation."""
    import torch
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, ZImagePipeline
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        text_encoder, tokenizer = tiny_qwen3()
        vae = AutoencoderKL(
            block_out_channels=(8, 8),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            latent_channels=CHANNELS,
            norm_num_groups=4,
            use_quant_conv=False,
            use_post_quant_conv=False,
            scaling_factor=0.3611,
            shift_factor=0.1159,
        )
        pipeline = ZImagePipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(shift=flow_shift),
            vae=vae.eval(),
            text_encoder=text_encoder,
            tokenizer=tokenizer,
            transformer=tiny_transformer(),
        )
    pipeline.save_pretrained(folder)
    return folder


def tiny_transformer() -> Any:
    import torch
    from diffusers import ZImageTransformer2DModel

    model = ZImageTransformer2DModel(
        in_channels=CHANNELS,
        dim=48,
        n_layers=2,
        n_refiner_layers=2,
        n_heads=3,
        n_kv_heads=3,
        cap_feat_dim=HIDDEN,
        axes_dims=[4, 6, 6],
        axes_lens=[256, 64, 64],
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norm weights of one and filling tokens of zero would hide that one of them is left out.
            if "norm" in name or "pad_token" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()
