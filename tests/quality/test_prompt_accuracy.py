"""Prompts read back into attributes, the prompt set, and McNemar's test."""

from __future__ import annotations

from random import Random

import pytest
import torch
from tables import table

from diffusion_runtime.quality.paired_test import mcnemar
from diffusion_runtime.quality.shapes.captions import EVALUATION_CAPTIONS, CaptionSettings, write_caption
from diffusion_runtime.quality.shapes.prompt_reading import read_prompt
from diffusion_runtime.quality.shapes.scene import sample_scenes
from diffusion_runtime.quality.worlds import WORLDS


def test_every_caption_is_read_back() -> None:
    for index, scene in enumerate(sample_scenes(400, torch.Generator().manual_seed(3)).attributes()):
        for settings in (CaptionSettings(), EVALUATION_CAPTIONS):
            caption = write_caption(scene, Random(index), settings)
            assert read_prompt(caption.text) == caption.attributes, caption.text


@table(
    "prompt",
    [
        "a cat",
        "red",
        "moving left a red circle",
        "a red circle, a blue star and a ring",
        "a red blue circle",
        "a red circle moving left moving up",
        "a red circle both moving left",
        "a circle and a red star of the same colour",
        "a red circle on a striped background over stripes",
        "a red circle <b>",
        "a red circle " * 40,
        "",
    ],
)
def test_other_prompts_are_not_guessed(prompt: str) -> None:
    assert read_prompt(prompt) is None


def test_the_words_of_a_user_are_read() -> None:
    scene = read_prompt("A Red circle moving left, and a star, over stripes.")
    assert scene is not None
    assert [(one.colour, one.shape, one.motion) for one in scene.objects] == [
        ("red", "circle", "left"),
        (None, "star", None),
    ]
    assert scene.background == "stripes"


def test_a_prompt_set_is_seeded_and_its_prompts_are_read_back() -> None:
    shapes = WORLDS["shapes"]
    prompts = shapes.prompt_set(7, 2026)
    assert prompts == shapes.prompt_set(9, 2026)[:7]
    assert prompts[0].text != shapes.prompt_set(1, 3)[0].text
    assert [len(prompt.attributes.objects) for prompt in prompts[:3]] == [1, 2, 1]
    assert len({prompt.seed for prompt in prompts}) == 7
    assert all(read_prompt(prompt.text) == prompt.attributes for prompt in prompts)


def test_mcnemar_counts_the_discordant_pairs() -> None:
    first = [True] * 5 + [True] + [False] * 8 + [False] * 3
    second = [True] * 5 + [False] + [True] * 8 + [False] * 3
    found = mcnemar(first, second)
    assert (found.only_first, found.only_second) == (1, 8)
    # Two tails of nine tosses with one head or none: 2 x (1 + 9) / 512.
    assert found.p == pytest.approx(20 / 512)
    assert mcnemar(second, first).p == found.p
    assert mcnemar(first, first).p == 1.0
    with pytest.raises(ValueError, match="zip"):
        mcnemar(first, second[1:])
