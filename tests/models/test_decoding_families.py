"""Tiles and fused norms of the HunyuanVideo, LTX-2, Wan and Qwen-Image decoders, against diffusers' modules."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import process_environment
from diffusers import (
    AutoencoderKLHunyuanVideo,
    AutoencoderKLHunyuanVideo15,
    AutoencoderKLLTX2Video,
    AutoencoderKLQwenImage,
)
from warm_python import start_python

from diffusion_runtime.decoders.causal_video_decoder import exact_decoder
from diffusion_runtime.decoders.decoder_memory import widest_activation
from diffusion_runtime.decoders.fused_norms import NormSilu, fuse_norms, with_shared_weights
from diffusion_runtime.decoders.sample_decoder import Tiling, WholeDecoder
from diffusion_runtime.decoders.video_decoder import (
    Decoders,
    FusedDecoder,
    VideoDecoder,
    by_factor,
    norm_fused,
    to_unit_range,
)
from diffusion_runtime.errors import ConfigError, DeviceMemoryError
from diffusion_runtime.layers.convolution import OneDnnConvolutions
from diffusion_runtime.models.flux1.family import FAMILY as FLUX1

HUNYUAN = {"block_out_channels": (4, 8, 8, 8), "layers_per_block": 1, "norm_num_groups": 4}
HUNYUAN_15 = {"latent_channels": 8, "block_out_channels": (4, 8, 8, 16, 16), "layers_per_block": 1}
LTX = {
    "latent_channels": 6,
    "block_out_channels": (8, 8, 8, 8),
    "decoder_block_out_channels": (8, 16, 32),
    "layers_per_block": (1,) * 5,
    "decoder_layers_per_block": (1,) * 4,
}
QWEN = {"base_dim": 4, "dim_mult": [1, 2, 2], "num_res_blocks": 1, "temperal_downsample": [True, True]}
# The class, its settings, its decoder without tiles, and how tiles of a quarter of the published size are set.
KINDS: dict[str, tuple[Any, dict[str, Any], Callable[[Any, torch.Tensor], torch.Tensor]]] = {
    "hunyuan": (AutoencoderKLHunyuanVideo, HUNYUAN, lambda m, raw: m.decoder(m.post_quant_conv(raw))),
    "hunyuan 1.5": (AutoencoderKLHunyuanVideo15, HUNYUAN_15, lambda m, raw: m.decoder(raw)),
    "ltx2": (AutoencoderKLLTX2Video, LTX, lambda m, raw: m.decoder(raw)),
    "qwen-image": (AutoencoderKLQwenImage, QWEN, lambda m, raw: m.decode(raw, return_dict=False)[0]),
}
TILINGS = {
    "hunyuan": Tiling(8, 6, 8, (4, 3)),
    "hunyuan 1.5": Tiling(4, 3, 16),
    "ltx2": Tiling(6, 4, 32, keeps_ends=True),
    "qwen-image": Tiling(8, 6, 4, keeps_ends=True),
}


def autoencoder(kind: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    """With random norm weights and biases."""
    made, settings, _ = KINDS[kind]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = made(**settings)
        for name, parameter in module.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.data = 0.2 * torch.randn_like(parameter) + (0.0 if name.endswith("bias") else 1.0)
    return module.eval().requires_grad_(False).to(device, dtype)


def decoder_of(kind: str, module: Any, tiling: Tiling | None = None, *, is_tiled: bool = False) -> VideoDecoder:
    decoders = norm_fused(module, KINDS[kind][2], 8 if kind == "ltx2" else 4)
    return VideoDecoder(module, by_factor(1.0), decoders, tiling or TILINGS[kind], is_tiled=is_tiled)


def random_latents(module: Any, *size: int, device: str = "cpu") -> torch.Tensor:
    """Smooth ones: neighbours resemble each other, as in a picture."""
    channels = module.config.get("latent_channels") or module.config.z_dim
    generator = torch.Generator().manual_seed(1)
    coarse = torch.randn(1, channels, *(-(-side // 3) for side in size), generator=generator)
    return torch.nn.functional.interpolate(coarse, size, mode="trilinear").to(device)


def decibels(expected: torch.Tensor, found: torch.Tensor) -> float:
    """Of frames in [0, 1]."""
    return -10.0 * math.log10(float((expected - found).float().square().mean()) + 1e-30)


@torch.inference_mode()
def test_tiles_are_those_of_diffusers() -> None:
    """To the bit, for odd numbers of tiles in every direction, and for tiles of a single frame at the end."""
    for dtype in (torch.float32, torch.bfloat16):
        module = autoencoder("hunyuan", dtype)
        module.enable_tiling(64, 64, 16, 48, 48, 12)
        for size in ((7, 17, 9), (2, 9, 7), (5, 6, 8), (3, 3, 5)):
            latents = random_latents(module, *size)
            with OneDnnConvolutions():
                expected = to_unit_range(module.decode(latents.to(dtype), return_dict=False)[0])
            ours = decoder_of("hunyuan", module, is_tiled=True)
            assert torch.equal(ours.decode(latents), expected), (dtype, size)
            sizes = {7: [13, 12], 5: [13, 4], 3: [9], 2: [5]}[size[0]]
            assert [part.shape[1] for part in ours.stream(latents).chunks] == sizes
        module = autoencoder("hunyuan 1.5", dtype)
        module.enable_tiling(64, 64, 4, 4, 0.25)
        latents = random_latents(module, 2, 7, 9)
        with OneDnnConvolutions():
            expected = to_unit_range(module.decode(latents.to(dtype), return_dict=False)[0])
        assert torch.equal(decoder_of("hunyuan 1.5", module, is_tiled=True).decode(latents), expected)


@torch.inference_mode()
def test_tiles_are_near_the_whole() -> None:
    """Of the decoders that have tiles only when asked; without blending, seams would show."""
    for kind, shape, bound in (("ltx2", (2, 8, 12), 24.0), ("qwen-image", (1, 20, 14), 30.0)):
        module = autoencoder(kind)
        latents = random_latents(module, *shape)
        whole = exact_decoder(module, by_factor(1.0)) if kind == "qwen-image" else decoder_of(kind, module)
        if kind == "qwen-image":
            whole._tiling = TILINGS[kind]
        tiled = whole.in_tiles(True)
        expected, found = whole.decode(latents), tiled.decode(latents)
        assert found.shape == expected.shape
        size, pixels = TILINGS[kind].stride, TILINGS[kind].pixels
        whole._tiling = Tiling(size, size, pixels)
        abutting = whole.in_tiles(True).decode(latents)
        print(kind, decibels(expected, found), decibels(expected, abutting))
        assert max(bound, decibels(expected, abutting) + 1.0) < decibels(expected, found) < 100.0, kind
        assert tiled.in_tiles(False).decode(latents).equal(expected)
        assert "in tiles of" in tiled.implementation
        assert "in tiles" not in whole.implementation


def test_processes_that_share_the_tiles_get_the_frames_of_one(tmp_path: Path) -> None:
    """To the bit, each decoding its half."""
    worker = Path(__file__).with_name("shared_tiles_worker.py")
    tests = str(worker.parents[1])
    environment = {**process_environment(), "PYTHONPATH": os.pathsep.join([str(worker.parents[2]), tests])}
    processes = [start_python(worker, rank, 2, tmp_path / "store", cwd=tmp_path, env=environment) for rank in range(2)]
    results = [process.communicate(timeout=600) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], results
    for lines in zip(*(out.splitlines() for out, _ in results), strict=True):
        values = [line.split() for line in lines]
        num_tiles, *shares = int(values[0][1]), *(int(value[2]) for value in values)
        assert num_tiles >= 4
        assert sum(shares) == num_tiles, lines
        assert max(shares) - min(shares) <= 1, lines
        assert [float(value[3]) for value in values] == [0.0, 0.0], lines
    assert len(results[0][0].splitlines()) == 3


@torch.inference_mode()
def test_tiles_along_the_frames_are_at_their_place() -> None:
    """LTX-2's, whose neighbours in time diffusers shows one frame late: nearest to the whole's frames of the same
    time."""
    module = autoencoder("ltx2")
    latents = random_latents(module, 8, 2, 3)
    decoder = decoder_of("ltx2", module, Tiling(6, 4, 32, (3, 2), keeps_ends=True))
    whole, found = decoder.decode(latents), decoder.in_tiles(True).decode(latents)
    assert found.shape == whole.shape
    assert [part.shape[1] for part in decoder.in_tiles(True).stream(latents).chunks] == [17, 16, 24]
    near = {shift: decibels(whole[:, 20 + shift : 30 + shift], found[:, 20:30]) for shift in (-1, 0, 1)}
    assert near[0] > max(near[-1], near[1]) + 6.0, near


@torch.inference_mode()
def test_norm_and_silu_in_one_pass_give_the_same_frames() -> None:
    """On a CPU by the references, to the bit. Every pair is replaced, and the module stays as it was."""
    for kind, num_pairs in (("hunyuan", 21), ("hunyuan 1.5", 25), ("ltx2", 9)):
        module = autoencoder(kind)
        latents = random_latents(module, 2, 3, 4)
        plain = decoder_of(kind, module)
        fast = plain.fast()
        assert torch.equal(fast.decode(latents), plain.decode(latents)), kind
        assert fast.implementation == f"{type(module).__name__}, norm and SiLU fused, fast"
        assert plain.implementation == type(module).__name__
        assert not any(isinstance(each, NormSilu) for each in module.modules())
        network = with_shared_weights(module)
        assert fuse_norms(network.decoder, is_exact=False) == num_pairs, kind
        assert {id(each) for each in network.parameters()} == {id(each) for each in module.parameters()}
        # Nothing gives group norms to the bit.
        assert fuse_norms(with_shared_weights(module).decoder, is_exact=True) == (0 if kind == "hunyuan" else num_pairs)


@torch.inference_mode()
def test_a_fused_norm_that_gives_other_frames_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    module = autoencoder("ltx2")
    latents = random_latents(module, 2, 3, 4)
    right = decoder_of("ltx2", module)
    wrong = FusedDecoder(WholeDecoder(lambda raw: module.decoder(raw) + 1e-6, 8), math.inf, "off by a little")
    decoder = VideoDecoder(
        module,
        by_factor(1.0),
        Decoders(right._module, [wrong], lambda: wrong),
        TILINGS["ltx2"],
    )
    assert torch.equal(decoder.decode(latents), right.decode(latents))
    assert "off by a little is left out on this machine" in caplog.text
    assert decoder.implementation == "AutoencoderKLLTX2Video"


@pytest.mark.gpu
@torch.inference_mode()
def test_a_gpu_fuses_norms_to_the_bit_and_fast() -> None:
    # Group norms of random weights round 38.8 dB apart in bfloat16 (H200), and are left out there.
    for kind, is_exact, dtype in (
        ("hunyuan", False, torch.float16),
        ("hunyuan 1.5", True, torch.bfloat16),
        ("ltx2", True, torch.bfloat16),
    ):
        module = autoencoder(kind, dtype, "cuda")
        latents = random_latents(module, 2, 3, 4, device="cuda")
        decoder = decoder_of(kind, module)
        expected = to_unit_range(KINDS[kind][2](module, latents.to(dtype)))
        assert torch.equal(decoder.decode(latents), expected), kind
        name = type(module).__name__
        assert decoder.implementation == (f"{name}, norm and SiLU fused, bit-identical" if is_exact else name)
        fast = decoder.fast()
        assert decibels(expected, fast.decode(latents)) > 40.0
        assert fast.implementation == f"{name}, norm and SiLU fused, fast"


def test_a_decode_that_does_not_fit_says_what_it_takes_and_what_tiles_take() -> None:
    module = autoencoder("ltx2")
    numbers = widest_activation(module)

    def too_large(_: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    decoders = Decoders(WholeDecoder(too_large, 8), [], lambda: pytest.fail("not asked for"))
    decoder = VideoDecoder(module, by_factor(1.0), decoders, TILINGS["ltx2"])
    said = (
        rf"not enough memory while decoding: CUDA out of memory.* about 4 x {numbers:.0f} numbers x 3 x 8 x 9 latents "
        rf"x 4 bytes = .* GiB beside the weights; --vae-tiling on takes about 4 x {numbers:.0f} numbers x 3 x 6 x 6"
    )
    with pytest.raises(DeviceMemoryError, match=said):
        decoder.decode(torch.zeros(1, 6, 3, 8, 9))
    # The last block works on 8 x 8 pixels and 8 frames (7 of the second latent frame) of a latent, in 8 channels.
    assert 8 * 8 * 8 * 4 <= numbers <= 8 * 8 * 8 * 64


def test_models_without_tiles_refuse_them() -> None:
    FLUX1.decoding.check_tiling("auto", FLUX1.name)
    FLUX1.decoding.check_tiling("off", FLUX1.name)
    with pytest.raises(ConfigError, match="the decoder of flux1 models has no tiles; leave out --vae-tiling"):
        FLUX1.decoding.check_tiling("on", FLUX1.name)
