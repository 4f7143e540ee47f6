"""Our transformer against diffusers' LTXVideoTransformer3DModel on the same weights, float32 on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import LTXVideoTransformer3DModel
from family_parity import load_transformer, relative, write_plain_scheduler
from tables import table
from tiny_encoders import HIDDEN
from tiny_ltx_video import CHANNELS, random_transformer

from diffusion_runtime.attention import AttentionContext
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.models.interface import DenoiserInputs, ImageCondition
from diffusion_runtime.models.ltx_video.family import FAMILY
from diffusion_runtime.models.ltx_video.transformer import LTXVideoTransformer
from diffusion_runtime.text_encoders.interface import Conditions

SIZE, NUM_TEXT_TOKENS = ClipSize(64, 128, 17, 30), 9
LENGTHS = (5, 9)
VARIANTS: dict[str, dict[str, Any]] = {
    "even": {},
    "other widths": {"num_attention_heads": 3, "attention_head_dim": 12, "cross_attention_dim": 36, "norm_eps": 1e-4},
}


def write(folder: Path, **changes: Any) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        random_transformer(**changes).save_pretrained(folder / "transformer")
    (folder / "vae").mkdir()
    (folder / "vae" / "config.json").write_text(json.dumps({"latent_channels": CHANNELS}))
    index = {"_class_name": "LTXPipeline", "transformer": ["diffusers", "LTXVideoTransformer3DModel"]}
    (folder / "model_index.json").write_text(json.dumps(index))
    write_plain_scheduler(folder)
    return folder


def load_theirs(folder: Path, dtype: torch.dtype = torch.float32) -> LTXVideoTransformer3DModel:
    return LTXVideoTransformer3DModel.from_pretrained(folder / "transformer", dtype=dtype).eval()


def noise(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(2, *shape, generator=torch.Generator().manual_seed(seed))


LATENTS, TEXT, TIMESTEP = noise(CHANNELS, 3, 2, 4), noise(NUM_TEXT_TOKENS, HIDDEN, seed=2), torch.tensor([937.3, 12.0])


def run_ours(model: LTXVideoTransformer, image: torch.Tensor | None = None, **changes: Any) -> torch.Tensor:
    values = {"latents": LATENTS, "timestep": TIMESTEP, "text": TEXT, "lengths": LENGTHS, "size": SIZE, **changes}
    condition = None if image is None else ImageCondition(image)
    inputs = DenoiserInputs(Conditions.of(values["text"], values["lengths"]), values["size"], image=condition)
    return model(values["latents"], values["timestep"], inputs, AttentionContext())


@torch.no_grad()
def run_theirs(
    model: LTXVideoTransformer3DModel, latents: torch.Tensor, timestep: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    mask = (torch.arange(NUM_TEXT_TOKENS)[None] < torch.tensor(LENGTHS)[:, None]).long()
    out = model(
        hidden_states=latents.flatten(2).transpose(1, 2).to(dtype),
        encoder_hidden_states=TEXT.to(dtype),
        timestep=timestep,
        encoder_attention_mask=mask,
        num_frames=3,
        height=2,
        width=4,
        rope_interpolation_scale=(8 / SIZE.fps, 32, 32),
        return_dict=False,
    )[0]
    return out.transpose(1, 2).unflatten(2, (3, 2, 4))


@table("name", VARIANTS)
def test_forward_equals_diffusers(name: str, tmp_path: Path) -> None:
    folder = write(tmp_path, **VARIANTS[name])
    ours, theirs = load_transformer(FAMILY, folder), load_theirs(folder)
    assert relative(run_ours(ours), run_theirs(theirs, LATENTS, TIMESTEP)) < 1e-5
    # The tokens of the first frame are the image's, at timestep 0.
    image = noise(CHANNELS, 1, 2, 4, seed=3)
    started = torch.cat([image, LATENTS[:, :, 1:]], dim=2)
    times = torch.where(torch.arange(24)[None] < 8, torch.zeros(1), TIMESTEP[:, None])
    assert relative(run_ours(ours, image), run_theirs(theirs, started, times)) < 1e-5


def test_bfloat16_is_as_exact_as_diffusers(tmp_path: Path) -> None:
    folder = write(tmp_path)
    reference = run_theirs(load_theirs(folder), LATENTS, TIMESTEP)
    theirs = run_theirs(load_theirs(folder, torch.bfloat16), LATENTS, TIMESTEP, torch.bfloat16)
    ours = load_transformer(FAMILY, folder, torch.bfloat16)
    for name, parameter in ours.named_parameters():
        assert FAMILY.weights.stays_float32(name) == (parameter.dtype == torch.float32)
    assert relative(run_ours(ours), reference) < 1.5 * relative(theirs, reference) < 0.3


def test_every_condition_reaches_the_velocity(tmp_path: Path) -> None:
    """Otherwise the comparisons above could not tell whether one of them went astray."""
    ours = load_transformer(FAMILY, write(tmp_path))
    out = run_ours(ours)
    changes: tuple[dict[str, Any], ...] = (
        {"latents": LATENTS * 0.9},
        {"timestep": TIMESTEP * 0.9},
        {"text": TEXT * 0.9},
        {"lengths": (4, 9)},
        {"size": ClipSize(64, 128, 17, 25)},
        {"image": noise(CHANNELS, 1, 2, 4, seed=3)},
    )
    for change in changes:
        assert relative(run_ours(ours, **change), out) > 1e-4, change


@pytest.mark.gpu
def test_on_a_gpu_as_exact_as_on_the_cpu(tmp_path: Path) -> None:
    """With its kernels, and the rows of an image's tokens beside those of the others."""
    ours = load_transformer(FAMILY, write(tmp_path))
    image = noise(CHANNELS, 1, 2, 4, seed=3)
    expected = [run_ours(ours, None), run_ours(ours, image)]
    ours.to("cuda")
    device = {"latents": LATENTS.cuda(), "timestep": TIMESTEP.cuda(), "text": TEXT.cuda()}
    for found, cpu in zip(
        (run_ours(ours, None, **device), run_ours(ours, image.cuda(), **device)), expected, strict=True
    ):
        assert relative(found.cpu(), cpu) < 1e-3
