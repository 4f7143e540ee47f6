"""The transformer on a GPU against itself on the CPU. Needs no diffusers."""

from __future__ import annotations

import pytest
import torch
from sound_denoiser import sound_denoiser, sound_inputs

from diffusion_runtime.attention import AttentionContext, AttentionPolicy
from diffusion_runtime.models.ltx2.family import FAMILY

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)])
def test_forward_equals_the_cpu(dtype: torch.dtype, tolerance: float) -> None:
    expected = sound_denoiser(AttentionPolicy(), head_dim=64)(*sound_inputs(), AttentionContext())
    model = sound_denoiser(AttentionPolicy(device="cuda", dtype=dtype), head_dim=64)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to("cuda", torch.float32 if FAMILY.weights.stays_float32(name) else dtype)
    out = model(*sound_inputs("cuda"), AttentionContext())
    assert out.device.type == "cuda"
    assert float((out.cpu() - expected).abs().max() / expected.abs().max()) < tolerance
