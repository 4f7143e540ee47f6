"""Tiny Qwen-Image 2.1 transformers with random weights, of diffusers' own class."""

from __future__ import annotations

from typing import Any

from tiny_encoders import HIDDEN

CHANNELS = 6


def tiny_transformer() -> Any:
    import torch
    from diffusers import QwenImage21Transformer2DModel

    model = QwenImage21Transformer2DModel(
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        num_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        context_in_dim=HIDDEN,
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
