"""The whole generation against diffusers' own HunyuanVideoPipeline: same folder, noise and prompts, float32, CPU."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from diffusers import AutoencoderKLHunyuanVideo, HunyuanVideoPipeline
from family_parity import CPU, assert_equal_runs, load_theirs, record_latents, relative
from tables import table
from tiny_hunyuan_video import TINY_SIZES, write_tiny_hunyuan_video

from diffusion_runtime import GenerationRequest, Pipeline, load_pipeline
from diffusion_runtime.models.hunyuan_video.family import load_decoder

PROMPTS = ("a red circle moving left", "two objects: a blue star, and a green ring on a striped background.")
NEGATIVE_PROMPTS = ("a yellow square", "")

Pair = tuple[Pipeline, HunyuanVideoPipeline]


@pytest.fixture(scope="module")
def pair(tiny_folder: Path) -> Pair:
    """Our pipeline and diffusers' on one folder."""
    return load_pipeline(str(tiny_folder), device="cpu"), load_theirs(HunyuanVideoPipeline, tiny_folder)


@pytest.fixture
def our_latents(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    return record_latents(monkeypatch)


def compare(pair: Pair, requests: list[GenerationRequest], kept: list[torch.Tensor]) -> None:
    ours, theirs = pair

    def run_theirs(resolved: list[GenerationRequest], noise: torch.Tensor) -> tuple[list[torch.Tensor], numpy.ndarray]:
        latents: list[torch.Tensor] = []

        def keep(pipeline: Any, step: int, timestep: torch.Tensor, tensors: dict[str, Any]) -> dict[str, Any]:
            latents.append(tensors["latents"].clone())
            return {}

        first = resolved[0]
        scale = first.true_cfg_scale if ours.rules.sampling.embeds_guidance else first.guidance_scale
        frames = theirs(
            prompt=[request.prompt for request in resolved],
            negative_prompt=[request.negative_prompt for request in resolved],
            height=first.height,
            width=first.width,
            num_frames=first.num_frames,
            num_inference_steps=first.num_inference_steps,
            guidance_scale=first.guidance_scale,
            true_cfg_scale=1.0 if scale is None else scale,
            latents=noise.clone(),
            callback_on_step_end=keep,
            output_type="np",
        ).frames
        return latents, frames

    assert_equal_runs(ours, requests, kept, run_theirs)


def request(**values: Any) -> GenerationRequest:
    fields: dict[str, Any] = {"prompt": PROMPTS[0], **TINY_SIZES, "num_inference_steps": 3, "seed": 5}
    return GenerationRequest(**(fields | values))


def batch(**values: Any) -> list[GenerationRequest]:
    pairs = zip(PROMPTS, NEGATIVE_PROMPTS, (5, 6), strict=True)
    return [request(prompt=prompt, negative_prompt=other, seed=seed, **values) for prompt, other, seed in pairs]


@table("num_frames", [1, 9])
def test_one_request(pair: Pair, our_latents: list[torch.Tensor], num_frames: int) -> None:
    compare(pair, [request(num_frames=num_frames)], our_latents)


def test_a_batch_of_two_unequal_prompts(pair: Pair, our_latents: list[torch.Tensor]) -> None:
    compare(pair, batch(guidance_scale=4.0), our_latents)


@table("guidance_mode", ["batched", "two_pass"])
def test_classifier_free_guidance_on_top(pair: Pair, our_latents: list[torch.Tensor], guidance_mode: str) -> None:
    compare(pair, batch(true_cfg_scale=3.0, guidance_mode=guidance_mode), our_latents)


def test_a_model_that_takes_no_guidance(tmp_path: Path, our_latents: list[torch.Tensor]) -> None:
    folder = write_tiny_hunyuan_video(tmp_path / "model", has_guidance=False, num_layers=1, num_single_layers=1)
    ours = load_pipeline(str(folder), device="cpu")
    assert not ours.rules.sampling.embeds_guidance
    values = {"guidance_scale": 3.0, "negative_prompt": NEGATIVE_PROMPTS[0]}
    compare((ours, load_theirs(HunyuanVideoPipeline, folder)), [request(**values)], our_latents)


def test_a_long_prompt_is_cut_where_diffusers_cuts_it(pair: Pair, our_latents: list[torch.Tensor]) -> None:
    long = "a red circle and a blue star moving left , " * 30
    ours, _ = pair
    conditions = ours.text_encoder.encode([long, "a red circle"])
    # 300 words and the template's end, in room for 256.
    assert (conditions.lengths, conditions.num_cut_tokens) == ((256, 4), (45, 0))
    of_language_model, of_clip = conditions.remarks(0, long)
    assert of_language_model.endswith("too long for the language model, the last 45 tokens past 256 are cut off")
    assert re.search(r"too long for CLIP, the last \d+ tokens past 77 are cut off there$", of_clip)
    assert conditions.remarks(1, "a red circle") == ()
    compare(pair, [request(prompt=long, num_inference_steps=2)], our_latents)


def test_words_of_the_prompt_that_are_unknown_are_named(pair: Pair) -> None:
    conditions = pair[0].text_encoder.encode(["a red snark", "a circle"])
    assert conditions.unknown_words == (("snark",), ())


def test_prompts_guidance_and_seed_matter(pair: Pair) -> None:
    """Otherwise the comparisons above could not tell whether one of them went astray."""
    ours, _ = pair
    values: list[dict[str, Any]] = [
        {},
        {"prompt": PROMPTS[1]},
        {"guidance_scale": 2.0},
        {"true_cfg_scale": 3.0},
        {"true_cfg_scale": 3.0, "negative_prompt": NEGATIVE_PROMPTS[0]},
        {"seed": 6},
    ]
    frames = [ours(request(**changed)).frames.astype(int) for changed in values]
    for index, first in enumerate(frames):
        assert all(numpy.abs(first - other).max() > 2 for other in frames[index + 1 :])


def test_large_and_long_clips_are_decoded_in_tiles(tiny_folder: Path) -> None:
    """21 frames of 288 pixels: two tiles in width, two in time."""
    theirs = AutoencoderKLHunyuanVideo.from_pretrained(tiny_folder / "vae").eval()
    latents = torch.randn(1, 16, 6, 4, 36, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = theirs.decode(latents / 0.6).sample
        theirs.enable_tiling()
        tiled = theirs.decode(latents / 0.6).sample
    assert relative(whole, tiled) > 1e-3
    frames = load_decoder(tiny_folder, CPU, torch.float32).decode(latents)
    assert frames.shape == (1, 21, 32, 288, 3)
    assert relative(frames, (tiled * 0.5 + 0.5).clamp(0, 1).permute(0, 2, 3, 4, 1)) < 1e-4
