"""The whole generation against diffusers' own FluxPipeline: same folder, noise and prompts, float32 on the CPU."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from diffusers import FluxPipeline
from family_parity import assert_equal_runs, load_theirs, record_latents
from tables import table
from tiny_flux1 import MAX_TEXT_TOKENS, TINY_SIZES

from diffusion_runtime import GenerationRequest, Pipeline, load_pipeline
from diffusion_runtime.errors import RequestError

PROMPTS = ("a red circle moving left", "two objects: a blue star, and a green ring on a striped background.")
NEGATIVE_PROMPTS = ("a yellow square", "")
NUM_STEPS = 3


@pytest.fixture(scope="module")
def dev(tiny_flux1_folder: Path) -> tuple[Pipeline, FluxPipeline]:
    return load_pipeline(str(tiny_flux1_folder), device="cpu"), load_theirs(FluxPipeline, tiny_flux1_folder)


@pytest.fixture(scope="module")
def schnell(tiny_flux1_schnell_folder: Path) -> tuple[Pipeline, FluxPipeline]:
    folder = tiny_flux1_schnell_folder
    return load_pipeline(str(folder), device="cpu"), load_theirs(FluxPipeline, folder)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The latents after every step of the last generation."""
    return record_latents(monkeypatch)


def request(**values: Any) -> GenerationRequest:
    fields = {"prompt": PROMPTS[0], "negative_prompt": NEGATIVE_PROMPTS[0], **TINY_SIZES, "seed": 5}
    return GenerationRequest(**{**fields, "num_inference_steps": NUM_STEPS, **values})


def run_theirs(
    theirs: FluxPipeline, requests: list[GenerationRequest], noise: torch.Tensor, true_cfg_scale: float
) -> tuple[list[torch.Tensor], numpy.ndarray]:
    first = requests[0]
    batch, channels, _, height, width = noise.shape
    latents: list[torch.Tensor] = []

    def keep(pipeline: FluxPipeline, step: int, timestep: torch.Tensor, tensors: dict[str, Any]) -> dict[str, Any]:
        latents.append(FluxPipeline._unpack_latents(tensors["latents"], height, width, vae_scale_factor=1)[:, :, None])
        return {}

    images = theirs(
        prompt=[request.prompt for request in requests],
        negative_prompt=[request.negative_prompt for request in requests],
        true_cfg_scale=true_cfg_scale,
        height=first.height,
        width=first.width,
        num_inference_steps=first.num_inference_steps,
        guidance_scale=first.guidance_scale,
        latents=FluxPipeline._pack_latents(noise[:, :, 0], batch, channels, height, width),
        max_sequence_length=MAX_TEXT_TOKENS,
        callback_on_step_end=keep,
        output_type="np",
    ).images
    return latents, images[:, None]


def check(
    pair: tuple[Pipeline, FluxPipeline],
    requests: list[GenerationRequest],
    kept: list[torch.Tensor],
    true_cfg_scale: float = 1.0,
) -> None:
    ours, theirs = pair
    assert_equal_runs(ours, requests, kept, lambda resolved, noise: run_theirs(theirs, resolved, noise, true_cfg_scale))


@table("guidance_mode", ["batched", "two_pass"])
@table("true_cfg_scale", [None, 3.0])
def test_a_batch_of_two_unequal_prompts(
    dev: tuple[Pipeline, FluxPipeline],
    kept: list[torch.Tensor],
    guidance_mode: str,
    true_cfg_scale: float | None,
) -> None:
    requests = [
        request(
            prompt=prompt,
            negative_prompt=negative,
            seed=seed,
            guidance_mode=guidance_mode,
            true_cfg_scale=true_cfg_scale,
        )
        for prompt, negative, seed in zip(PROMPTS, NEGATIVE_PROMPTS, (5, 6), strict=True)
    ]
    check(dev, requests, kept, true_cfg_scale or 1.0)


def test_another_scale_and_size(dev: tuple[Pipeline, FluxPipeline], kept: list[torch.Tensor]) -> None:
    check(dev, [request(guidance_scale=1.5, height=32, width=8, num_inference_steps=5)], kept)


def test_without_embedded_guidance(schnell: tuple[Pipeline, FluxPipeline], kept: list[torch.Tensor]) -> None:
    """As the folder's defaults are: four steps, one branch, a fixed shift."""
    defaults = schnell[0].resolve(GenerationRequest(prompt="a star", **TINY_SIZES))
    assert (defaults.num_inference_steps, defaults.guidance_scale, defaults.flow_shift) == (4, 1.0, 1.0)
    check(schnell, [request(num_inference_steps=None)], kept)
    # Where guidance is no input, guidance_scale is classifier-free guidance's.
    check(schnell, [request(guidance_scale=2.0)], kept, true_cfg_scale=2.0)
    with pytest.raises(RequestError, match="true_cfg_scale"):
        schnell[0].resolve(request(true_cfg_scale=2.0))


def test_prompts_guidance_and_seed_matter(dev: tuple[Pipeline, FluxPipeline]) -> None:
    """Otherwise the comparisons could not tell whether one went astray."""
    guided = {"true_cfg_scale": 3.0}
    frames = [
        dev[0](request(**guided, **values)).frames.astype(int)
        for values in ({}, {"prompt": PROMPTS[1]}, {"negative_prompt": ""}, {"seed": 6}, {"guidance_scale": 1.0})
    ]
    for other in frames[1:]:
        assert numpy.abs(frames[0] - other).max() > 4


def test_the_shift_grows_with_the_tokens(dev: tuple[Pipeline, FluxPipeline]) -> None:
    """exp(1.15) at 4096 tokens: 64 x 64 tokens of 4 x 4 pixels here."""
    shift = dev[0].resolve(request(height=256, width=256)).flow_shift
    assert shift == pytest.approx(3.158193, rel=1e-6)


def test_more_than_one_frame_is_refused(dev: tuple[Pipeline, FluxPipeline]) -> None:
    with pytest.raises(RequestError, match="num_frames: this model makes images, expected 1, got 5"):
        dev[0].resolve(request(num_frames=5))


def test_a_long_prompt_is_cut_and_told(dev: tuple[Pipeline, FluxPipeline], kept: list[torch.Tensor]) -> None:
    """20 of T5's tokens and 77 of CLIP's, one a letter."""
    long = request(prompt="striped background " * 12)
    media = dev[0](long)
    of_t5, of_clip = media.recipe["notes"]
    assert of_t5.endswith("too long for T5, the last 5 tokens past 20 are cut off")
    assert re.search(r"too long for CLIP, the last \d+ tokens past 77 are cut off there$", of_clip)
    # What fits into CLIP is not remarked on.
    assert dev[0](request(prompt="a circle")).recipe["notes"] == []
    check(dev, [long], kept)
