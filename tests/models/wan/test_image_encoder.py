"""The image that a video starts from, encoded by fused layers, against diffusers' module."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan
from tiny_models import write_tiny_wan

from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.decoders.fused_norms import LastTap, NormSilu
from diffusion_runtime.models.wan.codec import FusedEncoder, WanImageConditioner, as_pixels, load_image_conditioner

CPU = torch.device("cpu")
SIZE = ClipSize(64, 96, 5, 16)
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "patched": {"patch_size": 2, "in_channels": 12, "out_channels": 12},
    "residual": {"patch_size": 2, "in_channels": 12, "out_channels": 12, "is_residual": True},
}


def autoencoder(kind: str, dtype: torch.dtype = torch.float32, device: str = "cpu", **size: Any) -> Any:
    settings = {"base_dim": 8, "dim_mult": [1, 2, 2], "num_res_blocks": 1, "temperal_downsample": [False, True]}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = AutoencoderKLWan(**{**settings, **KINDS[kind], **size})
        for name, parameter in module.named_parameters():
            if name.endswith(("gamma", "bias")):
                parameter.data = 0.2 * torch.randn_like(parameter) + (1.0 if name.endswith("gamma") else 0.0)
    return module.eval().requires_grad_(False).to(device, dtype)


def conditioner(module: Any) -> WanImageConditioner:
    return WanImageConditioner(module, (0.1,) * 16, (2.0,) * 16)


def picture() -> torch.Tensor:
    return torch.randint(0, 256, (SIZE.height, SIZE.width, 3), generator=torch.Generator().manual_seed(0)).byte()


def test_fast_gives_the_latents_of_the_module() -> None:
    """The same ones at the first image of a size, which is compared, and later. Every convolution over frames has one
    tap left, and every norm its SiLU."""
    for kind in KINDS:
        module = autoencoder(kind)
        plain = conditioner(module)
        fast = plain.fast()
        expected = plain.encode(picture(), SIZE).latents
        first, second = (fast.encode(picture(), SIZE).latents for _ in range(2))
        torch.testing.assert_close(first, expected, atol=1e-5, rtol=1e-5)
        assert torch.equal(first, second)
        assert fast.implementation == "AutoencoderKLWan's encoder, norm and SiLU fused, one tap, fast"
        assert plain.implementation == "AutoencoderKLWan's encoder"
        parts = list(fast._fused[0].autoencoder.encoder.modules())
        # Two in each of five blocks (three levels, two in the middle), the first and the last.
        assert sum(isinstance(part, LastTap) for part in parts) == 12
        assert sum(isinstance(part, NormSilu) for part in parts) == 11
        assert not any(isinstance(part, LastTap | NormSilu) for part in module.modules())


def test_an_encoder_that_gives_other_latents_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    """Nor one that does not compile."""
    module = autoencoder("plain")
    wrong = autoencoder("plain")
    wrong.encoder.norm_out.gamma.mul_(1.001)

    class Uncompilable:
        def encode(self, _: torch.Tensor) -> None:
            raise RuntimeError("no code for sm_120")

    fused = [FusedEncoder(wrong, math.inf, "wrong"), FusedEncoder(Uncompilable(), math.inf, "new")]
    checked = WanImageConditioner(module, (0.1,) * 16, (2.0,) * 16, fused)
    expected = conditioner(module).encode(picture(), SIZE).latents
    for _ in range(2):
        assert torch.equal(checked.encode(picture(), SIZE).latents, expected)
    assert "wrong is left out on this machine: its latents are not those without fused kernels" in caplog.text
    assert "new is left out on this machine: RuntimeError: no code for sm_120" in caplog.text
    assert checked.implementation == "AutoencoderKLWan's encoder"


def test_a_folder_s_encoder_has_both_modes(tmp_path: Path) -> None:
    folder = write_tiny_wan(tmp_path / "wan", vae="residual")
    exact = load_image_conditioner(folder, CPU, torch.float32)
    fast = exact.fast()
    for _ in range(2):
        found, expected = (each.encode(picture(), SIZE).latents for each in (fast, exact))
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
def test_a_gpu_encodes_with_kernels_to_the_bit_and_fast() -> None:
    """64 channels, as real encoders have 96 and more."""
    for kind in KINDS:
        module = autoencoder(kind, torch.bfloat16, "cuda", base_dim=64)
        plain = WanImageConditioner(module, (0.1,) * 16, (2.0,) * 16, [])
        expected = plain.encode(picture(), SIZE).latents
        exact = conditioner(module)
        assert all(torch.equal(exact.encode(picture(), SIZE).latents, expected) for _ in range(2))
        assert "norm and SiLU fused, bit-identical" in exact.implementation
        fast = plain.fast()
        for _ in range(2):
            error = (fast.encode(picture(), SIZE).latents - expected).std() / expected.std()
            assert error < 0.02
        assert "fast" in fast.implementation


@pytest.mark.gpu
def test_a_gpu_encodes_clips_with_kernels_to_the_bit_and_fast() -> None:
    """An image and zeros, as image-to-video models have it beside the latents; all three taps of every convolution."""
    module = autoencoder("plain", torch.bfloat16, "cuda", base_dim=64)
    frames = torch.zeros(3, 13, SIZE.height, SIZE.width)
    frames[:, 0] = as_pixels(picture())
    made = [WanImageConditioner(module, (0.1,) * 16, (2.0,) * 16, fused, one_frame=False) for fused in ([], None)]
    expected, exact = (each.encode_frames(frames) for each in made)
    assert torch.equal(exact, expected)
    assert made[1].implementation == "AutoencoderKLWan's encoder, norm and SiLU fused, bit-identical"
    fast = made[0].fast()
    for _ in range(2):
        assert (fast.encode_frames(frames) - expected).std() < 0.02 * expected.std()
