"""The SCAIL-2 transformer against a specification in float64 on tiny weights: within 1e-5 of the largest value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from family_parity import load_transformer, relative
from safetensors.torch import load_file
from tables import table
from tiny_scail_2 import CONFIG, MAX_TEXT_TOKENS, write_tiny_scail_2

from diffusion_runtime import GenerationRequest
from diffusion_runtime.attention import AttentionContext
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.core.model_folder import ModelFolder
from diffusion_runtime.models.interface import DenoiserInputs, ImageCondition
from diffusion_runtime.models.registry import family_for_folder
from diffusion_runtime.text_encoders.interface import Conditions

from .specification import specified

FRAMES, HEIGHT, WIDTH = 3, 8, 12
LENGTHS, TIMESTEPS = (5, 9), (937.3, 474.65)


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_scail_2(tmp_path_factory.mktemp("scail") / "model")


@table(
    ("num_images", "known", "replaces"),
    [(1, 0, False), (1, 0, True), (3, 2, False), (2, 1, True)],
)
def test_a_step_equals_the_specification(folder: Path, num_images: int, known: int, replaces: bool) -> None:
    ours = load_transformer(family_for_folder(ModelFolder(folder)), ModelFolder(folder))
    weights = load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
    x, history = randn(2, 16, FRAMES, HEIGHT, WIDTH, seed=0), randn(16, FRAMES, HEIGHT, WIDTH, seed=1)
    given: dict[str, Any] = {
        "driving": randn(16, FRAMES, HEIGHT // 2, WIDTH // 2, seed=2),
        "driving_mask": randn(28, FRAMES, HEIGHT // 2, WIDTH // 2, seed=3).sigmoid(),
        "images": randn(16, num_images, HEIGHT, WIDTH, seed=4),
        "image_masks": randn(28, num_images, HEIGHT, WIDTH, seed=5).sigmoid(),
    }
    text, tokens = randn(2, MAX_TEXT_TOKENS, 32, seed=6), randn(1, 5, 1280, seed=7)
    for row, length in zip(text, LENGTHS, strict=True):
        row[length:] = 0
    of_clip = torch.zeros(20, FRAMES, HEIGHT, WIDTH)
    of_clip[:4, :known], of_clip[4:, :known] = 1, history[:, :known]
    image = ImageCondition(
        of_clip[None],
        tokens,
        further=(
            torch.cat([given["driving"], given["driving_mask"]])[None],
            torch.cat([given["images"], given["image_masks"]])[None],
        ),
    )
    request = GenerationRequest("-", character_mode="replace" if replaces else "animate")
    size = ClipSize(8 * HEIGHT, 8 * WIDTH, 4 * FRAMES - 3, 16)
    inputs = DenoiserInputs(Conditions.of(text, LENGTHS), size, image=image.repeat(2), request=request)
    context = AttentionContext()
    found = ours(x, torch.tensor(TIMESTEPS), inputs, context)
    clean = torch.cat([history[:, :known].expand(2, -1, -1, -1, -1), x[:, :, known:]], dim=2)
    expected = [
        specified(weights, CONFIG, each, time, of_text, tokens[0], **given, known=known, replaces=replaces)
        for each, time, of_text in zip(clean, TIMESTEPS, text, strict=True)
    ]
    assert relative(found, torch.stack(expected)) <= 1e-5
    assert torch.equal(ours.settle(x, inputs), clean)
    counted = {(row.role, row.count) for row in context.recorder.report().rows}
    assert counted == {("self", 2), ("cross", 2), ("wan.image_cross", 2)}
