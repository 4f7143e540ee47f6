"""Krea 2 against diffusers' Krea2Pipeline and its transformer: same folder, noise and prompts, float32 on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from diffusers import Krea2Pipeline
from family_parity import assert_equal_runs, load_theirs, record_latents, relative
from tables import table
from tiny_encoders import HIDDEN
from tiny_krea2 import CHANNELS, TEXT_LAYERS, TINY_SIZES, write_tiny_krea2

from diffusion_runtime import GenerationRequest, Pipeline, load_pipeline
from diffusion_runtime.attention import AttentionContext
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.models.interface import DenoiserInputs
from diffusion_runtime.text_encoders.interface import Conditions

PROMPTS = ("a red circle", "two objects: a blue star, and a green ring on a striped background.")
Pair = tuple[Pipeline, Krea2Pipeline]


def pair_of(folder: Path) -> Pair:
    return load_pipeline(str(folder), device="cpu"), load_theirs(Krea2Pipeline, folder)


@pytest.fixture(scope="module")
def pair(tiny_folder_of: Callable[[str], Path]) -> Pair:
    return pair_of(tiny_folder_of("krea2"))


def request(**values: Any) -> GenerationRequest:
    fields = {"prompt": PROMPTS[0], "negative_prompt": "", **TINY_SIZES, "seed": 5, "num_inference_steps": 3}
    return GenerationRequest(**{**fields, **values})


def run_theirs(
    theirs: Krea2Pipeline, requests: list[GenerationRequest], noise: torch.Tensor
) -> tuple[list[torch.Tensor], numpy.ndarray]:
    first, latents = requests[0], []
    assert first.height is not None
    assert first.width is not None

    def keep(pipeline: Any, step: int, timestep: torch.Tensor, tensors: dict[str, Any]) -> dict[str, Any]:
        latents.append(theirs._unpack_latents(tensors["latents"], first.height, first.width))
        return {}

    images = theirs(
        prompt=[each.prompt for each in requests],
        negative_prompt=[each.negative_prompt for each in requests],
        height=first.height,
        width=first.width,
        num_inference_steps=first.num_inference_steps,
        guidance_scale=first.guidance_scale,
        latents=theirs._pack_latents(noise[:, :, 0], *noise.shape[:2], *noise.shape[3:]),
        callback_on_step_end=keep,
        output_type="np",
    ).images
    return latents, images[:, None]


@table(
    "requests",
    [
        [request(prompt=prompt, seed=seed) for seed, prompt in enumerate(PROMPTS)],
        [request(guidance_scale=0.0, height=40, width=8)],
        [request(negative_prompt="a yellow square", guidance_scale=0.5, guidance_mode="two_pass")],
    ],
    ["two prompts", "no guidance", "weak guidance"],
)
def test_a_generation_equals_diffusers(
    pair: Pair, requests: list[GenerationRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = record_latents(monkeypatch)
    assert_equal_runs(pair[0], requests, kept, lambda resolved, noise: run_theirs(pair[1], resolved, noise))


def test_the_distilled_model_takes_eight_steps_at_one_shift(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = pair_of(write_tiny_krea2(tmp_path / "turbo", is_distilled=True))
    resolved = pair[0].resolve(request(num_inference_steps=None))
    assert (resolved.num_inference_steps, resolved.guidance_scale) == (8, 0.0)
    # With other steps and guidance, too, which are not those of its preset.
    given = request(guidance_scale=1.0)
    kept = record_latents(monkeypatch)
    assert_equal_runs(pair[0], [given], kept, lambda several, noise: run_theirs(pair[1], several, noise))


def inputs(lengths: tuple[int, ...], rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, DenoiserInputs]:
    """Latents, unequal timesteps, and texts with noise where they are padding."""
    generator, batch = torch.Generator().manual_seed(1), len(lengths)
    latents = torch.randn(batch, CHANNELS, 1, rows, columns, generator=generator)
    text = torch.randn(batch, max(lengths), len(TEXT_LAYERS) * HIDDEN, generator=generator)
    size = ClipSize(4 * rows, 4 * columns, 1, 1)
    return latents, torch.linspace(937.3, 12.0, batch + 1)[:batch], DenoiserInputs(Conditions.of(text, lengths), size)


@torch.no_grad()
def their_velocity(
    theirs: Krea2Pipeline, latents: torch.Tensor, timestep: torch.Tensor, given: DenoiserInputs
) -> torch.Tensor:
    text, (batch, channels, _, rows, columns) = given.text.embeddings, latents.shape
    lengths = torch.tensor(given.text.lengths)[:, None]
    out = theirs.transformer(
        hidden_states=theirs._pack_latents(latents[:, :, 0], batch, channels, rows, columns),
        encoder_hidden_states=text.unflatten(-1, (len(TEXT_LAYERS), HIDDEN)),
        timestep=timestep / 1000,
        position_ids=theirs.prepare_position_ids(text.shape[1], rows // 2, columns // 2, "cpu"),
        encoder_attention_mask=torch.arange(text.shape[1]) < lengths,
        return_dict=False,
    )[0]
    return theirs._unpack_latents(out, rows * 4, columns * 4)


@table("lengths", [(7,), (9, 3), (1, 40, 8)])
@table("size", [(2, 2), (6, 10)])
def test_velocities_equal_those_of_diffusers(pair: Pair, lengths: tuple[int, ...], size: tuple[int, int]) -> None:
    arguments = inputs(lengths, *size)
    before = arguments[2].text.embeddings.clone()
    assert relative(pair[0].transformer(*arguments, AttentionContext()), their_velocity(pair[1], *arguments)) < 1e-5
    assert torch.equal(arguments[2].text.embeddings, before)


@torch.no_grad()
def test_the_end_of_the_template_follows_a_prompt_that_is_cut(pair: Pair) -> None:
    encoder = pair[0].text_encoder
    prompts = [PROMPTS[1] * 60, PROMPTS[0]]
    ours = encoder.encode(prompts)
    states, mask = pair[1].get_text_hidden_states(prompts)
    assert ours.lengths == tuple(mask.sum(1).tolist())
    assert ours.num_cut_tokens[0] > 0
    assert ours.num_cut_tokens[1] == 0
    for index, length in enumerate(ours.lengths):
        assert relative(ours.embeddings[index, :length], states[index][mask[index]].flatten(1)) < 1e-5


def test_prompts_and_guidance_matter(pair: Pair) -> None:
    """Otherwise the comparison could not tell whether both left one out."""
    noise = torch.randn(1, CHANNELS, 1, 8, 12, generator=torch.Generator().manual_seed(1))

    def last(**values: Any) -> torch.Tensor:
        return run_theirs(pair[1], [pair[0].resolve(request(num_inference_steps=1, **values))], noise)[0][-1]

    for other in (last(prompt=PROMPTS[1]), last(negative_prompt="a yellow square"), last(guidance_scale=1.0)):
        assert relative(other, last()) > 5e-3
