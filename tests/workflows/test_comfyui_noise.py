"""`noise: comfyui`: the numbers that ComfyUI's samplers draw on a CPU, by its formula written out here."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from tables import table

from diffusion_runtime import GenerationRequest, RuntimeConfig
from diffusion_runtime.errors import RequestError
from diffusion_runtime.generation.denoising_stages import stages_of
from diffusion_runtime.loading import prepare
from diffusion_runtime.rules.batch_settings import BatchSettings


@functools.cache
def rules_of(model: str) -> Any:
    return prepare(RuntimeConfig(model_path=model, device="cpu", offline=True), is_dry_run=True).rules


def settings_of(model: str, **values: Any) -> BatchSettings:
    rules = rules_of(model)
    resolved = rules.resolve(GenerationRequest("a cat", height=128, width=192, seed=7, **values))
    settings: BatchSettings = rules.settings(resolved)
    return settings


def drawn(seed: int, *shapes: tuple[int, ...]) -> torch.Tensor:
    """One generator, one tensor of the latents after the other, as a batch of one."""
    generator = torch.manual_seed(seed)
    parts = [torch.randn((1, *shape), dtype=torch.float32, generator=generator, device="cpu") for shape in shapes]
    return torch.cat([part.flatten() for part in parts])


@table(
    ("model", "values", "shapes"),
    [
        # EmptySD3LatentImage, EmptyFlux2LatentImage, EmptyHunyuanLatentVideo, EmptyLTXVLatentVideo with its sound.
        ("z-image-turbo", {}, [(16, 16, 24)]),
        ("flux.2-klein-4b", {}, [(128, 8, 12)]),
        ("wan2.2-t2v-a14b", {"num_frames": 9}, [(16, 3, 16, 24)]),
        ("ltx-2.3", {"num_frames": 33, "fps": 25}, [(128, 5, 4, 6), (8, 33, 16)]),
    ],
)
def test_noise_is_drawn_in_the_shape_and_order_of_comfyuis_latents(
    model: str, values: dict[str, Any], shapes: list[tuple[int, ...]]
) -> None:
    settings = settings_of(model, noise="comfyui", **values)
    noise = stages_of(settings)[0].noise([7])
    assert torch.equal(noise.draw().flatten(), drawn(7, *shapes))
    # Between steps of all latents at once, by a generator that begins one further.
    whole = (sum(torch.Size(shape).numel() for shape in shapes),)
    between = torch.manual_seed(8)
    for _ in range(2):
        assert torch.equal(noise.draw().flatten(), torch.randn((1, *whole), generator=between).flatten())


def test_noise_of_its_own_goes_on_with_the_generator() -> None:
    noise, generator = stages_of(settings_of("z-image-turbo"))[0].noise([7]), torch.manual_seed(7)
    for _ in range(2):
        assert torch.equal(noise.draw(), torch.randn((1, 16, 1, 16, 24), generator=generator))


@table(
    ("model", "values", "said"),
    [
        (
            "minimax-h3",
            {"num_frames": 124},
            "the order of numbers in ComfyUI's latents of this model is not known here",
        ),
        ("wan2.2-t2v-a14b", {"num_frames": 9, "sampler": "dpmpp_sde"}, "the Brownian path of dpmpp_sde is another one"),
    ],
)
def test_noise_without_such_a_formula_is_refused(model: str, values: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        settings_of(model, noise="comfyui", **values)
