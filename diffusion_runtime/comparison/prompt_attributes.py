"""Attributes that the clips of prompts must show, where they are known: prompts in the words of the embedded model."""

from __future__ import annotations

from collections.abc import Iterable

from diffusion_runtime.models.model_sources import EMBEDDED
from diffusion_runtime.quality.shapes.attributes import SceneAttributes
from diffusion_runtime.quality.shapes.prompt_reading import read_prompt


def known_attributes(model_path: str, prompts: Iterable[str]) -> list[SceneAttributes | None]:
    """Return the attributes by prompt, None for a prompt that names anything else than the model was trained on, and
    for every other model."""
    return [read_prompt(prompt) if model_path == EMBEDDED else None for prompt in prompts]
