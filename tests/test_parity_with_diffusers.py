"""The whole generation against diffusers' own WanPipeline: same folder, noise and prompts, float32 on the CPU.

Latents after every step within 1e-5 (of their largest value), decoded frames within 1/255.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from diffusers import WanPipeline
from family_parity import assert_equal_runs, load_theirs, record_latents
from tiny_models import TINY_SIZES, write_tiny_wan

from diffusion_runtime import GenerationRequest, Pipeline, load_pipeline

NUM_STEPS = 4
GUIDANCE_SCALE = 4.0
PROMPTS = ("a red circle moving left", "two objects: a blue star, and a green ring on a striped background.")
NEGATIVE_PROMPTS = ("a yellow square", "")


@pytest.fixture
def our_latents(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Gets the latents after every step of the generations in this test."""
    return record_latents(monkeypatch)


@pytest.fixture(scope="module")
def loaded(
    tiny_wan_folder: Path, tiny_wan_euler_folder: Path
) -> Iterator[Callable[[str], tuple[Pipeline, WanPipeline]]]:
    """Sampler name -> our pipeline and diffusers' on the folder with that scheduler, each loaded once."""
    folders = {"unipc": tiny_wan_folder, "flow_match_euler": tiny_wan_euler_folder}
    pairs: dict[str, tuple[Pipeline, WanPipeline]] = {}

    def pair(sampler: str) -> tuple[Pipeline, WanPipeline]:
        if sampler not in pairs:
            pairs[sampler] = (
                load_pipeline(str(folders[sampler]), device="cpu"),
                load_theirs(WanPipeline, folders[sampler]),
            )
        return pairs[sampler]

    yield pair
    pairs.clear()


def run_theirs(
    theirs: WanPipeline, requests: list[GenerationRequest], noise: torch.Tensor, max_tokens: int
) -> tuple[list[torch.Tensor], numpy.ndarray]:
    """Latents after every step, and frames in [0, 1] [batch, frames, height, width, 3]."""
    latents: list[torch.Tensor] = []

    def keep(pipeline: WanPipeline, step: int, timestep: torch.Tensor, tensors: dict[str, Any]) -> dict[str, Any]:
        latents.append(tensors["latents"].clone())
        return {}

    frames = theirs(
        prompt=[request.prompt for request in requests],
        negative_prompt=[request.negative_prompt for request in requests],
        height=requests[0].height,
        width=requests[0].width,
        num_frames=requests[0].num_frames,
        num_inference_steps=requests[0].num_inference_steps,
        guidance_scale=requests[0].guidance_scale,
        latents=noise.clone(),
        max_sequence_length=max_tokens,
        callback_on_step_end=keep,
        output_type="np",
    ).frames
    return latents, frames


def assert_equal_to(
    ours: Pipeline, theirs: WanPipeline, requests: list[GenerationRequest], kept: list[torch.Tensor]
) -> None:
    run = functools.partial(run_theirs, theirs, max_tokens=ours.text_encoder.max_tokens)
    assert_equal_runs(ours, requests, kept, run, latents_within=1e-5, frames_within=1 / 255)


def request(**values: Any) -> GenerationRequest:
    fields: dict[str, Any] = {
        "prompt": PROMPTS[0],
        "negative_prompt": NEGATIVE_PROMPTS[0],
        **TINY_SIZES,
        "num_inference_steps": NUM_STEPS,
        "guidance_scale": GUIDANCE_SCALE,
        "seed": 5,
    }
    return GenerationRequest(**(fields | values))


@pytest.mark.parametrize("sampler", ["unipc", "flow_match_euler"])
@pytest.mark.parametrize("guidance_mode", ["batched", "two_pass"])
@pytest.mark.parametrize("num_frames", [1, 5])
def test_one_request(
    loaded: Callable[[str], tuple[Pipeline, WanPipeline]],
    our_latents: list[torch.Tensor],
    sampler: str,
    guidance_mode: str,
    num_frames: int,
) -> None:
    ours, theirs = loaded(sampler)
    assert ours.defaults["sampler"] == sampler
    assert_equal_to(ours, theirs, [request(guidance_mode=guidance_mode, num_frames=num_frames)], our_latents)


@pytest.mark.parametrize("sampler", ["unipc", "flow_match_euler"])
@pytest.mark.parametrize("guidance_mode", ["batched", "two_pass"])
def test_a_batch_of_two_unequal_prompts(
    loaded: Callable[[str], tuple[Pipeline, WanPipeline]],
    our_latents: list[torch.Tensor],
    sampler: str,
    guidance_mode: str,
) -> None:
    ours, theirs = loaded(sampler)
    requests = [
        request(prompt=prompt, negative_prompt=negative, guidance_mode=guidance_mode, seed=seed)
        for prompt, negative, seed in zip(PROMPTS, NEGATIVE_PROMPTS, (5, 6), strict=True)
    ]
    assert_equal_to(ours, theirs, requests, our_latents)


def test_without_guidance(
    loaded: Callable[[str], tuple[Pipeline, WanPipeline]], our_latents: list[torch.Tensor]
) -> None:
    assert_equal_to(*loaded("unipc"), [request(guidance_scale=1.0)], our_latents)


def test_wide_frames_and_more_steps(
    loaded: Callable[[str], tuple[Pipeline, WanPipeline]], our_latents: list[torch.Tensor]
) -> None:
    values = {"height": 32, "width": 64, "num_frames": 9, "num_inference_steps": 9}
    assert_equal_to(*loaded("unipc"), [request(**values)], our_latents)


def test_another_flow_shift_and_the_layout_of_the_real_vae(tmp_path: Path, our_latents: list[torch.Tensor]) -> None:
    folder = write_tiny_wan(tmp_path / "wan", scheduler="flow_match_euler", vae="plain", flow_shift=7.0)
    ours = load_pipeline(str(folder), device="cpu")
    assert ours.defaults["flow_shift"] == 7.0
    assert_equal_to(ours, load_theirs(WanPipeline, folder), [request()], our_latents)


def test_the_embedded_model(our_latents: list[torch.Tensor]) -> None:
    """At its own size and guidance: a trained model amplifies rounding from step to step, on small grids the most."""
    ours = load_pipeline("shapes", device="cpu", dtype="float32")
    sizes = {name: ours.defaults[name] for name in ("height", "width")}
    values = {**sizes, "num_frames": 9, "guidance_scale": ours.defaults["guidance_scale"]}
    # In 8 bits, which diffusers does not read, or not.
    theirs = load_pipeline("shapes", backend="diffusers", device="cpu", dtype="float32").pipeline
    assert_equal_to(ours, theirs, [request(**values)], our_latents)


def test_the_prompt_and_the_negative_prompt_matter(loaded: Callable[[str], tuple[Pipeline, WanPipeline]]) -> None:
    """Otherwise the comparisons above could not tell whether a text went astray."""
    ours, _ = loaded("unipc")
    frames = [
        ours(request(**values)).frames.astype(int)
        for values in ({}, {"prompt": PROMPTS[1]}, {"negative_prompt": ""}, {"seed": 6})
    ]
    for other in frames[1:]:
        assert numpy.abs(frames[0] - other).max() > 4
