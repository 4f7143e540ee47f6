"""Seeded evaluation prompts: one thing, two things, and combinations never seen in training."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import torch

from diffusion_runtime.quality.emoji.attributes import SceneAttributes
from diffusion_runtime.quality.emoji.captions import EVALUATION_CAPTIONS, write_caption
from diffusion_runtime.quality.emoji.scene import SceneBatch, SceneSettings, sample_scenes
from diffusion_runtime.quality.shapes.prompts import PROMPT_KINDS, PromptKind


@dataclass(frozen=True)
class EvaluationPrompt:
    """A prompt, the attributes of a right clip, and the seed of its noise."""

    text: str
    attributes: SceneAttributes
    seed: int
    scene: SceneBatch = field(compare=False, repr=False)
    """One row: the scene that the prompt was written of."""


def evaluation_prompts(
    kind: PromptKind, count: int = 512, *, seed: int = 2026, image: bool = False
) -> list[EvaluationPrompt]:
    """Return the first `count` prompts of a kind; a shorter list is a prefix of a longer one.

    `held_out` means one thing whose motion was never trained on in that scene. `image` leaves the motion out, since a
    single frame shows none.
    """
    settings = SceneSettings(
        two_object_fraction=1.0 if kind == "two_objects" else 0.0, held_out=kind == "held_out", same_thing_fraction=0.1
    )
    prompts = []
    for index in range(count):
        own_seed = 1_000_003 * seed + 10 * index + PROMPT_KINDS.index(kind)
        scene = sample_scenes(1, torch.Generator().manual_seed(own_seed), settings)
        caption = write_caption(scene.attributes()[0], Random(own_seed), EVALUATION_CAPTIONS, image=image)
        prompts.append(EvaluationPrompt(caption.text, caption.attributes, own_seed % 2**31, scene))
    return prompts
