"""What a Qwen-Image folder may not say, beside what is in family_cases."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from family_cases import VAE, change

from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.models.qwen_image.family import FAMILY


def test_levels_that_are_no_list_are_named(tiny_qwen_image_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_qwen_image_folder, tmp_path / "damaged"))
    change(folder, VAE, {"temperal_downsample": 3})
    with pytest.raises(ModelLoadError, match=r"vae/config.json: key 'temperal_downsample': expected a list"):
        FAMILY.describe(folder)
