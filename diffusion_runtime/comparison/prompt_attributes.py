"""Requirements of clips, read off prompts in the words of an embedded model."""

from __future__ import annotations

from collections.abc import Iterable

from diffusion_runtime.quality.worlds import Wanted, wanted_of


def known_attributes(model_path: str, prompts: Iterable[str]) -> list[Wanted | None]:
    """Return the requirements by prompt, None for a prompt that names anything else than the model was trained
    on, and for every other model."""
    return [wanted_of(model_path, prompt) for prompt in prompts]
