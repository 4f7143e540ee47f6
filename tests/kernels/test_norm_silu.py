"""Norm and SiLU in one pass: Triton against the references, and the references against diffusers' modules."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import HunyuanVideo15RMS_norm
from diffusers.models.autoencoders.autoencoder_kl_ltx2 import PerChannelRMSNorm
from kernels import norm_silu_cases
from triton_interpreter import interpret, needs_triton

from diffusion_runtime.errors import ConfigError
from diffusion_runtime.kernels.norm_silu.api import group_norm_silu, pixel_norm_silu, rms_norm_silu

CASES = Path(__file__).with_name("norm_silu_cases.py")


@needs_triton
def test_triton_under_its_interpreter_equals_the_references() -> None:
    assert interpret(CASES).strip() == ""


@pytest.mark.gpu
def test_triton_on_a_gpu_gives_torchs_bits_where_it_says_so() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        wrong = norm_silu_cases.failures(dtype, "cuda", bound=0.0)
        assert [line for line in wrong if line.startswith(norm_silu_cases.EXACT)] == []
        # Values of 300 in float32: their mean alone is off by up to 1.5e-5.
        assert norm_silu_cases.failures(dtype, "cuda", bound=5e-5 if dtype == torch.float32 else 2e-2) == []


@torch.inference_mode()
def test_the_references_are_what_diffusers_computes() -> None:
    """To the bit, in both dtypes."""
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(1, 8, 3, 4, 5).to(dtype)
        rms = HunyuanVideo15RMS_norm(8, images=False).to(dtype)
        rms.gamma.copy_(torch.randn(8, 1, 1, 1))
        assert torch.equal(rms_norm_silu(x, rms.gamma.flatten(), rms.scale, is_exact=True), F.silu(rms(x)))
        assert torch.equal(pixel_norm_silu(x, 1e-8, is_exact=True), F.silu(PerChannelRMSNorm()(x)))
        group = torch.nn.GroupNorm(4, 8, 1e-6).to(dtype)
        found = group_norm_silu(x, group.weight, group.bias, 4, 1e-6)
        assert torch.equal(found, F.silu(group(x)))


def test_weights_that_do_not_fit_are_refused() -> None:
    x = torch.zeros(1, 6, 3, 4, 5)
    with pytest.raises(ConfigError, match="expected 6 norm weights, got 5"):
        rms_norm_silu(x, torch.zeros(5), 1.0, is_exact=True)
    with pytest.raises(ConfigError, match="6 channels do not make 4 groups"):
        group_norm_silu(x, torch.zeros(6), torch.zeros(6), 4, 1e-6)
