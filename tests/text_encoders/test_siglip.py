"""How a picture is prepared for SigLIP, against transformers' own way, and settings that cannot be honoured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.text_encoders.siglip import read_preparation

SETTINGS: dict[str, Any] = {
    "size": {"height": 28, "width": 20},
    "resample": 3,
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.6, 0.7],
}


def write(path: Path, **changed: Any) -> Path:
    path.write_text(json.dumps({**SETTINGS, **changed}))
    return path


@pytest.mark.parametrize("resample", [2, 3])
def test_a_picture_is_prepared_as_transformers_does(tmp_path: Path, resample: int) -> None:
    pixels = numpy.random.default_rng(0).integers(0, 256, (37, 53, 3), dtype=numpy.uint8)
    theirs = SiglipImageProcessorPil(**(SETTINGS | {"resample": resample}))
    expected = theirs.preprocess(images=Image.fromarray(pixels), return_tensors="pt")["pixel_values"]
    found = read_preparation(write(tmp_path / "x.json", resample=resample)).prepare(torch.from_numpy(pixels))
    assert found.shape == expected.shape == (1, 3, 28, 20)
    assert (found - expected).abs().max() < 1e-6


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("do_resize", False),
        ("do_normalize", False),
        ("size", {"shortest_edge": 28}),
        ("size", None),
        ("resample", 9),
        ("image_mean", [0.5, 0.5]),
        ("image_std", ["a", "b", "c"]),
    ],
)
def test_settings_that_cannot_be_honoured_are_named(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(ModelLoadError, match=rf"x.json: key '{key}': expected .*, got "):
        read_preparation(write(tmp_path / "x.json", **{key: value}))


def test_a_missing_or_damaged_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"x.json: no such file"):
        read_preparation(tmp_path / "x.json")
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"x.json is not valid JSON"):
        read_preparation(tmp_path / "x.json")
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(ModelLoadError, match=r"x.json: expected a json object"):
        read_preparation(tmp_path / "x.json")
