"""SeedVR2's autoencoder against its authors' code, in pieces, bands and tiles; colours against the programs in use.

recorded.npz was made by github.com/ByteDance-Seed/SeedVR at 673b563 (models/video_vae_v3, weights of
tests/tiny_seedvr2.py), and the colours by src/utils/color_fix.py of github.com/numz/ComfyUI-SeedVR2_VideoUpscaler at
4490bd1; every few numbers.
"""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch
from tiny_seedvr2 import VAE, tiny_autoencoder

from diffusion_runtime.decoders import replicating_autoencoder
from diffusion_runtime.decoders.replicating_autoencoder import AutoencoderKLSeedVR2
from diffusion_runtime.decoders.sample_decoder import Tiling
from diffusion_runtime.models.seedvr2.colors import CORRECTIONS

RECORDED = numpy.load(Path(__file__).with_name("recorded.npz"))


@pytest.fixture(scope="module")
def autoencoder() -> AutoencoderKLSeedVR2:
    module = AutoencoderKLSeedVR2(**{key: value for key, value in VAE.items() if key != "scaling_factor"})
    module.load_state_dict(tiny_autoencoder())
    return module.requires_grad_(False).eval()


@pytest.fixture(scope="module")
def clip() -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels and latents."""
    generator = torch.Generator().manual_seed(12)
    pixels = torch.rand(1, 3, 9, 24, 40, generator=generator) * 2 - 1
    return pixels, torch.randn(1, 4, 3, 3, 5, generator=generator)


def pieces(pixels: torch.Tensor) -> list[torch.Tensor]:
    return [pixels[:, :, :1], *torch.split(pixels[:, :, 1:], 4, dim=2)]


def test_latents_and_frames_are_those_of_the_authors(
    autoencoder: AutoencoderKLSeedVR2, clip: tuple[torch.Tensor, torch.Tensor]
) -> None:
    mean, std = autoencoder.encode(pieces(clip[0]))
    assert numpy.abs(mean.flatten()[::5].numpy() - RECORDED["mean"]).max() < 1e-5
    assert numpy.abs(std.flatten()[::5].numpy() - RECORDED["std"]).max() < 1e-5
    (frames,) = autoencoder.decode(clip[1])
    assert frames.shape == (1, 3, 9, 24, 40)
    assert numpy.abs(frames.flatten()[::131].numpy() - RECORDED["frames"]).max() < 1e-5


def test_convolutions_of_many_numbers_run_in_bands(
    autoencoder: AutoencoderKLSeedVR2, clip: tuple[torch.Tensor, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = *autoencoder.encode(pieces(clip[0])), *autoencoder.decode(clip[1])
    bands: list[int] = []
    whole = replicating_autoencoder.CausalConvolution._in_bands
    monkeypatch.setattr(
        replicating_autoencoder.CausalConvolution,
        "_in_bands",
        lambda self, x, number: bands.append(number) or whole(self, x, number),
    )
    monkeypatch.setattr(replicating_autoencoder, "MAX_NUMBERS", 4000)
    made = *autoencoder.encode(pieces(clip[0])), *autoencoder.decode(clip[1])
    assert max(bands) > 4
    for ours, theirs in zip(made, expected, strict=True):
        assert (ours - theirs).abs().max() < 1e-5


def test_the_encoder_blends_tiles(autoencoder: AutoencoderKLSeedVR2, clip: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Of 3 x 5 latents two tiles of 3 x 3, which share the column in the middle."""
    pixels = clip[0]
    tiled, _ = autoencoder.encode(pieces(pixels), Tiling(3, 2, 8, keeps_ends=True))
    left, right = (autoencoder.encode(pieces(pixels[..., start : start + 24]))[0] for start in (0, 16))
    assert torch.equal(tiled[..., :2], left[..., :2])
    assert torch.equal(tiled[..., 3:], right[..., 1:])
    # The first column of a tile is all of the one before: linear blending begins there.
    assert torch.equal(tiled[..., 2], left[..., 2])
    whole, _ = autoencoder.encode(pieces(pixels))
    assert not torch.equal(whole, tiled)
    untiled, _ = autoencoder.encode(pieces(pixels), Tiling(5, 4, 8, keeps_ends=True))
    assert torch.equal(untiled, whole)


@pytest.mark.parametrize("name", ["wavelet", "lab", "adain"])
def test_colours_are_those_of_the_programs_in_use(name: str) -> None:
    generator = torch.Generator().manual_seed(13)
    made = torch.rand(2, 3, 40, 56, generator=generator) * 2 - 1
    given = (torch.rand(2, 3, 40, 56, generator=generator) ** 2) * 2 - 1
    before = made.clone(), given.clone()
    corrected = CORRECTIONS[name](made, given)
    assert numpy.abs(corrected.flatten()[::97].numpy() - RECORDED[name]).max() < 2e-5
    # Neither is overwritten: both are views of what is still read.
    assert torch.equal(made, before[0])
    assert torch.equal(given, before[1])
