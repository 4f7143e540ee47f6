"""Hostile values in flags, configs and files: each a typed error with its exit code, which names the flag or key."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_support import Command
from sample_media import make_media

from diffusion_runtime.attention.config import AttentionConfig
from diffusion_runtime.errors import ConfigError

LONG = "n" * 300


@pytest.fixture(autouse=True)
def _no_waiting() -> Iterator[None]:
    """What would wait on a FIFO for ever fails instead."""
    signal.alarm(250)
    yield
    signal.alarm(0)


PATHS = ["/dev/zero", "fifo", "folder", f"{LONG}", "a\0b", "/dev/full"]
# An option is checked with the backend that has it.
MORE = {"--attention-config.default.extra.mask_strategy_file_path": ("--attention-backend", "sliding_tile_attn")}
PATH_FLAGS = {
    "--config": "--config",
    "--prompt-file": "--prompt-file",
    "--lora": "lora.path",
    "--lora-path": "lora.path",
    "--from": "--from",
    "--attention-config.default.extra.mask_strategy_file_path": "mask_strategy_file_path",
}


def test_no_flag_opens_what_is_no_regular_file(command: Command) -> None:
    """In one table of flags and paths: before, most of these hung, or ended as unexpected errors."""
    os.mkfifo("fifo")
    Path("folder").mkdir()
    wrong = []
    for flag, key in PATH_FLAGS.items():
        for path in PATHS:
            result = command("generate", "a ring", "--dry-run", flag, path, *MORE.get(flag, ()))
            if result.code != 2 or key not in result.said or "unexpected" in result.said or len(result.said) > 1000:
                wrong.append((flag, path, result.code, result.said))
    for path in ("/dev/full", "fifo", f"{LONG}.mp4", "a\0b.mp4"):
        result = command("generate", "a ring", "--dry-run", "-o", path)
        if result.code != 2 or "--output-path" not in result.said:
            wrong.append(("-o", path, result.code, result.said))
    for path in ("/dev/zero", "fifo", LONG, "a\0b"):
        result = command("generate", "a ring", "--dry-run", "--model-path", path)
        if result.code != 2 or "model_path" not in result.said:
            wrong.append(("--model-path", path, result.code, result.said))
    for ending in ("json", "yaml"):
        os.mkfifo(f"x.{ending}")
        result = command("generate", "a ring", "--dry-run", "--attention-config", f"x.{ending}")
        if result.code != 2 or "attention config" not in result.said or "FIFO" not in result.said:
            wrong.append(("--attention-config", ending, result.code, result.said))
    assert wrong == []


USAGE = [
    (("--num-gpus", "abc", "--num-gpus", "16"), "--num-gpus"),
    (("--height=abc", "--height", "32"), "--height"),
    (("--num-gpus", "1000000000000000000"), "parallel.num_gpus: expected at most 4096"),
    (("--attention-config.per_role.a=b.backend", "fa"), "the value of per_role.a was read as 'b.backend'"),
    (("--attention-config.extra.a=b", "c"), "the value of extra.a was read as 'b'"),
    (("--prompt", "\udcff"), "prompt: expected a text, got one with half of a character"),
    (("--device", "x" * 3000), "got 'xxxx"),
    (("--height", "9" * 30), "height: expected a whole number of at most 1000000"),
    (("--guidance-scale", "1e300"), "guidance_scale: expected a number from 0 to 1e+06"),
    (("--attention-config", "[" * 100_000), "unknown attention backend"),
    (("--attention-config", '{"schedule": [{"steps": "' + "9" * 5000 + '", "backend": "fa"}]}'), "schedule[0].steps"),
    (("--attention-config", '{"default": {"backend": "fa"}, "default": "fa"}'), "key 'default' is given twice"),
    (("--attention-config.per_role", "3"), "per_role: expected a mapping"),
    (("--seed", "9" * 5000), "seed: expected numbers"),
]


@pytest.mark.parametrize(("arguments", "said"), USAGE, ids=[said for _, said in USAGE])
def test_a_hostile_value_is_named_and_cut(arguments: tuple[str, ...], said: str, command: Command) -> None:
    result = command("generate", "a ring", "--dry-run", *arguments)
    assert result.code == 2, result.err
    assert said in result.said
    assert "unexpected" not in result.said
    assert len(result.said) < 1000


CONFIGS = [
    ("request: {height: 2001-13-45}", "request.height: expected a whole number of 1 or more, got '2001-13-45'"),
    ("request: {height: 0b_}", "got '0b_'"),
    ("request: {seed: 1:99}", "request.seed: .* got '1:99'"),
    ("request: {height: " + "9" * 20_000 + "}", "got '99999"),
    ("request: {sampler: " + "x" * 100_000 + "}", "unknown value 'xxxxx"),
    ("? 1.5\n: 2", r"unknown section '1\.5'"),
    ("2001-12-14: 1", "unknown section '2001-12-14'"),
    ("<<: foo", "is not valid YAML: line 1: <<"),
    ("request: {height: 64, height: 32}", "key 'height' is given twice"),
    ("request: &r {height: 64, nested: [*r]}", r"\*r is not defined"),
    ("request: {height: !!float foo}", "the tag"),
    ("runtime: {backend: [1]}", r"runtime.backend: unknown value \[1\]"),
    ("runtime: {lora: [{path: x, scale: 1.0e+300}]}", "lora.scale: expected a number from"),
    ("runtime: {parallel: {timeout: 1.0e+300}}", "parallel.timeout: expected seconds"),
    ("presets: {draft: 3}", "presets.draft: expected a mapping"),
]


@pytest.mark.parametrize(("content", "said"), CONFIGS, ids=[said for _, said in CONFIGS])
def test_a_hostile_config_is_named_and_cut(content: str, said: str, command: Command) -> None:
    Path("mine.yaml").write_text(content)
    result = command("generate", "a ring", "--dry-run", "--config", "mine.yaml")
    assert result.code == 2, result.err
    assert re.search(said, result.said), result.said
    assert "mine.yaml" in result.said
    assert len(result.said) < 1000


def looped() -> list[Any]:
    loop: list[Any] = [1]
    loop.append(loop)
    return loop


def test_values_of_a_script_raise_typed_errors() -> None:
    for value in (
        {"default": {"backend": "sliding_tile_attn", "extra": {"window": looped()}}}, {"window": looped()},
        {"schedule": looped()}, {"per_role.self.extra.a": 1, "per_role.self": 3},
        {"per_role.self": 3, "per_role.self.extra.a": 1},
        {"schedule": [{"steps": 10**5000, "backend": "fa"}]}, {10**5000: 1}, 10**5000, {"per_role": {10**5000: "fa"}},
        {"default": {"backend": "sliding_tile_attn", "extra": {"mask_strategy_file_path": LONG}}},
        {"default": {"backend": "sliding_tile_attn", "extra": {"mask_strategy_file_path": "a\0b"}}},
        f"{LONG}/{'d/' * 3000}.yaml", "a\0b.json",
    ):  # fmt: skip
        with pytest.raises(ConfigError) as caught:
            hash(AttentionConfig.parse(value))
        assert len(str(caught.value)) < 1000


MODEL_FILES: list[tuple[str, Any, str]] = [
    ("transformer/config.json", {"num_layers": 10**18}, "key 'num_layers': expected at most 1000"),
    ("transformer/config.json", {"num_attention_heads": "four"}, "key 'num_attention_heads': .* got 'four'"),
    ("transformer/config.json", {"ffn_dim": -96}, "key 'ffn_dim': .* got -96"),
    ("transformer/config.json", {"text_dim": 2**30}, "key 'text_dim': expected a whole number from 1 to 1048576"),
    ("transformer/config.json", {"patch_size": "x" * 10**6}, "key 'patch_size': expected a list of 3 whole numbers"),
    ("transformer/config.json", {"num_attention_heads": 2**20, "attention_head_dim": 2**20}, "no transformer can have"),
    ("transformer/config.json", {"eps": float("nan")}, "key 'eps': expected a number"),
    ("scheduler/scheduler_config.json", [], "scheduler_config.json: expected a json object"),
    ("model_index.json", {"transformer": {"a": ["b"]}}, "key 'transformer': expected"),
    ("model_index.json", b"[" * 100_000, "is not valid JSON: it nests"),
    ("model_index.json", b'{"a": 1, "a": 2}', "key 'a' is given twice"),
    ("text_encoder/config.json", b"version https://git-lfs.github.com/spec/v1\n", "Git-LFS pointer"),
    ("tokenizer/tokenizer.json", b"version https://git-lfs.github.com/spec/v1\n", "Git-LFS pointer"),
    ("model_index.json", {"n" * 300: ["diffusers", "AutoencoderKL"]}, "names of at most 255 bytes"),
    ("model_index.json", {"../vae": ["diffusers", "AutoencoderKL"]}, "expected the name of a folder beside this file"),
    ("vae/config.json", {"num_res_blocks": 10**18}, "key 'num_res_blocks': expected at most 1000"),
    ("text_encoder/config.json", {"num_layers": 10**18}, "key 'num_layers': expected at most 1000"),
    ("vae/config.json", None, "this is a FIFO"),
    ("tokenizer/tokenizer_config.json", None, "this is a FIFO"),
]


@pytest.mark.parametrize(("name", "change", "said"), MODEL_FILES, ids=[f"{n}: {s}" for n, _, s in MODEL_FILES])
def test_a_hostile_model_folder_is_named(
    name: str, change: Any, said: str, tiny_wan_folder: Path, command: Command
) -> None:
    shutil.copytree(tiny_wan_folder, "model")
    path = Path("model", name)
    values = json.loads(path.read_bytes())
    path.unlink()
    if change is None:
        os.mkfifo(path)
    else:
        changed = change if isinstance(change, bytes) else json.dumps({**values, **change} if change else []).encode()
        path.write_bytes(changed)
    result = command("generate", "a ring", "--dry-run", "--model-path", "model")
    assert result.code == 1, result.err
    assert "unexpected" not in result.said
    assert re.search(said, result.said), result.said
    assert path.name in result.said
    assert len(result.said) < 1000


def recipe_of(folder: Path, **changes: Any) -> Path:
    recipe = {"request": {"prompt": "a ring"}, "runtime": {}, "model": {}, **changes}
    return make_media(num_frames=1, recipe=recipe).save(folder / "x.png")


RECIPES: list[tuple[dict[str, Any], int, str]] = [
    ({"request": {"prompt": {"a": 1}}}, 2, "prompt"),
    ({"request": {"prompt": "a", "sampler": {"a": 1}}}, 2, "sampler: unknown value {'a': 1}"),
    ({"request": {"prompt": "a", "height": 10**30}}, 2, "height: expected a whole number of at most"),
    ({"request": {"prompt": "a", "image_path": [1]}}, 2, "image_path: expected the path"),
    ({"request": {"prompt": "half \ud800"}}, 2, "half of a character"),
    ({"runtime": {"model_path": {"a": 1}}}, 2, "model_path: expected a text"),
    ({"runtime": {"backend": {"a": 1}}}, 2, "backend: unknown value"),
    ({"runtime": {"attention": 3}}, 2, "attention config: expected a mapping"),
    ({"model": {"dtype": ["float32"]}}, 2, "dtype: expected a text"),
    ({"request": 3}, 1, "its recipe's request is not a mapping"),
]


@pytest.mark.parametrize(("changes", "code", "said"), RECIPES, ids=[said for _, _, said in RECIPES])
def test_a_hostile_recipe_is_named(changes: dict[str, Any], code: int, said: str, command: Command) -> None:
    path = recipe_of(Path.cwd(), **changes)
    result = command("generate", "--dry-run", "--from", str(path))
    assert result.code == code, result.err
    assert said in result.said
    assert "unexpected" not in result.said


def test_a_long_recipe_is_cut_where_people_read_it(command: Command) -> None:
    values = {f"key{n}": "y" * 20_000 for n in range(120)}
    path = recipe_of(Path.cwd(), request={"prompt": "a ring", "negative": "half \ud800", **values})
    result = command("info", str(path))
    assert result.code == 0, result.err
    assert 0 < len(result.out) < 1_000_000
    assert "more values; --json has all" in result.out
    assert len(command("info", str(path), "--json").json["recipe"]["request"]) == 122


def test_names_that_are_not_utf8_are_said_in_json(command: Command) -> None:
    path = recipe_of(Path.cwd()).rename("x\udcff.png")
    result = command("info", str(path), "--json")
    assert result.code == 0, result.err
    assert result.out.encode("utf-8").isascii()
    assert result.json["path"] == "x\udcff.png"
    assert (
        command("generate", "a ring", "--dry-run", "--json", "--config", "x\udcff.yaml").json["kind"] == "ConfigError"
    )


def test_a_path_that_no_file_can_have_is_a_usage_error_of_every_verb(command: Command) -> None:
    """A name of 300 bytes and a path of 6,000: asking the system about either is an error of its own."""
    wrong = []
    for path in (LONG, "/".join(["d" * 200] * 30)):
        for arguments in (
            ("models", "convert", path, "out.safetensors"),
            ("models", "convert", "in.pt", f"{path}.safetensors"),
            ("models", "convert", "in.pt", "out", "--as", "self-forcing", "--base", path),
            ("bench", "generate", path),
            ("bench", "step", path),
            ("bench", "step", "shapes", "-o", path),
            ("bench", "attention", "-o", path),
            ("calibrate", "a ring", "-o", path),
            ("compare", "a ring", "--setting", "torch_sdpa", "--html", f"{path}.html"),
            ("explain", "--model-path", path),
            ("explain", "--html", f"{path}.html"),
            ("tune", "--output-path", f"{path}.yaml"),
            ("generate", "a ring", "--dry-run", "--transformer-path", path),
            ("generate", "a ring", "--dry-run", "--text-encoder-path", path),
            ("generate", "a ring", "--dry-run", "--vae-path", path),
            ("generate", "a ring", "--dry-run", "--vae-decoder", path),
            ("generate", "a ring", "--dry-run", "--image-path", path),
            ("generate", "a ring", "--dry-run", "--profile", path),
            ("generate", "a ring", "--dry-run", "--attention-plot", f"{path}.png"),
            ("info", path),
            ("info", f"{path}.gguf"),
            ("info", f"{path}.safetensors"),
            ("config", "show", path),
            ("models", "download", path),
        ):
            result = command(*arguments)
            if (result.code in (0, 1) and "expected" not in result.said) or "unexpected" in result.said:
                wrong.append((arguments[:3], len(path), result.code, result.said[:300]))
    assert not wrong, "\n".join(map(str, wrong))


def test_no_verb_writes_its_result_into_what_is_no_file(command: Command) -> None:
    """Said before minutes of work: a FIFO would block, and nothing is made in its place."""
    os.mkfifo("fifo")
    os.mkfifo("fifo.png")
    os.mkfifo("fifo.yaml")
    Path("folder.html").mkdir()
    wrong = []
    for arguments in (
        ("bench", "step", "shapes", "-o", "fifo"),
        ("bench", "step", "shapes", "--plot", "fifo.png"),
        ("bench", "generate", "shapes", "-o", "fifo"),
        ("bench", "attention", "-o", "fifo"),
        ("bench", "attention", "-o", "folder.html"),
        ("calibrate", "a ring", "-o", "fifo"),
        ("compare", "a ring", "--setting", "dense:", "--setting", "six: --num-inference-steps 6", "--html", "fifo"),
        ("explain", "--html", "fifo"),
        ("explain", "--html", "folder.html"),
        ("tune", "--prompt-set", "shapes:4", "-o", "fifo.yaml"),
    ):
        result = command(*arguments)
        if result.code not in (1, 2) or not re.search("FIFO|folder|exists already", result.said):
            wrong.append((arguments, result.code, result.said[-300:]))
    assert not wrong, "\n".join(map(str, wrong))
    assert sorted(path.name for path in Path().iterdir()) == ["fifo", "fifo.png", "fifo.yaml", "folder.html"]


def test_more_generations_than_can_be_meant_are_refused(command: Command) -> None:
    Path("prompts.txt").write_text("a\n" * 100_000)
    result = command("generate", "--dry-run", "--prompt-file", "prompts.txt")
    assert (result.code, "more than 50000 lines" in result.said) == (2, True)
    Path("prompts.txt").write_text("a\n" * 100)
    result = command("generate", "--dry-run", "--prompt-file", "prompts.txt", "--seed", "1-9999")
    assert (result.code, "more than 50000 generations" in result.said) == (2, True)
