"""What a message advises works when it is typed."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from cli_support import Command
from published_files import write_transformer_file
from tables import table

from diffusion_runtime.cli.app import _command
from diffusion_runtime.cli.flag_syntax import flags_in


def advised(message: str) -> list[list[str]]:
    """The words of each piece of advice in a message: behind `write `, to the next comma, semicolon or bracket."""
    found = []
    for part in message.replace("see: ", "\0").replace("write ", "\0\0").split("\0\0")[1:]:
        text = part.split("\0")[0]
        lexer = shlex.shlex(text, posix=True, punctuation_chars=";(,")
        lexer.whitespace_split, lexer.commenters = True, ""
        words = []
        for word in lexer:
            if word[:1] in (";", "(", ",") or word in ("or", "and"):
                break
            words.append(word)
        found.append(words)
    return found


def test_advice_is_found() -> None:
    said = "error: x: no; write --seed 1-4 for four, or generate 'a b' --dtype bfloat16; write run -x (it)"
    assert advised(said) == [["--seed", "1-4", "for", "four"], ["run", "-x"]]


@table(
    ("typed", "told"),
    [
        (("gen", "a star"), "write generate"),
        (("run", "a star"), "write generate"),
        (("a red circle",), "write generate 'a red circle'"),
        (("generate", "a star", "--steps", "4"), "write --num-inference-steps"),
        (("generate", "a star", "--cfg", "4"), "write --guidance-scale"),
        (("generate", "a star", "-n", "4"), "write --seed 1-4"),
        (("generate", "a star", "--num-outputs-per-prompt", "2"), "write --seed 1-4"),
        (("generate", "a star", "--save-output"), "write -o FILE.mp4"),
        (
            ("generate", "a star", "--compile"),
            "once: off, regional",
        ),
        (("generate", "a star", "--size", "large"), "such as 832*480"),
        (("generate", "a star", "--quantization", "q4"), "write --transformer-path FILE.gguf"),
        (("generate", "a star", "--quantization", "int4"), "write --transformer-path FILE.gguf"),
        (("generate", "a star", "-o", "x.jpg"), "write -o x.png --num-frames 1"),
        (("generate", "a star", "--dtype", "int8"), "write --quantization fp8"),
        (("generate", "a star", "--true-cfg-scale", "4", "--dry-run"), "write --guidance-scale 4"),
        (("generate", "a star", "a blue moon"), "a flag each: --prompt 'a star' --prompt 'a blue moon'"),
        (("generate", "a", "star"), "put them in quotes, as in 'a star'"),
    ],
)
def test_the_flag_that_is_advised_is_taken(typed: tuple[str, ...], told: str, command: Command) -> None:
    refused = command(*typed)
    assert refused.code == 2
    assert told in refused.said, refused.said
    assert "Defaulting" not in refused.said
    known = _command(None).commands["generate"]
    names = {name for each in known.params for name in (*each.opts, *each.secondary_opts)}
    for words in advised(refused.err):
        assert [word for word in words if word.startswith("-") and word not in names] == [], words
        assert words[0].startswith("-") or words[0] in _command(None).commands
    assert set(flags_in(refused.said)) - names - {"--help", "--steps", *typed} == set()


@pytest.fixture(scope="module")
def wan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_transformer_file(tmp_path_factory.mktemp("my files") / "wan.safetensors", "wan2.1-1.3b")


def test_a_transformer_in_one_file_names_its_model_and_what_is_missing(wan_file: Path, command: Command) -> None:
    for words in (("--model-path", str(wan_file)), (str(wan_file),)):
        refused = command("generate", "a cat", *words, "--dry-run")
        assert (refused.code, "torchvision" in refused.err) == (1, False), refused.err
        for text in ("parts of wan2.1-1.3b are missing", "wan_2.1_vae.safetensors", "umt5_xxl_fp8_e4m3fn_scaled"):
            assert text in refused.said
    refused = command("generate", "a cat", str(wan_file), "--model-path", "shapes", "--dry-run")
    assert (refused.code, "model_path: expected one model" in refused.said) == (2, True)


def test_a_folder_of_comfyui_is_answered_with_a_command_that_works(
    wan_file: Path, command: Command, tmp_path: Path
) -> None:
    for name in ("checkpoints", "diffusion_models", "vae", "loras"):
        (tmp_path / "ComfyUI" / "models" / name).mkdir(parents=True)
    (tmp_path / "ComfyUI" / "models" / "diffusion_models" / "wan.sft").symlink_to(wan_file)
    for given in ("ComfyUI", "ComfyUI/models"):
        refused = command("generate", "a cat", "--model-path", str(tmp_path / given), "--dry-run")
        assert "it is a folder of ComfyUI" in refused.said, refused.err
        words = advised(refused.err.replace(". Its", "; Its"))[0]
        assert "parts of wan2.1-1.3b are missing" in command("generate", "a cat", *words, "--dry-run").said
