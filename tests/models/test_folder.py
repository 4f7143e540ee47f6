"""The json of a model folder: every broken file and key is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from diffusion_runtime.core.model_folder import (
    ConfigFile,
    component_class,
    read_config,
    read_json,
    refuse_other_pipelines,
)
from diffusion_runtime.errors import ModelLoadError


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "not valid JSON"),
        ('{"transformer": ', "not valid JSON"),
        ("[1, 2]", "expected a json object with keys, got a list"),
        ('"text"', "expected a json object with keys, got a text"),
        ("null", "expected a json object with keys, got null"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "git lfs pull"),
    ],
)
def test_a_broken_json_file_is_named(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "model_index.json"
    path.write_text(content)
    with pytest.raises(ModelLoadError, match=said) as caught:
        read_json(path)
    assert str(path) in str(caught.value)


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "model_index.json"
    path.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ModelLoadError, match="not valid JSON"):
        read_json(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"vae/config.json is missing"):
        read_config(tmp_path, "vae")
    (tmp_path / "vae" / "config.json").mkdir(parents=True)
    with pytest.raises(ModelLoadError, match="this is a folder"):
        read_config(tmp_path, "vae")


@pytest.mark.parametrize("entry", ["WanTransformer3DModel", ["diffusers"], [None, None], 3, {"a": "b"}])
def test_a_component_that_is_no_pair_is_named(tmp_path: Path, entry: object) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps({"transformer": entry}))
    with pytest.raises(ModelLoadError, match=r"model_index.json: key 'transformer': expected \[library, class name\]"):
        component_class(tmp_path, "transformer")


def test_a_component_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="key 'transformer' is missing"):
        component_class(tmp_path, "transformer")


def test_values_are_checked_one_by_one() -> None:
    file = ConfigFile(
        Path("config.json"),
        {"_note": "x", "n": 3, "x": 1.5, "yes": True, "ns": [1, 2], "xs": [0.5, -1], "nothing": None, "text": "3"},
    )
    assert file.whole_number("n") == 3
    assert file.whole_number("nothing", 7) == 7
    assert file.number("n") == 3.0
    assert file.flag("yes") is True
    assert file.whole_numbers("ns", 2) == (1, 2)
    assert file.numbers("xs", 2) == (0.5, -1.0)
    assert "_note" not in file.settings()
    for read in (
        lambda: file.whole_number("text"),
        lambda: file.whole_number("x"),
        lambda: file.whole_number("yes"),
        lambda: file.whole_number("n", minimum=4),
        lambda: file.number("yes"),
        lambda: file.flag("n"),
        lambda: file.whole_numbers("ns", 3),
        lambda: file.whole_numbers("xs", 2),
        lambda: file.numbers("text", 1),
        lambda: file.numbers("xs", 1),
    ):
        with pytest.raises(ModelLoadError, match=r"config.json: key '\w+': expected .*, got "):
            read()
    with pytest.raises(ModelLoadError, match="key 'absent' is missing"):
        file.whole_number("absent")


def test_keys_and_pipelines_that_nobody_expects_are_named(tmp_path: Path) -> None:
    file = ConfigFile(tmp_path / "config.json", {"_note": "x", "num_layers": 3, "num_layer": 3})
    file.refuse_unknown(("num_layers", "num_layer"))
    with pytest.raises(ModelLoadError, match=r"'num_layer' is unknown to this runtime. Did you mean 'num_layers'\?"):
        file.refuse_unknown(("num_layers", "num_heads"))
    index = tmp_path / "model_index.json"
    for content in ('{"_class_name": "APipeline"}', "{}"):
        index.write_text(content)
        refuse_other_pipelines(tmp_path, ("APipeline", "BPipeline"))
    index.write_text('{"_class_name": "AEditPipeline"}')
    with pytest.raises(ModelLoadError, match=r"expected APipeline or BPipeline, got 'AEditPipeline'"):
        refuse_other_pipelines(tmp_path, ("APipeline", "BPipeline"))
