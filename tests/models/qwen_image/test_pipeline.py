"""The whole generation against diffusers' own QwenImagePipeline: same folder, noise and prompts, float32 on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from diffusers import QwenImagePipeline
from family_parity import assert_equal_runs, load_theirs, record_latents
from tables import table
from tiny_qwen_image import TINY_SIZES

from diffusion_runtime import GenerationRequest, Pipeline, load_pipeline
from diffusion_runtime.errors import RequestError
from diffusion_runtime.models.qwen_image import family

PROMPTS = ("a red circle moving left", "two objects: a blue star, and a green ring on a striped background {now}.")
NEGATIVE_PROMPTS = ("a yellow square", " ")
NUM_STEPS = 3


@pytest.fixture(scope="module")
def pair(tiny_qwen_image_folder: Path) -> tuple[Pipeline, QwenImagePipeline]:
    folder = tiny_qwen_image_folder
    return load_pipeline(str(folder), device="cpu"), load_theirs(QwenImagePipeline, folder)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The latents after every step of the last generation."""
    return record_latents(monkeypatch)


def request(**values: Any) -> GenerationRequest:
    fields = {"prompt": PROMPTS[0], "negative_prompt": NEGATIVE_PROMPTS[0], **TINY_SIZES, "seed": 5}
    return GenerationRequest(**{**fields, "num_inference_steps": NUM_STEPS, **values})


def run_theirs(
    theirs: QwenImagePipeline, requests: list[GenerationRequest], noise: torch.Tensor, max_tokens: int
) -> tuple[list[torch.Tensor], numpy.ndarray]:
    first = requests[0]
    batch, channels, _, height, width = noise.shape
    latents: list[torch.Tensor] = []

    def keep(pipeline: QwenImagePipeline, step: int, time: torch.Tensor, tensors: dict[str, Any]) -> dict[str, Any]:
        latents.append(QwenImagePipeline._unpack_latents(tensors["latents"], height, width, vae_scale_factor=1))
        return {}

    images = theirs(
        prompt=[request.prompt for request in requests],
        negative_prompt=[request.negative_prompt for request in requests],
        true_cfg_scale=first.guidance_scale,
        height=first.height,
        width=first.width,
        num_inference_steps=first.num_inference_steps,
        latents=QwenImagePipeline._pack_latents(noise[:, :, 0], batch, channels, height, width),
        max_sequence_length=max_tokens,
        callback_on_step_end=keep,
        output_type="np",
    ).images
    return latents, images[:, None]


def check(
    pair: tuple[Pipeline, QwenImagePipeline],
    requests: list[GenerationRequest],
    kept: list[torch.Tensor],
    max_tokens: int = family.MAX_TOKENS,
) -> None:
    ours, theirs = pair
    assert_equal_runs(ours, requests, kept, lambda given, noise: run_theirs(theirs, given, noise, max_tokens))


def test_the_template_is_as_long_as_what_is_cut_off(pair: tuple[Pipeline, QwenImagePipeline]) -> None:
    """The tests' tokenizer cuts it as the published one does, so that a prompt's first token is its own."""
    ours, theirs = pair
    assert len(theirs.tokenizer(family.TEMPLATE.before).input_ids) == family.TEMPLATE.num_cropped
    assert family.TEMPLATE.before + "{}" + family.TEMPLATE.after == theirs.prompt_template_encode
    # Five words, and five tokens behind them.
    assert ours.text_encoder.encode(["a red circle moving left", ""]).lengths == (10, 5)


@table("guidance_mode", ["batched", "two_pass"])
@table("guidance_scale", [1.0, 4.0])
def test_a_batch_of_two_unequal_prompts(
    pair: tuple[Pipeline, QwenImagePipeline], kept: list[torch.Tensor], guidance_mode: str, guidance_scale: float
) -> None:
    requests = [
        request(
            prompt=prompt,
            negative_prompt=negative,
            seed=seed,
            guidance_mode=guidance_mode,
            guidance_scale=guidance_scale,
        )
        for prompt, negative, seed in zip(PROMPTS, NEGATIVE_PROMPTS, (5, 6), strict=True)
    ]
    check(pair, requests, kept)


def test_another_size_and_the_default_guidance(
    pair: tuple[Pipeline, QwenImagePipeline], kept: list[torch.Tensor]
) -> None:
    values = request(height=48, width=24, num_inference_steps=5, negative_prompt=None)
    assert pair[0].resolve(values).negative_prompt == " "
    assert pair[0].resolve(values).guidance_scale == 4.0
    check(pair, [values], kept)


def test_prompts_and_seed_matter(pair: tuple[Pipeline, QwenImagePipeline]) -> None:
    """Otherwise the comparisons could not tell whether one went astray."""
    frames = [
        pair[0](request(**values)).frames.astype(int)
        for values in ({}, {"prompt": PROMPTS[1]}, {"negative_prompt": " "}, {"seed": 6}, {"guidance_scale": 2.0})
    ]
    for other in frames[1:]:
        assert numpy.abs(frames[0] - other).max() > 4


def test_a_long_prompt_is_cut_and_told(
    pair: tuple[Pipeline, QwenImagePipeline], kept: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair[0].text_encoder, "max_tokens", 12)
    long = request(prompt="a red star and " * 4, guidance_scale=1.0)
    media = pair[0](long)
    # 16 words, a space and five tokens behind them.
    assert any("the last 10 tokens past 12 are cut off" in note for note in media.recipe["notes"])
    check(pair, [long], kept, max_tokens=12)


def test_more_than_one_frame_and_the_scale_of_distilled_models_are_refused(
    pair: tuple[Pipeline, QwenImagePipeline],
) -> None:
    with pytest.raises(RequestError, match="num_frames: this model makes images, expected 1, got 5"):
        pair[0].resolve(request(num_frames=5))
    with pytest.raises(RequestError, match="true_cfg_scale"):
        pair[0].resolve(request(true_cfg_scale=2.0))
