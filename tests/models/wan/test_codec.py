"""The decoder against diffusers' own path from latents to frames: within 1/255."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLWan
from diffusers.video_processor import VideoProcessor
from safetensors.torch import load_file, save_file
from tiny_models import write_tiny_wan

from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.models.wan.codec import load_decoder

CPU = torch.device("cpu")
WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module", params=["patched", "plain"])
def folder(request: pytest.FixtureRequest, tiny_wan_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders with the embedded model's VAE layout and with Wan 2.1's."""
    if request.param == "patched":
        return tiny_wan_folder
    return write_tiny_wan(tmp_path_factory.mktemp("plain_vae") / "wan", vae="plain")


@torch.no_grad()
def decode_theirs(folder: Path, latents: torch.Tensor) -> torch.Tensor:
    """What WanPipeline does after its last step: [batch, frames, height, width, 3] in [0, 1]."""
    vae = AutoencoderKLWan.from_pretrained(folder / "vae").eval()
    mean = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1, 1)
    inverse_std = 1.0 / torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1)
    video = vae.decode(latents / inverse_std + mean, return_dict=False)[0]
    return torch.from_numpy(VideoProcessor().postprocess_video(video, output_type="np"))


@pytest.mark.parametrize("shape", [(1, 1, 3, 4), (1, 3, 4, 4), (2, 2, 2, 6)])
def test_frames_equal_diffusers(folder: Path, shape: tuple[int, int, int, int]) -> None:
    decoder = load_decoder(folder, CPU, torch.float32)
    batch, *sizes = shape
    latents = 2.0 * torch.randn(batch, 16, *sizes, generator=torch.Generator().manual_seed(0))
    before = latents.clone()
    frames = decoder.decode(latents)
    assert frames.shape == (batch, 4 * (sizes[0] - 1) + 1, 8 * sizes[1], 8 * sizes[2], 3)
    assert frames.dtype == torch.float32
    assert frames.is_contiguous()
    assert torch.equal(latents, before)
    assert 0.0 <= float(frames.min()) < float(frames.max()) <= 1.0
    assert float((frames - decode_theirs(folder, latents)).abs().max()) < 1e-4


def test_bfloat16_gives_nearly_the_same_frames(tiny_wan_folder: Path) -> None:
    latents = torch.randn(1, 16, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    exact = load_decoder(tiny_wan_folder, CPU, torch.float32).decode(latents)
    frames = load_decoder(tiny_wan_folder, CPU, torch.bfloat16).decode(latents.bfloat16())
    assert frames.dtype == torch.float32
    assert 1e-6 < float((frames - exact).abs().mean()) < 2 / 255


def test_the_report_is_told_who_decodes(tiny_wan_folder: Path) -> None:
    decoder = load_decoder(tiny_wan_folder, CPU, torch.float32)
    assert (decoder.library, decoder.implementation) == ("torch", "AutoencoderKLWan")


# --- folders that cannot be used --------------------------------------------------------------------------------------


def change_config(folder: Path, change: Callable[[dict[str, object]], object]) -> Path:
    path = folder / "vae" / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))
    return folder


def failure(folder: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load_decoder(folder, CPU, torch.float32)
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("tile_of_the_future", 3, "unknown to AutoencoderKLWan of the installed diffusers"),
        ("latents_mean", [0.0] * 15, "expected a list of 16 numbers"),
        ("latents_std", None, "key 'latents_std' is missing"),
        ("z_dim", "16", "expected a whole number"),
        ("dim_mult", 3, "refuses these settings"),
        ("base_dim", "wide", "refuses these settings"),
        ("decoder_base_dim", 12, "have another shape than config.json says"),
    ],
)
def test_a_config_that_does_not_fit_is_named(
    tiny_wan_copy: Callable[[], Path], key: str, value: object, said: str
) -> None:
    folder = change_config(tiny_wan_copy(), lambda config: config.update({key: value}))
    message = failure(folder)
    assert said in message
    assert str(folder / "vae") in message


def test_weights_that_do_not_fit_are_named(tiny_wan_copy: Callable[[], Path]) -> None:
    folder = tiny_wan_copy()
    path = folder / "vae" / WEIGHTS
    stored = load_file(path)
    del stored["decoder.conv_in.bias"]
    save_file({**stored, "decoder.extra": torch.zeros(1)}, path)
    said = failure(folder)
    assert "tensors are missing: decoder.conv_in.bias" in said
    assert "1 tensors are unexpected: decoder.extra" in said


def test_the_encoder_is_neither_needed_nor_built(tiny_wan_copy: Callable[[], Path]) -> None:
    folder = tiny_wan_copy()
    path = folder / "vae" / WEIGHTS
    stored = {
        name: value for name, value in load_file(path).items() if not name.startswith(("encoder.", "quant_conv."))
    }
    whole = load_decoder(folder, CPU, torch.float32)
    save_file(stored, path)
    latents = torch.randn(1, 16, 1, 2, 2)
    assert torch.equal(load_decoder(folder, CPU, torch.float32).decode(latents), whole.decode(latents))
