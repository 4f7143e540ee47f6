"""A transformer of video and sound with random weights, and inputs for it, made without diffusers."""

from __future__ import annotations

import torch

from diffusion_runtime.attention import AttentionPolicy
from diffusion_runtime.attention.roles import register_role
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.models.interface import DenoiserInputs
from diffusion_runtime.models.ltx2.config import LTX2Config, StreamConfig
from diffusion_runtime.models.ltx2.family import FAMILY
from diffusion_runtime.models.ltx2.geometry import LTX2Geometry
from diffusion_runtime.models.ltx2.positions import PositionRules
from diffusion_runtime.models.ltx2.transformer import LTX2Transformer
from diffusion_runtime.text_encoders.interface import Conditions, TextStream

GEOMETRY = LTX2Geometry(4, 32, 8, (1, 1, 1), 2, 3, 25.0)
# 3 x 1 x 7 tokens of video, and 17 of sound.
SIZE = ClipSize(32, 224, 17, 25)
TEXT_DIM, LENGTHS = 8, (5, 3)


def sound_denoiser(policy: AttentionPolicy, *, head_dim: int = 8) -> LTX2Transformer:
    """In float32 on the CPU; the same weights at every call."""
    for role, category in FAMILY.roles:
        register_role(role, category)
    sizes = {"num_heads": 4, "text_dim": TEXT_DIM, "has_gates": False, "has_ffn_bias": True}
    config = LTX2Config(
        video=StreamConfig(**sizes, head_dim=head_dim, num_channels=4),
        audio=StreamConfig(**sizes, head_dim=head_dim // 2, num_channels=6),
        num_layers=2,
        eps=1e-6,
        gate_factor=1.0,
        turns_halves=False,
        positions=PositionRules(100.0, True, 1, (8, 32, 32), (20, 2048, 2048), 4, 160, 16000, 20),
        projects_text=True,
        modulates_text=False,
        text_follows_time=False,
        can_skip_attention=False,
        marks_keyframes=False,
    )
    torch.manual_seed(0)
    model = LTX2Transformer(config, GEOMETRY, policy).requires_grad_(False).eval()
    for parameter in model.parameters():
        parameter.add_(0.2 * torch.randn(parameter.shape))
    return model


def sound_inputs(device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor, DenoiserInputs]:
    """Latents, timesteps and what they are conditioned on, of two samples."""
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(2, *GEOMETRY.sample_shape(SIZE), generator=generator).to(device)
    text, audio_text = (torch.randn(2, 5, TEXT_DIM, generator=generator).to(device) for _ in range(2))
    conditions = Conditions.of(text, LENGTHS, further=[TextStream(audio_text, LENGTHS)])
    return latents, torch.tensor([900.0, 40.0], device=device), DenoiserInputs(conditions, SIZE)
