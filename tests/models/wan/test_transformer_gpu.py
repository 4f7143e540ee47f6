"""The transformer on a GPU against itself on the CPU. Needs no diffusers."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from denoiser_inputs import text_inputs

from diffusion_runtime.attention import AttentionContext, AttentionPolicy
from diffusion_runtime.attention.roles import register_role
from diffusion_runtime.core.latent_geometry import LatentGeometry
from diffusion_runtime.models.interface import ImageCondition
from diffusion_runtime.models.wan.config import WanTransformerConfig
from diffusion_runtime.models.wan.family import FAMILY
from diffusion_runtime.models.wan.transformer import WanTransformer
from diffusion_runtime.models.wan.vace import CONTROL_SELF_ROLE, CONTROL_TEXT_ROLE, WanVaceTransformer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

PATCH = (1, 2, 2)
CONFIG = WanTransformerConfig(
    num_layers=2,
    num_heads=4,
    head_dim=64,
    ffn_dim=512,
    num_channels=16,
    text_dim=32,
    num_waves=64,
    patch=PATCH,
    norm_cross=True,
    eps=1e-6,
)


CONTROLLED = dataclasses.replace(CONFIG, control_layers=(0,), control_channels=96)


def build(device: str, dtype: torch.dtype, config: WanTransformerConfig = CONFIG) -> WanTransformer:
    """The same random weights on every device."""
    policy = AttentionPolicy(device=device, dtype=dtype)
    torch.manual_seed(0)
    if config.control_layers:
        register_role(CONTROL_SELF_ROLE, "self")
        register_role(CONTROL_TEXT_ROLE, "cross")
    made = WanVaceTransformer if config.control_layers else WanTransformer
    model = made(config, LatentGeometry(16, 8, 4, PATCH), policy).requires_grad_(False).eval()
    for name, parameter in model.named_parameters():
        parameter.add_(0.1 * torch.randn(parameter.shape))
        parameter.data = parameter.data.to(device, torch.float32 if FAMILY.weights.stays_float32(name) else dtype)
    return model


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)])
@pytest.mark.parametrize("batch", [1, 2])
def test_forward_equals_the_cpu(dtype: torch.dtype, tolerance: float, batch: int) -> None:
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(batch, 16, 3, 10, 14, generator=generator)
    timestep = torch.linspace(900.0, 20.0, batch)
    text = torch.randn(batch, 9, 32, generator=generator)
    expected = build("cpu", torch.float32)(latents, timestep, text_inputs(text), AttentionContext())
    model = build("cuda", dtype)
    out = model(latents.cuda(), timestep.cuda(), text_inputs(text.cuda()), AttentionContext())
    assert out.device.type == "cuda"
    assert float((out.cpu() - expected).abs().max() / expected.abs().max()) < tolerance


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)])
def test_control_blocks_equal_the_cpu(dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(1)
    latents, control = (torch.randn(2, channels, 3, 10, 14, generator=generator) for channels in (16, 96))
    timestep, text = torch.tensor([900.0, 20.0]), torch.randn(2, 9, 32, generator=generator)
    given = dataclasses.replace(text_inputs(text), image=ImageCondition(control))
    expected = build("cpu", torch.float32, CONTROLLED)(latents, timestep, given, AttentionContext())
    there = dataclasses.replace(text_inputs(text.cuda()), image=ImageCondition(control.cuda()))
    out = build("cuda", dtype, CONTROLLED)(latents.cuda(), timestep.cuda(), there, AttentionContext())
    assert float((out.cpu() - expected).abs().max() / expected.abs().max()) < tolerance
