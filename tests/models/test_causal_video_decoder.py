"""Decoding of Wan's and Qwen-Image's latents by our own execution of the network, against diffusers' module."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLQwenImage, AutoencoderKLWan
from published_configs import PUBLISHED
from recorded_capture import RecordedCapture

import diffusion_runtime
from diffusion_runtime.decoders.causal_decoder import CausalDecoder, ChannelsFirstDecoder, ChannelsLastDecoder
from diffusion_runtime.decoders.causal_video_decoder import CausalVideoDecoder, FusedDecoder, exact_decoder
from diffusion_runtime.decoders.decoder_graphs import DecoderGraphs
from diffusion_runtime.decoders.video_decoder import by_factor, restore_by_config, to_unit_range
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.models.qwen_image.family import AUTOENCODER as QWEN_IMAGE
from diffusion_runtime.models.wan.codec import AUTOENCODER as WAN
from diffusion_runtime.models.wan.codec import load_decoder

SHAPES = Path(diffusion_runtime.__file__).parent / "assets" / "shapes"
SIZES: dict[str, Any] = {"base_dim": 4, "dim_mult": [1, 2, 2], "num_res_blocks": 1, "z_dim": 16}
PATCHED: dict[str, Any] = {"patch_size": 2, "in_channels": 12, "out_channels": 12}
KINDS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "wan 2.1": (AutoencoderKLWan, {"temperal_downsample": [False, True]}),
    "patched": (AutoencoderKLWan, {"temperal_downsample": [True, True], **PATCHED}),
    "wan 2.2": (AutoencoderKLWan, {"temperal_downsample": [True, True], "is_residual": True, **PATCHED}),
    "qwen-image": (AutoencoderKLQwenImage, {"temperal_downsample": [True, True]}),
}

PUBLISHED_KINDS = {
    "wan 2.1": "Wan2.1-T2V-1.3B-Diffusers",
    "wan 2.2": "Wan2.2-TI2V-5B-Diffusers",
    "qwen-image": "Qwen-Image",
}


def autoencoder(kind: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    """With random norm weights and biases, which their classes set to ones and zeros."""
    made, settings = KINDS[kind]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = made(**SIZES, **settings)
        for name, parameter in module.named_parameters():
            if name.endswith(("gamma", "bias")):
                parameter.data = 0.2 * torch.randn_like(parameter) + (1.0 if name.endswith("gamma") else 0.0)
        for parameter in module.parameters():
            parameter.data = parameter.data.to(device, dtype)
    return module.eval()


def random_latents(num_frames: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.randn(1, 16, num_frames, 2, 3, generator=torch.Generator().manual_seed(1)).to(device, dtype)


def decibels(expected: torch.Tensor, found: torch.Tensor) -> float:
    return -10.0 * math.log10(float(((expected - found).float() / 2).square().mean()) + 1e-30)


def decoding_half(kind: str, module: Any) -> Any:
    """Ours with the module's weights, built of its config as a folder has it."""
    component = {AutoencoderKLWan: WAN, AutoencoderKLQwenImage: QWEN_IMAGE}[KINDS[kind][0]]
    ours = component.decoding_half({key: value for key, value in module.config.items() if key[0] != "_"})
    tensors = module.state_dict()
    mine = {name: tensors[name] for name in tensors if not name.startswith(component.encoder_parts)}
    ours.load_state_dict(mine, assign=True)
    return ours.eval()


def check_every_kind(device: str) -> list[str]:
    """What is not as promised: bits with channels first, on our modules too, and rounding with channels last."""
    wrong = []
    for kind in KINDS:
        for dtype, bound in ((torch.float32, 90.0 if device == "cpu" else 45.0), (torch.bfloat16, 40.0)):
            module = autoencoder(kind, dtype, device)
            first, last = ChannelsFirstDecoder(module), ChannelsLastDecoder(module)
            # One is an image; with the third, histories hold frames of a latent frame that was not the first.
            for num_frames in (1, 3) if kind == "qwen-image" else (3,):
                latents = random_latents(num_frames, dtype, device)
                expected = module.decode(latents, return_dict=False)[0]
                exact, fast = (torch.cat(list(decoder.decode(latents)), dim=2) for decoder in (first, last))
                eager = ChannelsFirstDecoder(decoding_half(kind, module), is_eager=True)
                if not torch.equal(torch.cat(list(eager.decode(latents)), dim=2), expected):
                    wrong.append(f"{kind} {dtype}, {num_frames} latent frames, our modules: bits differ")
                if not torch.equal(exact, expected):
                    wrong.append(f"{kind} {dtype}, {num_frames} latent frames: bits differ")
                if decibels(expected, fast) < bound:
                    wrong.append(f"{kind} {dtype}, {num_frames} latent frames: {decibels(expected, fast):.0f} dB")
    return wrong


@torch.inference_mode()
def test_frames_are_those_of_diffusers() -> None:
    assert check_every_kind("cpu") == []


@torch.inference_mode()
def test_the_embedded_models_decoder_gives_the_bits_of_diffusers() -> None:
    """As the runtime loads and runs both, with its own mode of convolving."""
    module = WAN.load(SHAPES, torch.device("cpu"), torch.float32)
    decoder = load_decoder(SHAPES, torch.device("cpu"), torch.float32)
    latents = torch.randn(1, 16, 3, 4, 6, generator=torch.Generator().manual_seed(1))
    theirs = CausalVideoDecoder(module, restore_by_config(SHAPES, torch.device("cpu")))
    assert (decoder.library, theirs.library) == ("torch", "diffusers")
    assert torch.equal(decoder.decode(latents), theirs.decode(latents))


def test_our_modules_are_built_of_published_configs_alone() -> None:
    """With every tensor of diffusers' decoder, and for nothing that diffusers' class would compute in another way."""
    for kind, name in PUBLISHED_KINDS.items():
        # Qwen-Image's are the defaults of its class.
        config = PUBLISHED[name].get("vae/config.json", {})
        settings = {key: value for key, value in config.items() if key[0] != "_" and key != "clip_output"}
        made = KINDS[kind][0]
        component = {AutoencoderKLWan: WAN, AutoencoderKLQwenImage: QWEN_IMAGE}[made]
        with torch.device("meta"):
            theirs = made(**settings).state_dict()
        ours = component.decoding_half(settings)
        assert ours is not None, name
        shapes = {key: value.shape for key, value in theirs.items() if not key.startswith(component.encoder_parts)}
        assert {key: value.shape for key, value in ours.state_dict().items()} == shapes
        for odd in ({"attn_scales": [1.0]}, {"dim_mult": [1, 2]}, {"z_dim": "16"}, {"newer": 1}, {"base_dim": 2**31}):
            assert component.decoding_half({**settings, **odd}) is None, odd


@pytest.mark.gpu
@torch.inference_mode()
def test_frames_on_a_gpu_are_those_of_diffusers() -> None:
    assert check_every_kind("cuda") == []


@pytest.mark.gpu
@torch.inference_mode()
def test_a_gpu_decodes_with_kernels_of_its_own_accord() -> None:
    decoder = exact_decoder(autoencoder("wan 2.1", torch.bfloat16, "cuda"), by_factor(1.0))
    small = random_latents(3, torch.bfloat16, "cuda")
    decoder.decode(small)
    assert decoder.implementation == "AutoencoderKLWan"
    decoder.decode(small.repeat(1, 1, 1, 30, 40))
    assert decoder.implementation == "AutoencoderKLWan, fused kernels, bit-identical, channels last"


@torch.inference_mode()
def test_the_decoder_gives_the_same_frames_in_every_mode_and_says_which_it_ran() -> None:
    module = autoencoder("wan 2.1")
    latents = torch.cat([random_latents(3), random_latents(3).flip(4)])
    plain = exact_decoder(module, by_factor(0.5))
    exact = CausalVideoDecoder(module, by_factor(0.5), [to_the_bit(ChannelsFirstDecoder(module), "channels first")])
    fast = plain.fast()
    expected = plain.decode(latents)
    assert expected.shape == (2, 5, 8, 12, 3)
    assert torch.equal(exact.decode(latents), torch.cat([plain.decode(sample) for sample in latents.split(1)]))
    torch.testing.assert_close(fast.decode(latents), expected, atol=1e-5, rtol=0)
    assert plain.implementation == "AutoencoderKLWan"
    assert exact.implementation == "AutoencoderKLWan, channels first"
    assert fast.implementation == "AutoencoderKLWan, fused kernels, fast"


@torch.inference_mode()
def test_a_clip_too_small_to_repay_compiling_is_decoded_without_kernels() -> None:
    module, small = autoencoder("wan 2.1"), random_latents(3)
    fused = FusedDecoder(ChannelsFirstDecoder(module), math.inf, "channels first", 2 * small[0, 0].numel())
    decoder = CausalVideoDecoder(module, by_factor(1.0), [fused])
    for latents, name in ((small, ""), (small.repeat(1, 1, 1, 1, 2), ", channels first"), (small, "")):
        decoder.decode(latents)
        assert decoder.implementation == f"AutoencoderKLWan{name}"
    # Pieces are parts of a clip of any length.
    with decoder.clip() as decode_next:
        list(decode_next(small))
    assert decoder.implementation == "AutoencoderKLWan, channels first"


@torch.inference_mode()
def test_frames_come_while_the_next_are_not_yet_decoded() -> None:
    """Of every latent frame, to the bits of diffusers' module decoding at once; by the module itself and by kernels."""
    decoded = []

    class Counting(ChannelsFirstDecoder):
        def decode(self, raw: torch.Tensor, bands: Any = None) -> Iterator[torch.Tensor]:
            for index, frames in enumerate(super().decode(raw, bands)):
                decoded.append(index)
                yield frames

    for kind in KINDS:
        module = autoencoder(kind)
        factor = 2 ** sum(KINDS[kind][1]["temperal_downsample"])
        latents = random_latents(3)
        expected = to_unit_range(module.decode(latents, return_dict=False)[0])
        for decoder in (
            CausalVideoDecoder(module, by_factor(1.0)),
            CausalVideoDecoder(module, by_factor(1.0), [to_the_bit(Counting(module), "counting")]),
        ):
            stream = decoder.stream(latents)
            decoded.clear()
            sizes, parts = [], []
            for frames in stream.chunks:
                sizes.append(frames.shape[1])
                parts.append(frames)
                assert decoded in ([], list(range(len(parts)))), "decoded no farther than was asked for"
            assert sizes == [1, factor, factor]
            assert stream.num_frames == sum(sizes)
            torch.testing.assert_close(torch.cat(parts, dim=1), expected, atol=2e-6, rtol=0)


@torch.inference_mode()
def test_a_clip_in_pieces_has_the_frames_of_the_whole() -> None:
    """To the bit, by diffusers' module, by kernels in both layouts and by graphs; two clips at once keep apart, and
    forks of one, which graphs refuse."""
    latents, other = random_latents(4), random_latents(4).flip(2)
    for kind in ("wan 2.1", "wan 2.2"):
        module = autoencoder(kind)
        plain = CausalVideoDecoder(module, by_factor(1.0))
        first = CausalVideoDecoder(module, by_factor(1.0), [to_the_bit(ChannelsFirstDecoder(module), "first")])
        graphed = first.with_graphs(DecoderGraphs(RecordedCapture()))
        for decoder in (plain.fast(), first, graphed) if kind == "wan 2.1" else (plain,):
            whole, whole_other = decoder.decode(latents), decoder.decode(other)
            found: list[list[torch.Tensor]] = [[], []]
            with decoder.clip() as decode_next, decoder.clip() as decode_other:
                for pieces in zip(latents.split([1, 2, 1], dim=2), other.split([1, 2, 1], dim=2), strict=True):
                    found[0] += decode_next(pieces[0])
                    found[1] += decode_other(pieces[1])
            assert torch.equal(torch.cat(found[0], dim=1), whole), (kind, decoder.implementation)
            assert torch.equal(torch.cat(found[1], dim=1), whole_other), (kind, decoder.implementation)
            with decoder.clip() as decode_next:
                begun = list(decode_next(latents[:, :, :2]))
                if decoder is graphed:
                    with pytest.raises(ConfigError, match="expected cuda_graphs='off'"):
                        decode_next.fork()
                    continue
                decode_fork = decode_next.fork()
                # Another continuation in between, and none of the first clip once the fork is made.
                list(decode_next(other))
            rest = [*decode_fork(latents[:, :, 2:3]), *decode_fork(latents[:, :, 3:])]
            assert torch.equal(torch.cat([*begun, *rest], dim=1), whole), (kind, decoder.implementation)
        with pytest.raises(ConfigError, match="leave out --vae-tiling"), plain.in_tiles("on").clip():
            pass


class SlightlyWrong(ChannelsFirstDecoder):
    """Off by one bit in one number of the second latent frame's frames."""

    def decode(self, raw: torch.Tensor, bands: Any = None) -> Iterator[torch.Tensor]:
        for index, frames in enumerate(super().decode(raw, bands)):
            changed = frames.clone()
            if index == 1:
                changed[0, 0, 0, 0, 0] = changed[0, 0, 0, 0, 0].nextafter(torch.tensor(2.0))
            yield changed


@torch.inference_mode()
def test_kernels_that_give_other_frames_are_not_used(caplog: pytest.LogCaptureFixture) -> None:
    """A rounding apart is said, and is no warning."""
    caplog.set_level(logging.INFO)
    module = autoencoder("wan 2.1")
    expected = exact_decoder(module, by_factor(1.0)).decode(random_latents(3))
    wrong = to_the_bit(SlightlyWrong(module), "wrong")
    for fused, left in (([wrong], ""), ([wrong, to_the_bit(ChannelsFirstDecoder(module), "right")], ", right")):
        decoder = CausalVideoDecoder(module, by_factor(1.0), fused)
        assert decoder.implementation == "AutoencoderKLWan, wrong"
        assert torch.equal(decoder.decode(random_latents(3)), expected)
        assert decoder.implementation == f"AutoencoderKLWan{left}"
    assert caplog.text.count("wrong is left out on this machine: its frames are not those without fused kernels") == 2
    assert all(record.levelno == logging.INFO for record in caplog.records)


class Uncompilable(ChannelsFirstDecoder):
    """What a compiler of kernels raises on a chip that it does not know."""

    def decode(self, raw: torch.Tensor, bands: Any = None) -> Iterator[torch.Tensor]:
        raise RuntimeError("no code for sm_120")


@torch.inference_mode()
def test_kernels_that_do_not_compile_are_not_used(caplog: pytest.LogCaptureFixture) -> None:
    module = autoencoder("wan 2.1")
    decoder = CausalVideoDecoder(module, by_factor(1.0), [to_the_bit(Uncompilable(module), "new")])
    assert torch.equal(
        decoder.decode(random_latents(1)), exact_decoder(module, by_factor(1.0)).decode(random_latents(1))
    )
    assert decoder.implementation == "AutoencoderKLWan"
    assert "new is left out on this machine: RuntimeError: no code for sm_120" in caplog.text


def to_the_bit(decoder: CausalDecoder[Any], description: str) -> FusedDecoder:
    return FusedDecoder(decoder, math.inf, description)
