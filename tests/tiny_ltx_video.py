"""Tiny LTX-Video folders with random weights, written by diffusers' own classes and a tokenizer made offline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiny_encoders import HIDDEN, tiny_t5

# Sizes of a clip that is quick on two cores: 2 x 2 x 3 latents.
TINY_SIZES: dict[str, int] = {"height": 64, "width": 96, "num_frames": 9, "fps": 25}
CHANNELS = 6
MAX_TEXT_TOKENS = 128


def write_tiny_ltx_video(
    folder: Path, *, takes_conditions: bool = False, decodes_at_a_timestep: bool = True, adds_noise: bool = False
) -> Path:
    """Write a whole folder and return its path. About 1 MB; it depends on nothing but the arguments.

    takes_conditions: of the pipeline for conditions, as 0.9.7 and 0.9.8. decodes_at_a_timestep: as since 0.9.1;
    adds_noise: between the layers of the decoder, as 0.9.1.
    """
    import torch
    from diffusers import FlowMatchEulerDiscreteScheduler, LTXPipeline
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        t5, tokenizer = tiny_t5(MAX_TEXT_TOKENS)
        scheduler = (
            FlowMatchEulerDiscreteScheduler()
            if takes_conditions
            else FlowMatchEulerDiscreteScheduler(
                use_dynamic_shifting=True,
                base_shift=0.95,
                max_shift=2.05,
                base_image_seq_len=1024,
                max_image_seq_len=4096,
                shift_terminal=0.1,
            )
        )
        pipeline = LTXPipeline(
            scheduler=scheduler,
            vae=tiny_vae(decodes_at_a_timestep=decodes_at_a_timestep, adds_noise=adds_noise, is_newer=takes_conditions),
            text_encoder=t5,
            tokenizer=tokenizer,
            transformer=random_transformer(),
        )
    pipeline.save_pretrained(folder)
    if takes_conditions:
        index = json.loads((folder / "model_index.json").read_text())
        (folder / "model_index.json").write_text(json.dumps({**index, "_class_name": "LTXConditionPipeline"}))
    return folder


def random_transformer(**changes: Any) -> Any:
    """Heads whose width no number of axes divides, so that some channels do not turn."""
    import torch
    from diffusers import LTXVideoTransformer3DModel

    settings: dict[str, Any] = {
        "in_channels": CHANNELS,
        "out_channels": CHANNELS,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "cross_attention_dim": 32,
        "num_layers": 2,
        "caption_channels": HIDDEN,
        **changes,
    }
    model = LTXVideoTransformer3DModel(**settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norm weights of exactly one and small modulations would hide a part that is left out.
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            if "table" in name or ".linear" in name:
                parameter.mul_(2.0)
            if "attn2.to_out" in name:
                parameter.mul_(3.0)
    return model.eval()


def tiny_vae(*, decodes_at_a_timestep: bool, adds_noise: bool = False, is_newer: bool = False) -> Any:
    """is_newer: with the encoder since 0.9.5, and a config that says the ratios."""
    import torch
    from diffusers import AutoencoderKLLTXVideo

    encoder: dict[str, Any] = {"block_out_channels": (8, 8, 8, 8)}
    if is_newer:
        encoder = {
            "block_out_channels": (8, 8, 8, 8, 16),
            "down_block_types": ("LTXVideo095DownBlock3D",) * 4,
            "downsample_type": ("spatial", "temporal", "spatiotemporal", "spatiotemporal"),
            "spatio_temporal_scaling": (True, True, True, True),
            "spatial_compression_ratio": 32,
            "temporal_compression_ratio": 8,
        }
    model = AutoencoderKLLTXVideo(
        latent_channels=CHANNELS,
        **encoder,
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_block_out_channels=(8, 16, 32),
        decoder_layers_per_block=(1, 1, 1, 1),
        decoder_spatio_temporal_scaling=(True, True, True),
        decoder_inject_noise=(adds_noise, adds_noise, adds_noise, False),
        upsample_residual=(True, True, True),
        upsample_factor=(2, 2, 2),
        timestep_conditioning=decodes_at_a_timestep,
        decoder_causal=False,
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "per_channel_scale" in name:
                parameter.add_(0.5)
    model.latents_mean.copy_(0.3 * torch.randn(CHANNELS))
    model.latents_std.copy_(0.5 + torch.rand(CHANNELS))
    return model.eval()
