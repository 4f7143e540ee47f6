"""Seeded evaluation prompts: one object, two objects, and combinations never seen in training."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Literal

import torch

from diffusion_runtime.quality.shapes.attributes import SceneAttributes
from diffusion_runtime.quality.shapes.captions import EVALUATION_CAPTIONS, write_caption
from diffusion_runtime.quality.shapes.scene import SceneSettings, sample_scenes

PromptKind = Literal["one_object", "two_objects", "held_out"]
PROMPT_KINDS: tuple[PromptKind, ...] = ("one_object", "two_objects", "held_out")


@dataclass(frozen=True)
class EvaluationPrompt:
    """A prompt, the attributes of a right clip, and the seed of its noise."""

    text: str
    attributes: SceneAttributes
    seed: int


def evaluation_prompts(
    kind: PromptKind, count: int = 512, *, seed: int = 2026, image: bool = False
) -> list[EvaluationPrompt]:
    """Return the first `count` prompts of a kind; a shorter list is a prefix of a longer one.

    `held_out` means one object whose (colour, shape, motion) was never trained on. `image` leaves the motion out,
    since a single frame shows none.
    """
    settings = SceneSettings(
        two_object_fraction=1.0 if kind == "two_objects" else 0.0,
        held_out=kind == "held_out",
        background_weights=(1.0, 1.0, 1.0, 1.0),
    )
    prompts = []
    for index in range(count):
        own_seed = 1_000_003 * seed + 10 * index + PROMPT_KINDS.index(kind)
        scene = sample_scenes(1, torch.Generator().manual_seed(own_seed), settings).attributes()[0]
        caption_settings = EVALUATION_CAPTIONS
        caption = write_caption(scene, Random(own_seed), caption_settings, image=image)
        prompts.append(EvaluationPrompt(caption.text, caption.attributes, seed=own_seed % 2**31))
    return prompts
