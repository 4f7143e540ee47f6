"""What a Wan folder may not say in two files at once; what it may not say in one is in family_cases."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from family_cases import CONFIG, change

from diffusion_runtime.attention import AttentionPolicy
from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.models.wan.family import FAMILY


def test_an_image_is_whole_tokens(tiny_wan_copy: Callable[[], Path]) -> None:
    folder = change(tiny_wan_copy(), "model_index.json", {"expand_timesteps": True})
    change(folder, CONFIG, {"patch_size": [2, 2, 2]})
    with pytest.raises(ModelLoadError, match=r"key 'patch_size': expected 1 latent frame a token"):
        FAMILY.describe(folder).build_transformer(AttentionPolicy())
