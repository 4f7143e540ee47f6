"""The whole generation against diffusers' own ZImagePipeline: same folder, noise and prompts, float32 on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from diffusers import ZImagePipeline
from family_parity import assert_equal_runs, load_theirs, record_latents
from tables import table
from tiny_z_image import TINY_SIZES

from diffusion_runtime import GenerationRequest, Pipeline, load_pipeline

PROMPTS = ("a red circle moving left", "two objects: a blue star, and a green ring on a striped background. " * 3)
NEGATIVE_PROMPTS = ("a yellow square", "")


@pytest.fixture(scope="module")
def pair(tiny_z_image_folder: Path) -> tuple[Pipeline, ZImagePipeline]:
    return load_pipeline(str(tiny_z_image_folder), device="cpu"), load_theirs(ZImagePipeline, tiny_z_image_folder)


def request(**values: Any) -> GenerationRequest:
    fields = {"prompt": PROMPTS[0], "negative_prompt": NEGATIVE_PROMPTS[0], **TINY_SIZES, "seed": 5}
    return GenerationRequest(**{**fields, "num_inference_steps": 3, **values})


@table("guidance_scale", [0.0, 0.5, 4.0])
@table("num_requests", [1, 2])
def test_the_pipeline_equals_that_of_diffusers(
    pair: tuple[Pipeline, ZImagePipeline], monkeypatch: pytest.MonkeyPatch, guidance_scale: float, num_requests: int
) -> None:
    ours, theirs = pair
    requests = [
        request(prompt=prompt, negative_prompt=negative, seed=seed, guidance_scale=guidance_scale)
        for prompt, negative, seed in zip(PROMPTS, NEGATIVE_PROMPTS, (5, 6), strict=True)
    ][:num_requests]

    def run_theirs(resolved: list[GenerationRequest], noise: torch.Tensor) -> tuple[list[torch.Tensor], numpy.ndarray]:
        latents: list[torch.Tensor] = []

        def keep(pipeline: Any, step: int, timestep: torch.Tensor, tensors: dict[str, Any]) -> dict[str, Any]:
            latents.append(tensors["latents"].unsqueeze(2).clone())
            return {}

        images = theirs(
            prompt=[item.prompt for item in resolved],
            negative_prompt=[item.negative_prompt for item in resolved],
            height=resolved[0].height,
            width=resolved[0].width,
            num_inference_steps=3,
            guidance_scale=guidance_scale,
            latents=noise.squeeze(2).clone(),
            callback_on_step_end=keep,
            output_type="np",
        ).images
        return latents, images[:, None]

    assert_equal_runs(ours, requests, record_latents(monkeypatch), run_theirs)


def test_two_passes_equal_one_batch(pair: tuple[Pipeline, ZImagePipeline]) -> None:
    frames = [
        pair[0](request(guidance_scale=3.0, guidance_mode=mode)).frames.astype(int) for mode in ("batched", "two_pass")
    ]
    assert numpy.abs(frames[0] - frames[1]).max() <= 1
