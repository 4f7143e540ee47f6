"""Bad input: one clear message, the right exit code, nothing written; as text and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_support import Command
from PIL import Image

USAGE = [
    (["--heigth", "32"], "No such option: --heigth (Possible options: --height"),
    (["--height", "tall"], "--height"),
    (["--attention-bckend", "fa"], "--attention-backend"),
    (["--attenion-config.default.backend", "fa"], "Did you mean attention-config"),
    (["--attention-backend", "torch_spda"], "'torch_sdpa'"),
    (["--attention-config.per_role.crss.backend", "torch_sdpa"], "'cross'"),
    (["--attention-config.per_role.self.backend=torch_sdpa", "--attention-config.per_role.self.extra.k=1"], "'k'"),
    (["--attention-backend", "torch_sdpa", "--attention-backend-config", "speed=3"], "'speed'"),
    (["--attention-backend", "fa", "--attention-config.default.backend", "fa"], "both set the default"),
    (["--attention-backend-config", "speed=3"], "'speed'"),
    (["--preset", "drft"], "unknown name 'drft'"),
    (["--height", "33"], "height: expected a multiple of 16, got 33; use 32 or 48"),
    (["--num-frames", "6"], "use 5 or 9"),
    (["--image-crf", "33.5"], "Invalid value for '--image-crf': expected a whole number from 0 to 51, got '33.5'"),
    (["--image-crf", "52"], "image_crf: expected a whole number from 0 to 51, got 52"),
    (["--guidance-scale", "x"], "Invalid value for '--guidance-scale': expected a number from 0 to 1e+06, got 'x'"),
    (["--num-inference-steps", "-3"], "num_inference_steps: expected a whole number of 1 or more, got -3"),
    (["--guidance-scale", "nan"], "guidance_scale"),
    (["--sampler", "unpc"], "'unipc'"),
    (["--sampler", "dmd", "--sigmas", "1,0.5,0.6"], "sigmas: expected noise levels that fall from step to step"),
    (["--sampler", "dmd", "--sigmas", "1,half"], "sigmas: expected numbers with commas between them"),
    (
        ["--sampler", "dmd", "--sigmas", "1,0.7,0.5,0.2", "--num-inference-steps", "2"],
        "sigmas: expected 2 noise levels, one per step, got 4: leave out num_inference_steps",
    ),
    (["--preset", "turbo-8"], "preset: 'turbo-8' is for krea2 and z_image models; this model has distill-4, fastwan-3"),
    (["--seed", "4-1"], "ends before it starts"),
    (["--prompt", " "], "empty prompt"),
    (["--negative-prompt", "grey", "--negative-prompt", "pale"], "2 negative prompts for 1 prompt"),
    (
        ["--prompt", "b", "--prompt", "c", "--negative-prompt", "grey", "--negative-prompt", "pale"],
        "2 negative prompts for 3",
    ),
    (["--image-path", "star.png"], "image_path: this model makes videos from text alone"),
    (["--video-path", "a.mp4"], "video_path: this model takes no control video; leave it out"),
    (["--video-path", "a.mp4", "--video-path", "b.mp4"], "video_path: expected one video, got 2: 'a.mp4', 'b.mp4'"),
    (["--conditioning-scale", "much"], "conditioning_scale: expected a number from 0 to 1e+06, or several"),
    (["--attention-config.per_role.ltx2.audio_to_video.backend", "fa"], "wan models have no attention role"),
    (["--attention-config.per_role.ltx2.audio_to_vido.backend", "fa"], "Did you mean 'ltx2.audio_to_video'"),
    (["more", "words"], "in quotes"),
    (["--dtype", "float8"], "dtype: expected auto, float32, bfloat16, float16, got 'float8'"),
    (["--device", "cuda:99"], "device"),
    (["--backend", "diffuser"], "backend: unknown value 'diffuser'. Did you mean 'diffusers'?"),
    (["--device", "cuda:0,1", "--num-gpus", "2"], "device"),
    (["--device", "cpu", "--num-gpus", "4", "--ulysses-degree", "3"], "ulysses_degree 3 does not give 4 processes"),
    (["--device", "cpu", "--ulysses-degree", "5"], "5 processes cannot share 4 attention heads; valid degrees"),
    (["--device", "cpu", "--num-gpus", "2", "--cfg-parallel", "--ring-degree", "2"], "does not give 2 processes"),
    (["--format", "avi"], "format: unknown value 'avi'"),
    (["--output-path", "x.avi"], "ends in"),
    (["--output-path", "x.png"], "png holds one image"),
    (["--config", "missing.yaml"], "missing.yaml is not a file"),
    (["--set", "request.heigth=3"], "'height'"),
    (["--prompt-file", "missing.txt"], "no such file"),
]


@pytest.mark.parametrize(("arguments", "said"), USAGE, ids=[" ".join(arguments) for arguments, _ in USAGE])
def test_usage_errors(arguments: list[str], said: str, command: Command, tiny_flags: tuple[str, ...]) -> None:
    result = command("generate", "a red circle", *tiny_flags, *arguments)
    assert result.code == 2, result.err
    assert said in result.said
    assert result.out == ""
    assert "Traceback" not in result.err
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "code", "kind", "said"),
    [
        (["--attention-backend", "fa"], 3, "BackendUnavailableError", "usable here"),
        (["--model-path", "missing"], 1, "ModelLoadError", "missing"),
        (["--output-path", "/proc/self/x"], 1, "OutputError", "cannot write into the output folder"),
        (["--from", "missing.mp4"], 2, "ConfigError", "missing.mp4: no such file"),
        (["--height", "33"], 2, "RequestError", "use 32 or 48"),
        (["--heigth", "33"], 2, "UsageError", "No such option"),
        (["--request.heigth", "33"], 2, "ConfigError", "'height'"),
    ],
)
def test_errors_are_json_with_json(
    arguments: list[str], code: int, kind: str, said: str, command: Command, tiny_flags: tuple[str, ...]
) -> None:
    result = command("generate", "a red circle", *tiny_flags, *arguments, "--json")
    assert result.code == code
    assert (result.json["kind"], result.json["exit_code"]) == (kind, code)
    assert result.json["schema"] == "diffusion_runtime.generate/1"
    assert said in result.json["error"]
    assert said.split()[0] in result.said
    assert list(Path.cwd().iterdir()) == []


def test_a_recipe_less_file_cannot_be_repeated(command: Command) -> None:
    Image.new("RGB", (8, 8)).save("x.png")
    result = command("generate", "--from", "x.png")
    assert result.code == 1
    assert "x.png carries no recipe" in result.said


def test_verbose_shows_where(command: Command, tiny_flags: tuple[str, ...]) -> None:
    result = command("generate", "a", *tiny_flags, "--height", "33", "--verbose")
    assert result.code == 2
    assert "Traceback (most recent call last)" in result.err
    assert result.err.splitlines()[-1].startswith("error: height")


def test_an_unexpected_error_says_what_to_do(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a fault\nof our own")

    monkeypatch.setattr("diffusion_runtime.cli.generation.resolve_settings", fail)
    result = command("generate", "a")
    assert result.code == 1
    assert result.err == "error: unexpected RuntimeError: a fault; run again with --verbose to see where\n"


def test_an_unknown_verb_names_the_nearest(command: Command) -> None:
    result = command("genrate", "a")
    assert result.code == 2
    assert "'generate'" in result.err


def test_info_of_what_is_not_a_result(command: Command) -> None:
    result = command("info", "missing.mp4", "--json")
    assert result.code == 2
    assert result.json["schema"] == "diffusion_runtime.info/1"
    assert json.loads(result.out)["kind"] == "ConfigError"


def test_the_folder_is_checked_before_the_model(command: Command) -> None:
    result = command("generate", "a", "--model-path", "missing", "--output-path", "/proc/self/x")
    assert "output folder" in result.err
    assert "loading" not in result.err


def test_a_variable_of_the_environment_is_checked_before_loading(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIFFUSION_FUSED_KERNELS", "x")
    result = command("generate", "a", "--dry-run")
    assert result.code == 2
    assert result.said.strip().endswith("DIFFUSION_FUSED_KERNELS: expected auto, reference or triton, got 'x'")
