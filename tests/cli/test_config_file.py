"""`--config` and `--set`: what is read, and errors that name the file and the key."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_support import REPOSITORY

from diffusion_runtime.attention.config import AttentionConfig
from diffusion_runtime.cli.config_file import read_config
from diffusion_runtime.config import ParallelConfig, RuntimeConfig
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.models.published import published_models
from diffusion_runtime.request.generation_request import request_field_types


def write(folder: Path, content: Any) -> str:
    path = folder / "mine.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content), encoding="utf-8")
    return str(path)


def test_a_config_is_read(tmp_path: Path) -> None:
    config = read_config(
        write(
            tmp_path,
            """
            runtime: {model_path: shapes, dtype: bfloat16, attention: {per_role: {cross: torch_sdpa}}, device: null}
            request: {prompt: [a star, a ring], seed: 1-3, height: 128, guidance_scale: 2, fps: null}
            presets: {tiny: {height: 64, num_frames: 1}}
            """,
        )
    )
    assert config.request == {
        "prompt": ["a star", "a ring"],
        "seed": [1, 2, 3],
        "height": 128,
        "guidance_scale": 2,
    }
    assert config.presets == {"tiny": {"height": 64, "num_frames": 1}}
    assert AttentionConfig.parse(config.runtime["attention"]) == AttentionConfig(per_role={"cross": "torch_sdpa"})
    assert {key: value for key, value in config.runtime.items() if key != "attention"} == {
        "model_path": "shapes",
        "dtype": "bfloat16",
    }


@pytest.mark.parametrize("content", ["", "# nothing\n", "request:\n", "{}"])
def test_an_empty_config_says_nothing(tmp_path: Path, content: str) -> None:
    config = read_config(write(tmp_path, content))
    assert (config.runtime, config.request, config.presets) == ({}, {}, {})


def test_settings_come_before_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, {"runtime": {"dtype": "float16", "attention": "fa"}, "request": {"height": 64, "width": 64}})
    settings = [
        "request.height=128",
        "request.guidance_scale=2.5",
        "request.prompt=a = b",
        "request.seed=4,5",
        "runtime.dtype=float32",
        "runtime.attention.per_role.cross.backend=torch_sdpa",
        "request.height=256",
    ]
    config = read_config(path, settings)
    assert config.request == {"height": 64, "width": 64}
    assert config.settings == {"height": 256, "guidance_scale": 2.5, "prompt": ["a = b"], "seed": [4, 5]}
    assert config.runtime["dtype"] == "float32"
    attention = AttentionConfig.parse(config.runtime["attention"])
    assert attention == AttentionConfig("fa", {"cross": "torch_sdpa"})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("- a\n- b\n", "expected a mapping with runtime, request, presets, got a list"),
        ("just text", "got a str"),
        ("{", "is not valid YAML"),
        ("!!python/object/apply:os.system [echo]", "is not valid YAML"),
        ("[" * 5000, "is not valid YAML"),
        ({"requst": {}}, "unknown section 'requst'. Did you mean 'request'"),
        ({"request": [1]}, r"request: expected a mapping, got \[1\]"),
        ({"request": {"hieght": 1}}, "request: unknown key 'hieght'. Did you mean 'height'"),
        ({"request": {"height": "tall"}}, "request.height: expected a whole number of 1 or more, got 'tall'"),
        ({"request": {"height": 64.0}}, "request.height: expected a whole number"),
        ({"request": {"num_inference_steps": -4}}, "request.num_inference_steps: .* got -4"),
        ({"request": {"guidance_scale": "5"}}, "request.guidance_scale: expected a number"),
        ({"request": {"sampler": "unpc"}}, "request.sampler: unknown value 'unpc'. Did you mean 'unipc'"),
        ({"request": {"seed": [1, -2]}}, "request.seed: expected numbers"),
        ({"request": {"prompt": ["a", ""]}}, "request.prompt: .* empty prompt"),
        ({"request": {"negative_prompt": ["a", 3]}}, "request.negative_prompt: expected a text, got 3"),
        ({"presets": {"a": {"negative_prompt": ["x", "y"]}}}, r"presets.a.negative_prompt: expected a text, got \['x'"),
        ({"runtime": {"modelpath": "x"}}, "runtime: unknown key 'modelpath'. Did you mean 'model_path'"),
        ({"runtime": {"dtype": 16}}, "runtime.dtype: expected a text, got 16"),
        ({"runtime": {"backend": "diffuser"}}, "runtime.backend: unknown value 'diffuser'"),
        ({"runtime": {"attention_override": "fa"}}, "unknown key 'attention_override'"),
        ({"runtime": {"attention": {"default": "torch_spda"}}}, "runtime.attention: .*'torch_spda'. Did you mean"),
        ({"runtime": {"attention": {"per_role": {"slef": "fa"}}}}, "runtime.attention: .*'slef'. Did you mean 'self'"),
        ({"runtime": {"parallel": 2}}, "runtime.parallel: expected a mapping, got 2"),
        ({"runtime": {"parallel": {"num_gpus": "two"}}}, "runtime.parallel.num_gpus: expected a whole"),
        ({"presets": {"a": 1}}, "presets.a: expected a mapping"),
        ({"presets": {"a": {"seed": 1}}}, "presets.a: unknown key 'seed'"),
        ({"presets": {"a": {"heigth": 1}}}, "presets.a: unknown key 'heigth'. Did you mean 'height'"),
    ],
)
def test_a_mistake_names_the_file_and_the_key(tmp_path: Path, content: Any, said: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(ConfigError, match=said) as caught:
        read_config(path)
    assert str(caught.value).startswith(path)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("request.height", "expected request.KEY=VALUE"),
        ("height=3", "expected request.KEY=VALUE"),
        ("reqest.height=3", "unknown section 'reqest'. Did you mean 'request'"),
        ("request.heigth=3", "unknown key 'heigth'. Did you mean 'height'"),
        ("request.height=tall", "request.height: expected a whole number of 1 or more, got 'tall'"),
        ("runtime.parallel.num_gpus=0", "parallel.num_gpus: expected a whole number of 1 or more, got 0"),
        ("runtime.attention.per_role.slef.backend=fa", "'slef'"),
    ],
)
def test_a_wrong_setting_is_named(setting: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_config(None, [setting])


def test_a_missing_config_names_the_nearest(tmp_path: Path) -> None:
    write(tmp_path, {})
    with pytest.raises(ConfigError, match=r"Did you mean 'mine\.yaml'"):
        read_config(str(tmp_path / "mien.yaml"))
    with pytest.raises(ConfigError, match=r"The folder .* does not exist"):
        read_config(str(tmp_path / "no" / "mine.yaml"))


@pytest.mark.parametrize("path", sorted((REPOSITORY / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_configs_that_come_along_are_right(path: Path) -> None:
    """Each is of a published model, and names it as `models` does."""
    config = read_config(str(path))
    published = {model.name: model.model_path for model in published_models()}
    assert config.runtime["model_path"] == published[path.stem]


def test_the_config_of_the_embedded_model_shows_every_key() -> None:
    content = yaml.safe_load((REPOSITORY / "configs" / "shapes.yaml").read_text(encoding="utf-8"))
    fix = "name it in the entry `shapes` of models/published.yaml, then: python scripts/write_files.py"
    assert set(content["request"]) == set(request_field_types()), fix
    # Only the command line fills attention_override.
    fields = {field.name for field in dataclasses.fields(RuntimeConfig)} - {"attention_override"}
    assert set(content["runtime"]) == fields, fix
    assert set(content["runtime"]["parallel"]) == {field.name for field in dataclasses.fields(ParallelConfig)}


def test_the_wan_config_holds_the_documented_values() -> None:
    config = read_config(str(REPOSITORY / "configs" / "wan2.1-1.3b.yaml"))
    assert config.runtime["model_path"] == "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
    values = ("height", "width", "num_frames", "fps", "num_inference_steps", "guidance_scale", "flow_shift")
    assert [config.request[name] for name in values] == [480, 832, 81, 16, 50, 6.0, 8.0]
