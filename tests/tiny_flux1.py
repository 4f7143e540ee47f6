"""Tiny FLUX.1 folders with random weights, written by diffusers' own classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiny_encoders import HIDDEN, tiny_clip, tiny_t5

CHANNELS = 4
MAX_TEXT_TOKENS = 20
# 8 x 12 latents, 4 x 6 tokens.
TINY_SIZES: dict[str, int] = {"height": 16, "width": 24}


def write_tiny_flux1(
    folder: Path,
    *,
    embeds_guidance: bool = True,
    shifts_by_size: bool = True,
    pipeline_class: str = "FluxPipeline",
    condition_channels: int = 0,
) -> Path:
    """Write a whole folder and return its path. embeds_guidance, shifts_by_size: both as in [dev], neither as in
    [schnell]. condition_channels: beside the latents, as in Fill. The weights depend on nothing but the arguments."""
    import torch
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        clip, clip_tokenizer = tiny_clip()
        t5, t5_tokenizer = tiny_t5(MAX_TEXT_TOKENS)
        vae = AutoencoderKL(
            block_out_channels=(8, 8),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            latent_channels=CHANNELS,
            norm_num_groups=4,
            use_quant_conv=False,
            use_post_quant_conv=False,
            scaling_factor=0.3611,
            # Larger than the published 0.1159: so small a one would not show in pictures of random weights.
            shift_factor=1.5,
        )
        pipeline = FluxPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=shifts_by_size),
            vae=vae.eval(),
            text_encoder=clip,
            tokenizer=clip_tokenizer,
            text_encoder_2=t5,
            tokenizer_2=t5_tokenizer,
            transformer=tiny_transformer(embeds_guidance, condition_channels),
        )
    pipeline.save_pretrained(folder)
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, "_class_name": pipeline_class}))
    return folder


def tiny_transformer(embeds_guidance: bool = True, condition_channels: int = 0) -> Any:
    import torch
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        in_channels=4 * (CHANNELS + condition_channels),
        out_channels=4 * CHANNELS,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=HIDDEN,
        pooled_projection_dim=HIDDEN,
        guidance_embeds=embeds_guidance,
        axes_dims_rope=(4, 6, 6),
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norm weights of exactly one would hide a norm that is left out; small projections a prompt that is.
            if "norm_" in name and parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif parameter.dim() == 2:
                parameter.mul_(2.0)
    return model.eval()
