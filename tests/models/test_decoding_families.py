"""Tiles of every decoder and fused norms of those of videos, against diffusers' modules."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLHunyuanVideo,
    AutoencoderKLHunyuanVideo15,
    AutoencoderKLLTX2Video,
    AutoencoderKLQwenImage,
    AutoencoderKLQwenImage21,
)
from warm_python import run_worker

from diffusion_runtime.decoders.causal_video_decoder import exact_decoder
from diffusion_runtime.decoders.decoder_memory import decoding_bytes, widest_activation
from diffusion_runtime.decoders.exact_tiles import decode_frame
from diffusion_runtime.decoders.fused_norms import NormSilu, fuse_norms, with_shared_weights
from diffusion_runtime.decoders.image_decoder import ImageDecoder
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
from diffusion_runtime.memory.live_bytes import peak_bytes
from diffusion_runtime.models.flux1.family import FAMILY as FLUX1
from diffusion_runtime.models.qwen_image_21.codec import QwenImage21Decoder

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
FLUX = {
    "block_out_channels": (8, 8, 16),
    "down_block_types": ("DownEncoderBlock2D",) * 3,
    "up_block_types": ("UpDecoderBlock2D",) * 3,
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "latent_channels": 4,
}
QWEN_21 = {"base_dim": 4, "decoder_base_dim": 4, "z_dim": 4, "dim_mult": [1, 1, 1, 2, 2], "num_res_blocks": 1}
QWEN_21 |= {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
# The class, its settings, its decoder without tiles, and how tiles of a quarter of the published size are set.
KINDS: dict[str, tuple[Any, dict[str, Any], Callable[[Any, torch.Tensor], torch.Tensor]]] = {
    "hunyuan": (AutoencoderKLHunyuanVideo, HUNYUAN, lambda m, raw: m.decoder(m.post_quant_conv(raw))),
    "hunyuan 1.5": (AutoencoderKLHunyuanVideo15, HUNYUAN_15, lambda m, raw: m.decoder(raw)),
    "ltx2": (AutoencoderKLLTX2Video, LTX, lambda m, raw: m.decoder(raw)),
    "qwen-image": (AutoencoderKLQwenImage, QWEN, lambda m, raw: m.decode(raw, return_dict=False)[0]),
    "flux": (AutoencoderKL, FLUX, decode_frame),
    "flux2": (AutoencoderKLFlux2, FLUX, decode_frame),
    "qwen-image 2.1": (AutoencoderKLQwenImage21, QWEN_21, decode_frame),
}
TILINGS = {
    "hunyuan": Tiling(8, 6, 8, (4, 3)),
    "hunyuan 1.5": Tiling(4, 3, 16),
    "ltx2": Tiling(6, 4, 32, keeps_ends=True),
    "qwen-image": Tiling(8, 6, 4, keeps_ends=True),
    "qwen-image 2.1": Tiling(8, 6, 16, keeps_ends=True),
}
_SIZES = ("size", "stride", "pixels")


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


def decoder_of(kind: str, module: Any, tiling: Tiling | None = None) -> VideoDecoder:
    decoders = norm_fused(module, KINDS[kind][2], 8 if kind == "ltx2" else 4)
    return VideoDecoder(module, by_factor(1.0), decoders, tiling or TILINGS[kind])


def image_decoder_of(kind: str, module: Any) -> VideoDecoder:
    if kind == "qwen-image 2.1":
        return QwenImage21Decoder(module, by_factor(1.0))
    return ImageDecoder(module, by_factor(1.0))


def random_latents(module: Any, *size: int, device: str = "cpu") -> torch.Tensor:
    """Smooth ones: neighbours resemble each other, as in a picture."""
    channels = module.config.get("latent_channels") or module.config.z_dim
    generator = torch.Generator().manual_seed(1)
    coarse = torch.randn(1, channels, *(-(-side // 3) for side in size), generator=generator)
    return torch.nn.functional.interpolate(coarse, size, mode="trilinear").to(device)


def decibels(expected: torch.Tensor, found: torch.Tensor) -> float:
    """Of frames in [0, 1]."""
    return -10.0 * math.log10(float((expected - found).float().square().mean()) + 1e-30)


@pytest.mark.slow
@torch.inference_mode()
def test_tiles_are_those_of_diffusers() -> None:
    """To the bit, for odd numbers of tiles in every direction, and for tiles of a single frame at the end."""
    for dtype in (torch.float32, torch.bfloat16):
        module = autoencoder("hunyuan", dtype)
        module.enable_tiling(64, 64, 16, 48, 48, 12)
        # The order of the blends does not depend on the dtype.
        for size in ((7, 17, 9), (2, 9, 7), (5, 6, 8), (3, 3, 5))[:: 1 if dtype == torch.float32 else 3]:
            latents = random_latents(module, *size)
            with OneDnnConvolutions():
                expected = to_unit_range(module.decode(latents.to(dtype), return_dict=False)[0])
            ours = decoder_of("hunyuan", module).in_tiles("on")
            assert torch.equal(ours.decode(latents), expected), (dtype, size)
            sizes = {7: [13, 12], 5: [13, 4], 3: [9], 2: [5]}[size[0]]
            assert [part.shape[1] for part in ours.stream(latents).chunks] == sizes
        module = autoencoder("hunyuan 1.5", dtype)
        module.enable_tiling(64, 64, 4, 4, 0.25)
        latents = random_latents(module, 2, 7, 9)
        with OneDnnConvolutions():
            expected = to_unit_range(module.decode(latents.to(dtype), return_dict=False)[0])
        assert torch.equal(decoder_of("hunyuan 1.5", module).in_tiles("on").decode(latents), expected)


@torch.inference_mode()
def test_tiles_are_near_the_whole() -> None:
    """Of the decoders that have tiles only when asked; without blending, seams would show."""
    kinds = {
        "ltx2": ((2, 8, 12), 24.0, decoder_of),
        "qwen-image": ((1, 20, 14), 30.0, lambda _, module: exact_decoder(module, by_factor(1.0))),
        "qwen-image 2.1": ((1, 20, 14), 26.0, image_decoder_of),
    }
    for kind, (shape, bound, make) in kinds.items():
        module = autoencoder(kind)
        latents = random_latents(module, *shape)
        whole, size, stride, pixels = make(kind, module), *(getattr(TILINGS[kind], name) for name in _SIZES)
        tiled = whole.in_tiles(f"{size * pixels}:{(size - stride) * pixels}")
        expected, found = whole.decode(latents), tiled.decode(latents)
        assert found.shape == expected.shape
        abutting = whole.in_tiles(f"{stride * pixels}:0").decode(latents)
        print(kind, decibels(expected, found), decibels(expected, abutting))
        assert max(bound, decibels(expected, abutting) + 1.0) < decibels(expected, found) < 100.0, kind
        assert tiled.in_tiles("off").decode(latents).equal(expected)
        said = f"in tiles of {size * pixels} pixels that overlap by {(size - stride) * pixels}, not as a whole decode"
        assert said in tiled.implementation
        assert "in tiles" not in whole.implementation


@torch.inference_mode()
def test_tiles_of_pictures_are_exact() -> None:
    """Of decoders with group norms: to rounding as diffusers decodes at once; its own tiles are 80 dB further off. Odd
    numbers of tiles, narrow ones at the ends, tiles as large as their halo, and a picture that is one tile."""
    for kind in ("flux", "flux2"):
        for dtype, side, size, bound in (
            (torch.float32, 32, (20, 13), 110.0),
            (torch.float32, 64, (33, 17), 110.0),
            (torch.float32, 64, (16, 9), math.inf),
            (torch.bfloat16, 64, (20, 13), 40.0),
        ):
            module = autoencoder(kind, dtype)
            latents = random_latents(module, 1, *size)
            whole = image_decoder_of(kind, module)
            expected = to_unit_range(decode_frame(module, latents.to(dtype)))
            assert whole.decode(latents).equal(expected)
            whole._tiling = Tiling(side // 4, side // 4, 4, is_exact=True)
            tiled = whole.in_tiles("on")
            found = tiled.decode(latents)
            assert found.shape == expected.shape
            assert decibels(expected, found) >= bound or found.equal(expected), (kind, side, size)
            assert tiled.implementation.endswith(f"in tiles of {side} pixels, to rounding as a whole decode")
            # The module is as it was.
            assert whole.decode(latents).equal(expected)
        module.to(torch.float32).enable_tiling()
        module.tile_latent_min_size, module.tile_sample_min_size = 8, 32
        theirs = to_unit_range(module.decode(latents[:, :, 0], return_dict=False)[0][:, :, None])
        module.disable_tiling()
        assert decibels(to_unit_range(decode_frame(module, latents)), theirs) < 30.0
    module.decoder.up_blocks[0] = torch.nn.Identity()
    with pytest.raises(ConfigError, match="no tiles for a decoder with Identity"):
        whole.in_tiles("on").decode(latents)


def test_the_plan_counts_what_tiles_have_alive() -> None:
    """Of exact and of blended tiles: at least what is alive at once while a CPU decodes, and not much more."""
    height, width = 48, 56
    for kind, wide in (("flux", {"block_out_channels": (64, 32, 32)}), ("qwen-image", {"base_dim": 24})):
        made, settings, _ = KINDS[kind]
        module = made(**{**settings, **wide}).eval().requires_grad_(False)
        decoder = image_decoder_of(kind, module) if kind == "flux" else exact_decoder(module, by_factor(1.0))
        tiles = "64" if kind == "flux" else "64:16"
        latents = random_latents(module, 1, height, width)
        tiled = decoder.in_tiles(tiles)
        counted = peak_bytes(
            lambda tiled=tiled, latents=latents: list(tiled.stream(latents).chunks), torch.device("cpu")
        )
        tiling, module = decoder._tiling.chosen(tiles), copy.deepcopy(module).to("meta")
        planned, whole = (decoding_bytes(module, height * 4, width * 4, 1, tiling=each) for each in (tiling, None))
        print(kind, planned, counted, whole)
        # The latents and the statistics are small, and not counted.
        assert 0.98 * counted <= planned < 1.3 * counted, kind
        assert planned < whole / 3, kind


def test_processes_that_share_the_tiles_get_the_frames_of_one(tmp_path: Path) -> None:
    """To the bit, each decoding its half."""
    run_worker(Path(__file__).with_name("shared_tiles_worker.py"), tmp_path)
    results = [json.loads((tmp_path / f"result-{rank}.json").read_text()) for rank in range(2)]
    assert [kind for kind, *_ in results[0]] == ["hunyuan", "ltx2", "clips"]
    for rows in zip(*results, strict=True):
        _, num_tiles, *_ = rows[0]
        shares = [row[2] for row in rows]
        assert num_tiles >= 4
        assert sum(shares) == num_tiles, rows
        assert max(shares) - min(shares) <= 1, rows
        assert [row[3] for row in rows] == [0.0, 0.0], rows
    ended = [json.loads((tmp_path / f"ended-{rank}.json").read_text()) for rank in range(2)]
    assert ended[0] == ended[1]
    assert ["of_one_process (coarse kernel) is not accurate here" in each for each in ended[0]] == [True, True, False]


@torch.inference_mode()
def test_tiles_along_the_frames_are_at_their_place() -> None:
    """LTX-2's, whose neighbours in time diffusers shows one frame late: nearest to the whole's frames of the same
    time."""
    module = autoencoder("ltx2")
    latents = random_latents(module, 8, 2, 3)
    decoder = decoder_of("ltx2", module, Tiling(6, 4, 32, (3, 2), keeps_ends=True))
    whole, found = decoder.decode(latents), decoder.in_tiles("on").decode(latents)
    assert found.shape == whole.shape
    assert [part.shape[1] for part in decoder.in_tiles("on").stream(latents).chunks] == [17, 16, 24]
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


def test_tiles_that_a_decoder_cannot_have_are_refused() -> None:
    for choice in ("auto", "off", "on", "512"):
        FLUX1.decoding.check_tiling(choice, FLUX1.name, 8)
    with pytest.raises(ConfigError, match="flux1 models are multiples of 8: 300 is near 304"):
        FLUX1.decoding.check_tiling("300", FLUX1.name, 8)
    with pytest.raises(
        ConfigError, match="flux1 models are exact, an overlap of 64 would change nothing: --vae-tiling 512"
    ):
        FLUX1.decoding.check_tiling("512:64", FLUX1.name, 8)
    without = dataclasses.replace(FLUX1.decoding, tiling=None)
    without.check_tiling("auto", "these", 8)
    with pytest.raises(ConfigError, match="on: the decoder of these models has no tiles; leave out --vae-tiling"):
        without.check_tiling("on", "these", 8)
