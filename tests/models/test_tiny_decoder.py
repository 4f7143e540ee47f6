"""Tiny decoders in TAEHV's file format: random weights under the published names, against a computation that takes all
frames at once. No published file was at hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.core.latent_geometry import LatentGeometry
from diffusion_runtime.decoders.tiny_decoder import TinyDecoder, read_tiny_decoder
from diffusion_runtime.errors import ConfigError, DiffusionRuntimeError
from diffusion_runtime.loading import load_pipeline
from diffusion_runtime.pipeline import Pipeline
from diffusion_runtime.request.generation_request import GenerationRequest

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]
WAN = LatentGeometry(16, 8, 4, (1, 2, 2))
PUBLISHED: Mapping[int, str] = {16: "taew2_1", 48: "taew2_2", 128: "taeltx_2"}


def random_file(path: Path, *, channels: int = 16, factors: tuple[int, ...] = (1, 2, 2), patch: int = 1) -> Tensors:
    """A whole autoencoder as published, narrower. Its encoder is not read."""
    generator = torch.Generator().manual_seed(0)
    tensors: Tensors = {"encoder.0.weight": torch.zeros(2, 3, 3, 3)}

    def add(name: str, outputs: int, inputs: int, size: int = 3, *, bias: bool = False) -> None:
        spread = (inputs * size * size) ** -0.5
        tensors[f"decoder.{name}.weight"] = spread * torch.randn(outputs, inputs, size, size, generator=generator)
        if bias:
            tensors[f"decoder.{name}.bias"] = 0.1 * torch.randn(outputs, generator=generator)

    widths = (8, 6, 4, 4)
    add("1", widths[0], channels, bias=True)
    for level, factor in enumerate(factors):
        width, place = widths[level], 3 + 6 * level
        for block in range(place, place + 3):
            add(f"{block}.conv.0", width, 2 * width, bias=True)
            add(f"{block}.conv.2", width, width, bias=True)
            add(f"{block}.conv.4", width, width, bias=True)
        add(f"{place + 4}.conv", factor * width, width, 1)
        add(f"{place + 5}", widths[level + 1], width)
    add("22", 3 * patch**2, widths[-1], bias=True)
    save_file(tensors, path)
    return tensors


def decode_at_once(tensors: Tensors, latents: torch.Tensor, factors: tuple[int, ...], patch: int) -> torch.Tensor:
    """latents: [frames, channels, height, width]. Every layer sees every frame before the next layer does."""

    def convolve(name: str, x: torch.Tensor) -> torch.Tensor:
        weight, bias = tensors[f"decoder.{name}.weight"], tensors.get(f"decoder.{name}.bias")
        return F.conv2d(x, weight, bias, padding=weight.shape[-1] // 2)

    x = F.relu(convolve("1", 3 * torch.tanh(latents / 3)))
    for level in range(3):
        place = 3 + 6 * level
        for block in range(place, place + 3):
            before = torch.cat([torch.zeros_like(x[:1]), x[:-1]])
            inner = F.relu(convolve(f"{block}.conv.0", torch.cat([x, before], dim=1)))
            x = F.relu(convolve(f"{block}.conv.4", F.relu(convolve(f"{block}.conv.2", inner))) + x)
        x = F.interpolate(x, scale_factor=2)
        x = convolve(f"{place + 4}.conv", x).unflatten(1, (factors[level], -1)).flatten(0, 1)
        x = convolve(f"{place + 5}", x)
    frames = F.pixel_shuffle(convolve("22", F.relu(x)), patch).clamp(0, 1)
    num_early = factors[0] * factors[1] * factors[2] - 1
    return frames[num_early:].permute(0, 2, 3, 1)


@pytest.mark.parametrize(
    ("name", "channels", "factors", "patch"),
    [("taew2_1", 16, (1, 2, 2), 1), ("taew2_2", 48, (1, 2, 2), 2), ("taeltx_2", 128, (2, 2, 2), 4)],
)
def test_frames_equal_the_computation_of_all_at_once(
    tmp_path: Path, name: str, channels: int, factors: tuple[int, ...], patch: int
) -> None:
    tensors = random_file(tmp_path / f"{name}.safetensors", channels=channels, factors=factors, patch=patch)
    temporal = factors[0] * factors[1] * factors[2]
    geometry = LatentGeometry(channels, 8 * patch, temporal, (1, 1, 1))
    decoder = read_tiny_decoder("tiny", tmp_path, "some", geometry, PUBLISHED).load(CPU, torch.float32)
    latents = 2.0 * torch.randn(2, channels, 3, 2, 3, generator=torch.Generator().manual_seed(1))
    frames = decoder.decode(latents)
    assert frames.shape == (2, 2 * temporal + 1, 16 * patch, 24 * patch, 3)
    with decoder.clip() as decode_next:
        pieces = list(decode_next(latents[:1, :, :1]))
        fork = decode_next.fork()
        rest = [list(each(latents[:1, :, 1:])) for each in (decode_next, fork)]
    for each in rest:
        assert torch.equal(torch.cat([*pieces, *each], dim=1), frames[:1])
    for sample, found in zip(latents, frames, strict=True):
        torch.testing.assert_close(found, decode_at_once(tensors, sample.transpose(0, 1), factors, patch))
    assert 0.0 <= float(frames.min()) < float(frames.max()) <= 1.0
    assert (decoder.library, decoder.implementation) == ("taehv", f"tiny decoder {name}.safetensors: a preview")


def damaged(path: Path, change: Callable[[Tensors], object]) -> str:
    tensors = random_file(path)
    change(tensors)
    save_file(tensors, path)
    return str(path)


def test_files_that_do_not_fit_are_refused_with_the_reason(tmp_path: Path) -> None:
    other, image = LatentGeometry(16, 8, 1, (1, 2, 2)), {16: "taew2_1"}
    (tmp_path / "taew2_1.pth").write_bytes(b"pickle")
    random_file(tmp_path / "mine.safetensors")
    random_file(tmp_path / "taehv.safetensors")
    random_file(tmp_path / "wan22.safetensors", channels=48, patch=2)
    (tmp_path / "text.safetensors").write_text("not one")
    first = "decoder.1.weight"
    cases: list[tuple[str, LatentGeometry, Mapping[int, str], str]] = [
        ("tiny", WAN, PUBLISHED, "taew2_1.safetensors is missing; download taew2_1.safetensors from https://"),
        (str(tmp_path / "taew2_1.pth"), WAN, PUBLISHED, "a pickle can run code when it is opened, and is never read"),
        (str(tmp_path / "wan22.safetensors"), WAN, PUBLISHED, "decodes latents of 48 channels, 16 x 16 pixels and 4"),
        (
            str(tmp_path / "taehv.safetensors"),
            WAN,
            PUBLISHED,
            "decodes other latents of the same shape; wan models need",
        ),
        (str(tmp_path / "mine.safetensors"), WAN, {}, "no tiny decoder is published for latents of wan models"),
        (str(tmp_path / "text.safetensors"), WAN, PUBLISHED, "text.safetensors"),
        (str(tmp_path / "absent.safetensors"), WAN, PUBLISHED, "absent.safetensors"),
        (damaged(tmp_path / "a.safetensors", lambda file: file.pop(first)), WAN, PUBLISHED, f"tensor {first!r} of a"),
        (
            damaged(tmp_path / "b.safetensors", lambda file: file.pop("decoder.9.conv.2.bias")),
            WAN,
            PUBLISHED,
            "decoder.9.conv.2.bias is missing",
        ),
        (
            damaged(tmp_path / "c.safetensors", lambda file: file.update({"decoder.30.weight": torch.zeros(1)})),
            WAN,
            PUBLISHED,
            "decoder.30.weight is unknown",
        ),
        (
            damaged(tmp_path / "d.safetensors", lambda file: file["decoder.22.bias"].fill_(float("nan"))),
            WAN,
            PUBLISHED,
            "tensor 'decoder.22.bias' holds NaN",
        ),
    ]
    wrong = []
    for choice, geometry, published, expected in cases:
        try:
            read_tiny_decoder(choice, tmp_path, "wan", geometry, published)
            wrong.append(f"{choice}: taken")
        except DiffusionRuntimeError as error:
            if expected not in str(error):
                wrong.append(f"{choice}: expected {expected!r} in {error}")
    assert wrong == []
    decoder = read_tiny_decoder(str(tmp_path / "mine.safetensors"), tmp_path, "qwen_image", other, image)
    assert decoder.load(CPU, torch.float32).decode(torch.zeros(1, 16, 1, 2, 2)).shape == (1, 1, 16, 16, 3)


def test_a_generation_with_it_says_so(tiny_wan_folder: Path, tmp_path: Path) -> None:
    random_file(tmp_path / "taew2_1.safetensors")
    config = RuntimeConfig(str(tiny_wan_folder), device="cpu", vae_decoder=str(tmp_path / "taew2_1.safetensors"))
    pipeline = load_pipeline(config)
    assert isinstance(pipeline, Pipeline)
    assert isinstance(pipeline.decoder, TinyDecoder)
    media = pipeline(GenerationRequest("a star", height=32, width=32, num_frames=5, num_inference_steps=1, seed=0))
    assert media.frames.shape == (5, 32, 32, 3)
    assert media.recipe["runtime"]["vae_decoder"] == str(tmp_path / "taew2_1.safetensors")
    vae = next(row for row in media.attention_report.libraries if row.component == "vae")
    assert (vae.library, vae.implementation) == ("taehv", "tiny decoder taew2_1.safetensors: a preview")


def test_other_decoders_have_no_fast_mode() -> None:
    from diffusion_runtime.models.flux1.family import FAMILY as FLUX1

    with pytest.raises(ConfigError, match="the decoder of flux1 models has one mode, exact; leave out --vae-decode"):
        FLUX1.decoding.check_mode("fast", FLUX1.name)
    FLUX1.decoding.check_mode("exact", FLUX1.name)
