"""The whole generation against diffusers' own FLUX.2 pipelines: same folder, noise and prompts, float32 on the CPU."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from diffusers import Flux2KleinPipeline, Flux2Pipeline
from family_parity import assert_equal_runs, load_theirs, record_latents, relative
from tables import table
from tiny_flux2 import TINY_SIZES, change_json

from diffusion_runtime import GenerationRequest, Pipeline, load_pipeline
from diffusion_runtime.models.flux2.codec import load_decoder

# The second is longer than there is room for, and asks for a picture that nobody gives.
PROMPTS = ("a red circle moving left", "[IMG]two objects: a blue star, and a green ring on a striped background. " * 40)


@pytest.fixture(scope="module")
def dev(tiny_flux2_folder: Path) -> tuple[Pipeline, Flux2Pipeline]:
    return load_pipeline(str(tiny_flux2_folder), device="cpu"), load_theirs(Flux2Pipeline, tiny_flux2_folder)


@pytest.fixture(scope="module")
def klein(tiny_klein_folder: Path) -> tuple[Pipeline, Flux2KleinPipeline]:
    return load_pipeline(str(tiny_klein_folder), device="cpu"), load_theirs(Flux2KleinPipeline, tiny_klein_folder)


def requests(number: int, **values: Any) -> list[GenerationRequest]:
    fields = {**TINY_SIZES, "num_inference_steps": 3, **values}
    return [
        GenerationRequest(prompt=prompt, seed=seed, **fields) for prompt, seed in zip(PROMPTS, (5, 6), strict=True)
    ][:number]


def assert_equals_theirs(
    pair: tuple[Pipeline, Any], wanted: list[GenerationRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = pair

    def run_theirs(resolved: list[GenerationRequest], noise: torch.Tensor) -> tuple[list[torch.Tensor], numpy.ndarray]:
        latents: list[torch.Tensor] = []
        rows, columns = noise.shape[-2:]

        def keep(pipeline: Any, step: int, timestep: torch.Tensor, tensors: dict[str, Any]) -> dict[str, Any]:
            latents.append(tensors["latents"].transpose(1, 2).unflatten(2, (1, rows, columns)).clone())
            return {}

        images = theirs(
            prompt=[item.prompt for item in resolved],
            height=resolved[0].height,
            width=resolved[0].width,
            num_inference_steps=resolved[0].num_inference_steps,
            guidance_scale=resolved[0].guidance_scale,
            latents=noise.squeeze(2).clone(),
            callback_on_step_end=keep,
            output_type="np",
        ).images
        return latents, images[:, None]

    assert_equal_runs(ours, wanted, record_latents(monkeypatch), run_theirs)


@pytest.mark.parametrize("name", ["dev", "klein"])
def test_every_token_of_the_text_equals_that_of_diffusers(name: str, request: pytest.FixtureRequest) -> None:
    ours, theirs = request.getfixturevalue(name)
    with torch.no_grad():
        expected, _ = theirs.encode_prompt(list(PROMPTS))
    found = ours.text_encoder.encode(PROMPTS).embeddings
    assert found.shape == expected.shape
    for place in range(found.shape[1]):
        assert relative(found[:, place], expected[:, place]) < 1e-5


@table("guidance_scale", [1.0, 4.0])
@table("number", [1, 2])
def test_dev_equals_that_of_diffusers(
    dev: tuple[Pipeline, Flux2Pipeline], monkeypatch: pytest.MonkeyPatch, guidance_scale: float, number: int
) -> None:
    assert_equals_theirs(dev, requests(number, guidance_scale=guidance_scale), monkeypatch)


@table("guidance_scale", [1.0, 4.0])
@table("number", [1, 2])
def test_klein_equals_that_of_diffusers(
    klein: tuple[Pipeline, Flux2KleinPipeline], monkeypatch: pytest.MonkeyPatch, guidance_scale: float, number: int
) -> None:
    assert_equals_theirs(klein, requests(number, guidance_scale=guidance_scale), monkeypatch)


def test_padding_is_on_the_side_that_the_tokenizer_says(
    dev: tuple[Pipeline, Flux2Pipeline], tiny_flux2_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(tiny_flux2_folder, tmp_path / "right"))
    change_json(folder / "tokenizer" / "tokenizer_config.json", {"padding_side": "right"})
    right = load_pipeline(str(folder), device="cpu"), load_theirs(Flux2Pipeline, folder)
    assert_equals_theirs(right, requests(1), monkeypatch)
    embeddings = [pipeline.text_encoder.encode(PROMPTS[:1]).embeddings for pipeline in (dev[0], right[0])]
    assert (embeddings[0] - embeddings[1]).abs().max() > 0.1


def test_padding_is_on_the_left_where_the_tokenizer_does_not_say(
    dev: tuple[Pipeline, Flux2Pipeline], tiny_flux2_folder: Path, tmp_path: Path
) -> None:
    """As in published folders, whose tokenizer class pads there by itself."""
    folder = Path(shutil.copytree(tiny_flux2_folder, tmp_path / "silent"))
    path = folder / "tokenizer" / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    assert settings.pop("padding_side") == "left"
    path.write_text(json.dumps(settings))
    silent = load_pipeline(str(folder), device="cpu").text_encoder.encode(PROMPTS[:1])
    assert torch.equal(silent.embeddings, dev[0].text_encoder.encode(PROMPTS[:1]).embeddings)


def test_a_decoder_with_the_settings_of_published_folders_is_the_same(
    dev: tuple[Pipeline, Flux2Pipeline], tiny_flux2_folder: Path, tmp_path: Path
) -> None:
    """They say `force_upcast`, which newer versions of diffusers' class do not know and nothing reads."""
    folder = Path(shutil.copytree(tiny_flux2_folder, tmp_path / "published"))
    change_json(folder / "vae" / "config.json", {"force_upcast": True})
    latents = torch.randn(
        1, dev[0].rules.sampling.geometry.num_channels, 1, 4, 6, generator=torch.Generator().manual_seed(0)
    )
    frames = load_decoder(folder, torch.device("cpu"), torch.float32).decode(latents)
    assert torch.equal(frames, dev[0].decoder.decode(latents))


def test_a_request_says_how_many_tokens_were_cut(dev: tuple[Pipeline, Flux2Pipeline]) -> None:
    conditions = dev[0].text_encoder.encode(PROMPTS)
    assert conditions.lengths == (512, 512)
    tokenizer = dev[1].tokenizer
    chat = tokenizer.apply_chat_template(_messages(PROMPTS[1].replace("[IMG]", "")), tokenize=True, return_dict=True)
    assert conditions.num_cut_tokens == (0, len(chat["input_ids"]) - 512)
    assert conditions.num_cut_tokens[1] > 0
    assert "too long" in conditions.remarks(1, PROMPTS[1])[0]


def _messages(prompt: str) -> list[dict[str, Any]]:
    from diffusers.pipelines.flux2.pipeline_flux2 import format_input
    from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE

    messages: list[dict[str, Any]] = format_input([prompt], SYSTEM_MESSAGE)[0]
    return messages


def test_two_passes_equal_one_batch(klein: tuple[Pipeline, Flux2KleinPipeline]) -> None:
    frames = [
        klein[0](requests(1, guidance_scale=3.0, guidance_mode=mode)[0]).frames.astype(int)
        for mode in ("batched", "two_pass")
    ]
    assert numpy.abs(frames[0] - frames[1]).max() <= 1


@table(("tokens", "steps"), [(64, 4), (4096, 50), (4300, 28), (4301, 28), (16384, 4), (1024, 300)])
def test_the_shift_is_that_of_diffusers(dev: tuple[Pipeline, Flux2Pipeline], tokens: int, steps: int) -> None:
    from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu

    found = dev[0].rules.sampling.schedule.flow_shift(tokens, steps)
    assert found == pytest.approx(numpy.exp(compute_empirical_mu(tokens, steps)), rel=1e-6)
