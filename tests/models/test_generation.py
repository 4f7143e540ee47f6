"""generation.json: a model's own request values and presets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.models.generation import generation_settings


def folder_saying(tmp_path: Path, content: object) -> Path:
    (tmp_path / "generation.json").write_text(json.dumps(content))
    return tmp_path


def test_no_file_says_nothing(tmp_path: Path) -> None:
    settings = generation_settings(tmp_path)
    assert (settings.defaults, settings.presets) == ({}, {})


def test_defaults_and_presets(tmp_path: Path) -> None:
    defaults = {"height": 256, "width": 256, "num_frames": 29, "sampler": "unipc", "guidance_scale": 3}
    settings = generation_settings(
        folder_saying(tmp_path, {"defaults": defaults, "presets": {"draft": {"height": 128}, "plain": {}}})
    )
    assert settings.defaults == defaults
    assert settings.presets == {"draft": {"height": 128}, "plain": {}}
    assert settings.max_text_tokens is None


def test_the_length_of_texts(tmp_path: Path) -> None:
    assert generation_settings(folder_saying(tmp_path, {"max_text_tokens": 64})).max_text_tokens == 64
    for wrong in (0, "64", 6.4, True):
        with pytest.raises(ModelLoadError, match="key 'max_text_tokens': expected a whole number from 1 to"):
            generation_settings(folder_saying(tmp_path, {"max_text_tokens": wrong}))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"num_frames": [345, 22]}, r"key 'num_frames': expected \[fewest, most\], got \[345, 22\]"),
        ({"num_frames": 22}, r"key 'num_frames': expected \[fewest, most\], got 22"),
        ({"default": {}}, r"unknown key 'default'. Did you mean 'defaults'"),
        ({"defaults": []}, r"key 'defaults': expected an object"),
        ({"presets": {"draft": 3}}, r"key 'presets.draft': expected an object"),
        (
            {"presets": {"draft": {"heigth": 3}}},
            r"'presets.draft': unknown .* 'heigth'. Did you mean 'height'",
        ),
        ({"defaults": {"prompt": "a cat"}}, r"unknown request value 'prompt'"),
        ({"defaults": {"height": "tall"}}, r"key 'defaults': height: expected a whole number of 1 or more, got 'tall'"),
        ({"defaults": {"sampler": "unpic"}}, r"sampler: unknown value 'unpic'. Did you mean 'unipc'"),
    ],
)
def test_what_is_wrong_is_named_with_the_file(tmp_path: Path, content: object, said: str) -> None:
    with pytest.raises(ModelLoadError, match=said) as caught:
        generation_settings(folder_saying(tmp_path, content))
    assert "generation.json" in str(caught.value)
