"""Wan's image-to-video models against diffusers' WanImageToVideoPipeline on tiny weights: Wan 2.2 I2V (two experts, a
condition beside the latents), Wan 2.1 I2V (with the tokens of an image encoder) and FLF2V (of two images)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from diffusers import WanImageToVideoPipeline
from family_parity import CPU, assert_equal_runs, load_theirs, load_transformer, record_latents, relative
from PIL import Image
from tiny_models import IMAGE_DIM, write_tiny_wan

from diffusion_runtime import GenerationRequest, Pipeline, load_pipeline
from diffusion_runtime.attention import AttentionContext
from diffusion_runtime.models.geometry import ClipSize
from diffusion_runtime.models.interface import DenoiserInputs, ImageCondition
from diffusion_runtime.models.wan.family import FAMILY
from diffusion_runtime.text_encoders.interface import Conditions

PROMPTS = ("a red circle moving left", "two objects: a blue star, and a green ring.")
NEGATIVE = "a yellow square"
TWO_EXPERTS = {"condition": "clip", "boundary_ratio": 0.9, "vae": "plain"}
TOKENS = {"condition": "clip and tokens"}
TWO_IMAGES = {"condition": "clip and tokens of two images"}
FolderOf = Callable[[Mapping[str, Any]], Path]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    folders: dict[str, Path] = {}

    def folder(kind: Mapping[str, Any]) -> Path:
        name = str(kind["condition"])
        if name not in folders:
            folders[name] = write_tiny_wan(tmp_path_factory.mktemp("wan") / "model", **kind)
        return folders[name]

    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two images of the clip's size, as the keyword arguments of a request."""
    folder = tmp_path_factory.mktemp("pictures")
    for index, name in enumerate(("image_path", "last_image_path")):
        rows, columns = numpy.mgrid[0:32, 0:48]
        pixels = numpy.stack([5 * rows, 4 * columns, 255 - rows], axis=-1).astype(numpy.uint8)
        Image.fromarray(numpy.roll(pixels, 10 * index, axis=(0, 2))).save(folder / f"{name}.png")
    return {name: str(folder / f"{name}.png") for name in ("image_path", "last_image_path")}


@pytest.fixture
def our_latents(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    return record_latents(monkeypatch)


def request(**values: Any) -> GenerationRequest:
    sizes = {"height": 32, "width": 48, "num_frames": 9, "num_inference_steps": 4}
    fields = {"prompt": PROMPTS[0], "negative_prompt": NEGATIVE, **sizes, "guidance_scale": 4.0, "seed": 5}
    return GenerationRequest(**(fields | values))


def compare(ours: Pipeline, theirs: Any, requests: list[GenerationRequest], kept: list[torch.Tensor]) -> None:
    def run_theirs(resolved: list[GenerationRequest], noise: torch.Tensor) -> tuple[list[torch.Tensor], numpy.ndarray]:
        first, latents = resolved[0], []

        def keep(_: Any, __: int, ___: Any, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            latents.append(values["latents"].clone())
            return {}

        assert first.image_path is not None
        last = None if first.last_image_path is None else Image.open(first.last_image_path)
        frames = theirs(
            image=Image.open(first.image_path),
            last_image=last,
            prompt=[request.prompt for request in resolved],
            negative_prompt=[request.negative_prompt for request in resolved],
            height=first.height,
            width=first.width,
            num_frames=first.num_frames,
            num_inference_steps=first.num_inference_steps,
            guidance_scale=first.guidance_scale,
            guidance_scale_2=first.guidance_scale_2,
            latents=noise.clone(),
            max_sequence_length=ours.text_encoder.max_tokens,
            callback_on_step_end=keep,
            output_type="np",
        ).frames
        return latents, frames

    assert_equal_runs(ours, requests, kept, run_theirs)


CASES: dict[str, tuple[Mapping[str, Any], tuple[str, ...], dict[str, Any]]] = {
    "two experts": (TWO_EXPERTS, ("image_path",), {"guidance_scale": 4.0, "guidance_scale_2": 2.5}),
    "two experts, two images": (TWO_EXPERTS, ("image_path", "last_image_path"), {"guidance_scale": 1.0}),
    "tokens": (TOKENS, ("image_path",), {"guidance_mode": "two_pass"}),
    "tokens of two images": (TWO_IMAGES, ("image_path", "last_image_path"), {}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_generation_equals_diffusers(
    folder_of: FolderOf, pictures: dict[str, str], our_latents: list[torch.Tensor], name: str
) -> None:
    kind, images, values = CASES[name]
    folder = folder_of(kind)
    ours, theirs = load_pipeline(str(folder), device="cpu"), load_theirs(WanImageToVideoPipeline, folder)
    assert isinstance(ours, Pipeline)
    given = {field: pictures[field] for field in images}
    requests = [
        request(prompt=prompt, seed=seed, **given, **values) for prompt, seed in zip(PROMPTS, (5, 6), strict=True)
    ]
    compare(ours, theirs, requests, our_latents)
