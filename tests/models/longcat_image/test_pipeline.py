"""LongCat-Image against diffusers' LongCatImagePipeline and its transformer: same folder, noise and prompts."""

# Quotation marks of several languages.
# ruff: noqa: RUF001

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from diffusers import LongCatImagePipeline
from diffusers.pipelines.longcat_image.pipeline_longcat_image import split_quotation
from family_parity import assert_equal_runs, load_theirs, record_latents, relative
from tables import table
from tiny_families import given_to
from tiny_longcat_image import TINY_SIZES

from diffusion_runtime import GenerationRequest, Pipeline, load_pipeline
from diffusion_runtime.attention import AttentionContext
from diffusion_runtime.models.longcat_image.text import MAX_TOKENS, parts_of

PROMPTS = ('a red circle with "a star"', "two objects: a blue star, and a green ring on a striped background.")


@pytest.fixture(scope="module")
def pair(tiny_folder_of: Callable[[str], Path]) -> tuple[Pipeline, LongCatImagePipeline]:
    folder = tiny_folder_of("longcat_image")
    return load_pipeline(str(folder), device="cpu"), load_theirs(LongCatImagePipeline, folder)


def request(**values: Any) -> GenerationRequest:
    fields = {"prompt": PROMPTS[0], "negative_prompt": "", **TINY_SIZES, "seed": 5, "num_inference_steps": 3}
    return GenerationRequest(**{**fields, **values})


def run_theirs(
    theirs: LongCatImagePipeline, requests: list[GenerationRequest], noise: torch.Tensor, **changes: Any
) -> tuple[list[torch.Tensor], numpy.ndarray]:
    """Their pipeline has no callback: the scheduler's steps are kept."""
    first, latents = requests[0], []
    batch, channels, _, height, width = noise.shape
    step = theirs.scheduler.step

    def keep(*given: Any, **keywords: Any) -> Any:
        result = step(*given, **keywords)
        latents.append(theirs._unpack_latents(result[0], height, width, vae_scale_factor=1)[:, :, None])
        return result

    theirs.scheduler.step = keep
    try:
        images = theirs(
            prompt=[each.prompt for each in requests],
            negative_prompt=[each.negative_prompt for each in requests],
            height=first.height,
            width=first.width,
            num_inference_steps=first.num_inference_steps,
            guidance_scale=first.guidance_scale,
            latents=theirs._pack_latents(noise[:, :, 0], batch, channels, height, width),
            enable_prompt_rewrite=False,
            output_type="np",
            **changes,
        ).images
    finally:
        del theirs.scheduler.step
    return latents, images[:, None]


@table(
    "requests",
    [
        [request(prompt=prompt, seed=seed) for seed, prompt in enumerate(PROMPTS)],
        [request(guidance_scale=1.0, height=32, width=8)],
        [request(negative_prompt="a yellow square", guidance_scale=9.0, guidance_mode="two_pass")],
    ],
    ["two prompts", "no guidance", "strong guidance"],
)
def test_a_generation_equals_diffusers(
    pair: Any, requests: list[GenerationRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = record_latents(monkeypatch)
    assert_equal_runs(pair[0], requests, kept, lambda resolved, noise: run_theirs(pair[1], resolved, noise))


def test_prompts_and_the_length_of_guidance_matter(pair: Any) -> None:
    """Otherwise the comparison could not tell whether both left one out."""
    noise = torch.randn(1, 4, 1, 8, 12, generator=torch.Generator().manual_seed(1))

    def last(renorm: bool = True, **values: Any) -> torch.Tensor:
        resolved = [pair[0].resolve(request(guidance_scale=9.0, **values))]
        return run_theirs(pair[1], resolved, noise, enable_cfg_renorm=renorm)[0][-1]

    for other in (last(renorm=False), last(prompt=PROMPTS[1]), last(negative_prompt="a yellow square")):
        assert relative(other, last()) > 5e-3


def test_a_forward_pass_equals_diffusers(pair: Any) -> None:
    """At unequal timesteps; the text is as long as the encoder makes it, padding included."""
    ours, theirs = pair
    latents, timestep, inputs = given_to(ours)
    text = inputs.text.embeddings
    assert inputs.text.lengths == (MAX_TOKENS,) * 2
    out = ours.transformer(latents, timestep, inputs, AttentionContext())
    batch, channels, _, height, width = latents.shape
    ids = theirs.prepare_latents(batch, channels, height * 2, width * 2, torch.float32, "cpu", None, latents)[1]
    with torch.no_grad():
        expected = theirs.transformer(
            hidden_states=theirs._pack_latents(latents[:, :, 0], batch, channels, height, width),
            timestep=timestep / 1000,
            encoder_hidden_states=text,
            txt_ids=theirs.encode_prompt(prompt_embeds=text, prompt=list("ab"))[1],
            img_ids=ids,
            return_dict=False,
        )[0]
    expected = theirs._unpack_latents(expected, height, width, vae_scale_factor=1)[:, :, None]
    assert relative(out, expected) < 1e-5
    other = dataclasses.replace(inputs, text=dataclasses.replace(inputs.text, embeddings=-text))
    assert relative(ours.transformer(latents, timestep, other, AttentionContext()), out) > 1e-3


def test_a_prompt_is_encoded_as_by_diffusers(pair: Any) -> None:
    """Short, empty, and longer than there is room for: what is cut is told."""
    prompts = [*PROMPTS, "", "a star " * MAX_TOKENS]
    found = pair[0].text_encoder.encode(prompts)
    expected = torch.cat([pair[1].encode_prompt([prompt])[0] for prompt in prompts])
    assert relative(found.embeddings, expected) < 1e-5
    assert found.lengths == (MAX_TOKENS,) * len(prompts)
    num_tokens = len(pair[1].tokenizer(prompts[-1])["input_ids"])
    assert found.num_cut_tokens == (0, 0, 0, num_tokens - MAX_TOKENS)


@table(
    "prompt",
    [
        "",
        "a sign 'OPEN' and \"it's late\"",
        "the cat's 'a' and 'b'",
        "写着“你好”和‘再见’的牌子",
        "an open 'quotation",
        "'' \"\"",
        "say'a' b'",
    ],
)
def test_quotations_are_the_authors(prompt: str) -> None:
    expected = [part for text, quoted in split_quotation(prompt) for part in (text if quoted else [text])]
    assert parts_of(prompt) == expected


def test_two_words_with_apostrophes_stay_themselves() -> None:
    """Where diffusers 0.42.1 puts the first of them in place of the second."""
    assert parts_of("it's a cat's 'a'") == ["it's a cat's ", "'", "a", "'"]
