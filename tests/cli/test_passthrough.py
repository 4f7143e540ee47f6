"""`generate` with diffusers' own pipelines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_support import Command
from PIL import Image
from tiny_pipelines import write_tiny_image_pipeline, write_tiny_video_pipeline

from diffusion_runtime.media import read_media_file

# What transformers says about image processors when diffusers imports them.
pytestmark = pytest.mark.filterwarnings("ignore:.*requires torchvision")
SIZES = ("--height", "16", "--width", "16", "--num-inference-steps", "2")


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder = write_tiny_image_pipeline(tmp_path_factory.mktemp("pipelines") / "image")
    return ("generate", "a red circle", "--model-path", str(folder), *SIZES)


@pytest.fixture(scope="module")
def video(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder = write_tiny_video_pipeline(tmp_path_factory.mktemp("pipelines") / "video")
    return ("generate", "a red circle", "--model-path", str(folder), *SIZES, "--num-frames", "9")


def test_an_image_and_its_repetition(command: Command, image: tuple[str, ...]) -> None:
    made = command(*image, "--backend", "diffusers", "--attention-backend", "torch_sdpa", "--seed", "4", "-o", "a.png")
    assert made.code == 0, made.err
    assert made.out == "a.png\n"
    assert "attention modules reached: 8 of 8" in made.said
    assert "denoise: step 2/2" in made.said
    assert "requires torchvision" not in made.err
    again = command("generate", "--from", "a.png", "-o", "b.png")
    assert again.code == 0, again.err
    with Image.open("a.png") as first, Image.open("b.png") as second:
        assert first.tobytes() == second.tobytes()
    recipe = read_media_file("b.png").recipe
    assert recipe is not None
    assert recipe["request"] == (read_media_file("a.png").recipe or {})["request"]
    assert recipe["runtime"]["backend"] == "diffusers"
    assert recipe["attention"][0]["backend"] == "torch_sdpa"


def test_a_video_that_nobody_has_a_model_for(command: Command, video: tuple[str, ...]) -> None:
    made = command(*video, "--json", "--attention-backend", "reference", "--seed", "1,2")
    assert made.code == 0, made.err
    assert made.said.count("no native model for CogVideoXTransformer3DModel; diffusers' own CogVideoXPipeline") == 1
    first, second = made.json["items"]
    assert read_media_file(first["path"]).num_frames == read_media_file(second["path"]).num_frames == 9
    assert [(row["backend"], row["count"]) for row in first["attention_report"]["rows"]] == [("reference", 4)]
    assert first["request"]["fps"] == 16


def test_sparse_attention_by_step(command: Command, tiny_flags: tuple[str, ...]) -> None:
    rules = {
        "default": {"backend": "sliding_tile_attn", "extra": {"tile_size": [1, 1, 1], "window": [1, 1, 1]}},
        "schedule": [{"role": "self", "steps": "0", "backend": "torch_sdpa"}],
    }
    made = command(
        "generate", "a star", *tiny_flags, "--backend", "diffusers", "--attention-config", json.dumps(rules), "--json"
    )
    assert made.code == 0, made.err
    rows = made.json["items"][0]["attention_report"]["rows"]
    assert {(row["role"], row["backend"], row["steps"]) for row in rows} == {
        ("self", "torch_sdpa", "0"),
        ("self", "sliding_tile_attn", "1"),
        ("cross", "torch_sdpa", "0-1"),
    }


def test_a_name_of_diffusers(command: Command, tiny_flags: tuple[str, ...]) -> None:
    flags = ("generate", "a star", *tiny_flags, "--backend", "diffusers", "--attention-backend")
    made = command(*flags, "_native_math", "-o", "a.mp4")
    assert made.code == 0, made.err
    assert "attention modules reached: 4 of 4" in made.said
    recipe = read_media_file("a.mp4").recipe
    assert recipe is not None
    assert recipe["runtime"]["attention_override"] == "_native_math"
    assert command("generate", "--from", "a.mp4", "-o", "b.mp4").code == 0
    # The native model knows these names as one of ours.
    plain = command("generate", "a star", *tiny_flags, "--attention-backend", "native", "--json")
    assert {row["backend"] for row in plain.json["items"][0]["attention_report"]["rows"]} == {"torch_sdpa"}
    plain = command("generate", "a star", *tiny_flags, "--attention-backend", "_native_math", "--json")
    assert {row["backend"] for row in plain.json["items"][0]["attention_report"]["rows"]} == {"torch_sdpa"}


def test_a_dry_run(command: Command, video: tuple[str, ...]) -> None:
    told = command(*video, "--dry-run", "--json", "--attention-backend", "reference")
    assert told.code == 0, told.err
    assert told.json["model"]["family"] == "CogVideoXPipeline"
    assert [(row["role"], row["backend"], row["layers"]) for row in told.json["attention"]] == [
        ("self", "reference", [0, 1])
    ]
    assert [row["component"] for row in told.json["libraries"]] == ["text_encoder", "vae"]
    told = command(*video, "--dry-run", "--attention-backend", "native")
    assert "Attention: diffusers' own 'native', which its dispatcher runs" in told.said
    assert "None" not in told.said
    assert not list(Path().iterdir())


@pytest.mark.parametrize(
    ("flags", "code", "told"),
    [
        (("--attention-backend", "fa"), 3, "role 'self'"),
        (("--attention-backend", "flash_varlen"), 3, "'flash_varlen' cannot run here"),
        (("--attention-backend", "native"), 3, "'native' reaches none of the 8 attention modules"),
        (("--attention-backend", "sta", "--attention-backend-config", "window=[3,3,3]"), 3, "needs the grid"),
        (("--flow-shift", "3"), 2, "flow_shift: StableDiffusionPipeline takes no such value"),
        (("--sampler", "unipc"), 2, "sampler: StableDiffusionPipeline takes no such value"),
        (("--num-frames", "9", "--format", "mp4"), 2, "num_frames: StableDiffusionPipeline makes images"),
        (("--image-path", "a.png"), 2, "image_path: StableDiffusionPipeline takes no such value"),
        (("--backend", "native"), 1, "Supported: WanTransformer3DModel"),
    ],
)
def test_what_cannot_be_done(
    command: Command, image: tuple[str, ...], flags: tuple[str, ...], code: int, told: str
) -> None:
    failed = command(*image, *flags)
    assert (failed.code, failed.out) == (code, "")
    assert told in failed.said
