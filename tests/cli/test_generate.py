"""The verbs on a real, tiny model, in this process."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy
import pytest
from cli_support import Command

from diffusion_runtime.media import read_media_file, read_recipe

Flags = tuple[str, ...]


def test_a_video_from_a_prompt(command: Command, tiny_flags: Flags) -> None:
    result = command("generate", "a red circle moving left", *tiny_flags)
    assert result.code == 0, result.err
    assert result.out == "outputs/a-red-circle-moving-left-seed0.mp4\n"
    known = read_media_file(result.out.strip())
    assert (known.num_frames, known.height, known.width) == (5, 32, 32)
    assert known.attention_report is not None
    assert known.attention_report["num_calls"] == 2 * 2 * 2  # layers, roles, steps
    for said in (
        "Attention that ran",
        "self torch_sdpa",
        "cross torch_sdpa",
        "text_encoder: attention of torch (sdpa)",
    ):
        assert said in result.said
    # Behind it, what was expected, where another test has measured this machine.
    timings = next(line for line in result.err.splitlines() if "total " in line)
    for stage in ("load ", "text ", "denoise ", "decode ", "write "):
        assert stage in timings
    assert "\x1b" not in result.err


def test_the_same_name_is_never_taken_twice(command: Command, tiny_flags: Flags) -> None:
    paths = [command("generate", "a star", *tiny_flags, "--format", "npy").out.strip() for _ in range(2)]
    assert paths == ["outputs/a-star-seed0.npy", "outputs/a-star-seed0-2.npy"]
    assert numpy.array_equal(*map(numpy.load, paths))


def test_an_explicit_name_that_is_taken_is_numbered_and_said(command: Command, tiny_flags: Flags) -> None:
    Path("x.gif").write_bytes(b"mine")
    result = command("generate", "a star", *tiny_flags, "-o", "x.gif")
    assert result.out == "x-2.gif\n"
    assert "x.gif exists already" in result.said
    assert Path("x.gif").read_bytes() == b"mine"


def test_prompts_times_seeds(command: Command, tiny_flags: Flags) -> None:
    Path("prompts.txt").write_text("# two\na star\n\na ring\n")
    result = command(
        "generate", *tiny_flags, "--prompt-file", "prompts.txt", "--seed", "1-2", "--num-frames", "1", "-o", "here/"
    )
    names = [f"here/a-{shape}-seed{seed}.png" for shape in ("star", "ring") for seed in (1, 2)]
    assert result.out.splitlines() == names
    assert "[4/4] a ring, seed 2" in result.err
    pixels = {Path(name).read_bytes() for name in names}
    assert len(pixels) == 4


def test_json_is_one_object_that_says_everything(command: Command, tiny_flags: Flags) -> None:
    result = command("generate", "a star", *tiny_flags, "--json", "--seed", "3,4", "--format", "webp")
    told = result.json
    assert (told["schema"], told["num_items"], told["exit_code"]) == ("diffusion_runtime.generate/1", 2, 0)
    assert told["interrupted"] is False
    assert [item["seed"] for item in told["items"]] == [3, 4]
    first = told["items"][0]
    assert Path(first["path"]).is_file()
    assert json.loads(Path(first["sidecar"]).read_text())["attention_report"] == first["attention_report"]
    assert first["request"] == read_recipe(first["path"])["request"]
    stages = {"import", "prepare", "read", "text", "denoise", "decode", "write"}
    assert set(first["timings"]) == stages
    # Each second is in one stage alone.
    timings = told["timings"]
    rounding = 1e-3
    assert sum(timings[name] for name in ("import", "prepare", "read")) <= timings["load"] + rounding
    assert sum(timings[name] for name in stages) <= timings["total"] + rounding
    assert re.search(r"load [\d.]+ s \(import [\d.]+ s, prepare [\d.]+ s, read [\d.]+ s\), text ", result.said)
    assert first["seconds"] >= first["timings"]["denoise"]


def test_the_file_repeats_itself_and_flags_override_it(command: Command, tiny_flags: Flags) -> None:
    typed = [
        "--seed",
        "5",
        "--guidance-scale",
        "2",
        "--sampler",
        "flow_match_euler",
        "--attention-backend",
        "reference",
    ]
    first = command("generate", "a blue ring", *tiny_flags, *typed, "-o", "first.npy")
    assert first.code == 0, first.err
    command("generate", "--from", "first.npy", "-o", "same.npy")
    # What a newer version may have, and this one would leave out.
    sidecar = json.loads(Path("first.json").read_text())
    sidecar["recipe"]["runtime"]["step_size"] = 2
    Path("newer.json").write_text(json.dumps(sidecar))
    refused = command("generate", "--from", "newer.json", "--dry-run")
    assert refused.code == 2
    assert "a key that is unknown here: 'step_size'; it is of version" in refused.err
    command("generate", "--from", "first.json", "--seed", "6", "-o", "other.npy")
    command("generate", "a red ring", "--from", "first.npy", "-o", "prompt.npy", "--width", "48")
    frames = {name: numpy.load(f"{name}.npy") for name in ("first", "same", "other", "prompt")}
    assert numpy.array_equal(frames["first"], frames["same"])
    assert not numpy.array_equal(frames["first"], frames["other"])
    assert frames["prompt"].shape == (5, 32, 48, 3)
    assert read_recipe("same.npy")["request"] == read_recipe("first.npy")["request"]
    report = read_media_file("same.npy").attention_report
    assert report is not None
    assert {row["backend"] for row in report["rows"]} == {"reference"}
    assert read_recipe("prompt.npy")["request"]["prompt"] == "a red ring"


def test_what_the_environment_chose_is_repeated_without_it(
    command: Command, tiny_flags: Flags, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIFFUSION_ATTENTION_BACKEND", "reference")
    command("generate", "a star", *tiny_flags, "-o", "x.npy")
    monkeypatch.delenv("DIFFUSION_ATTENTION_BACKEND")
    (item,) = command("generate", "--from", "x.npy", "--json").json["items"]
    assert {row["backend"] for row in item["attention_report"]["rows"]} == {"reference"}


def test_a_changed_model_is_told_when_a_file_is_repeated(
    command: Command, tiny_wan_copy: object, tiny_flags: Flags
) -> None:
    assert callable(tiny_wan_copy)
    folder = tiny_wan_copy()
    command("generate", "a star", *tiny_flags[2:], "--model-path", str(folder), "-o", "x.npy")
    assert "has changed" not in command("generate", "--from", "x.npy").err
    config = folder / "model_index.json"
    config.write_text(config.read_text() + "\n")
    assert "has changed since" in command("generate", "--from", "x.npy").said


@pytest.mark.parametrize(
    "arguments",
    [
        ["--attention-backend", "reference"],
        ["--diffusion-attention-backend=REFERENCE"],
        ["--attention-config.default.backend", "reference"],
        ["--attention-config", '{"default": "reference"}'],
        [
            "--diffusion-attention-config.per_role.self.backend=reference",
            "--attention-config.per_role.cross",
            "reference",
        ],
        ["--runtime.attention", "reference"],
        ["--set", "runtime.attention.default.backend=reference"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_every_spelling_reaches_the_layers(arguments: list[str], command: Command, tiny_flags: Flags) -> None:
    result = command("generate", "a star", *tiny_flags, *arguments, "--json", "--quiet")
    assert {row["backend"] for row in result.json["items"][0]["attention_report"]["rows"]} == {"reference"}
    source = "config" if "runtime.attention" in " ".join(arguments) else "cli"
    assert {row["source"] for row in result.json["items"][0]["attention_report"]["rows"]} == {source}
    assert result.err == ""


def test_a_config_a_preset_and_a_dotted_flag(command: Command, tiny_wan_folder: Path) -> None:
    Path("mine.yaml").write_text(
        f"""
        runtime: {{model_path: {tiny_wan_folder}, attention: {{per_role: {{cross: reference}}}}}}
        request: {{prompt: a star, height: 32, width: 32, num_frames: 5, num_inference_steps: 2, seed: 1-2}}
        presets: {{image: {{num_frames: 1, num_inference_steps: 1}}}}
        """
    )
    result = command("generate", "--config", "mine.yaml", "--preset", "image", "--request.width=48", "--json")
    assert result.code == 0, result.err
    assert [item["path"] for item in result.json["items"]] == ["outputs/a-star-seed1.png", "outputs/a-star-seed2.png"]
    item = result.json["items"][0]
    assert (item["num_frames"], item["height"], item["width"]) == (1, 32, 48)
    assert {row["role"]: row["backend"] for row in item["attention_report"]["rows"]} == {
        "self": "torch_sdpa",
        "cross": "reference",
    }


def test_a_few_step_preset_is_said_recorded_and_repeated(command: Command, tiny_wan_folder: Path) -> None:
    size = ("--height", "32", "--width", "32", "--num-frames", "1")
    preset = ("--model-path", str(tiny_wan_folder), "--preset", "fastwan-3")
    first = command("generate", "a red circle", *size, *preset, "-o", "first.npy")
    assert first.code == 0, first.err
    recipe = json.loads(command("info", "first.npy", "--json").out)["recipe"]
    assert (recipe["sampling_preset"], recipe["request"]["sigmas"]) == ("fastwan-3", [1.0, 0.757, 0.522])
    again = command("generate", "--from", "first.npy", "-o", "again.npy")
    assert again.code == 0, again.err
    for result in (first, again):
        assert "sampling preset: fastwan-3" in result.said
    assert numpy.array_equal(numpy.load("first.npy"), numpy.load("again.npy"))


def test_a_word_the_model_does_not_know_is_told(command: Command, tiny_flags: Flags) -> None:
    result = command("generate", "a flurbish star", *tiny_flags)
    assert result.code == 0
    assert "warning: " in result.err
    assert "flurbish" in result.err


def test_quiet_leaves_the_path_alone(command: Command, tiny_flags: Flags) -> None:
    result = command("generate", "a star", *tiny_flags, "--quiet")
    assert (result.out, result.err) == ("outputs/a-star-seed0.mp4\n", "")


def test_the_choice_is_logged_once(command: Command, tiny_flags: Flags) -> None:
    result = command("generate", "a star", *tiny_flags, "--attention-backend", "torch_sdpa", "--seed", "1-2")
    assert result.err.count("Using attention backend 'torch_sdpa' for role=self (cli)") == 1
    assert result.err.count("Using attention backend 'torch_sdpa' for role=cross (cli)") == 1


def test_a_dry_run_says_what_would_run_and_writes_nothing(command: Command, tiny_flags: Flags) -> None:
    arguments = ("generate", "a star", *tiny_flags, "--seed", "1-2", "--dry-run", "--attention-backend", "reference")
    result = command(*arguments)
    assert (result.code, result.out) == (0, "")
    for said in ("cpu", "float32", "num_inference_steps 2", "self always 0-1 reference", "outputs/a-star-seed2.mp4"):
        assert said in result.said
    told = command(*arguments, "--json").json
    assert told["schema"] == "diffusion_runtime.dry_run/1"
    assert [item["path"] for item in told["items"]] == ["outputs/a-star-seed1.mp4", "outputs/a-star-seed2.mp4"]
    assert told["items"][0]["request"]["num_frames"] == 5
    assert [(row["role"], row["backend"], row["source"]) for row in told["attention"]] == [
        ("self", "reference", "cli"),
        ("cross", "reference", "cli"),
    ]
    assert told["attention"][0]["reason"]
    assert list(Path.cwd().iterdir()) == []


def test_a_dry_run_names_words_that_the_model_does_not_know(command: Command) -> None:
    """As the run would: a model of whole words ignores the others."""
    arguments = ("generate", "a wale and a fox", "--model-path", "emoji", "--device", "cpu", "--dry-run")
    expected = (
        "prompt 'a wale and a fox': the model's tokenizer does not know 'wale' (nearest: 'whale' or 'whales'); such "
        "words are drawn as nothing, or as anything; what it knows: docs/quality.md#what-emoji-knows"
    )
    assert expected in command(*arguments).said
    assert [item["remarks"] for item in command(*arguments, "--json").json["items"]] == [[expected]]
    explained = ("explain", *arguments[1:-1], "--num-frames", "1")
    assert expected in command(*explained).said
    assert command(*explained, "--json").json["remarks"] == [expected]
    # Nobody gave the prompt that is explained then.
    assert command("explain", *arguments[2:-1], "--num-frames", "1", "--json").json["remarks"] == []


def test_the_report_of_a_run_names_unknown_words_again(command: Command) -> None:
    size = ("--height", "64", "--width", "64", "--num-frames", "1", "--num-inference-steps", "1", "--device", "cpu")
    result = command("generate", "a blue wale", "--model-path", "emoji", *size, "-o", "x.png")
    remark = "prompt 'a blue wale': the model's tokenizer does not know 'wale' (nearest: 'whale' or 'whales'), and the "
    assert f"warning: {remark}" in result.said
    assert f"note: {remark}model knows only within phrases 'blue'" in result.said.partition("Attention that ran")[2]
    notes = json.loads(Path("x.json").read_text())["attention_report"]["notes"]
    assert any(note.startswith(remark) for note in notes)


def test_a_dry_run_reads_no_weights(command: Command, tiny_wan_copy: object, tiny_flags: Flags) -> None:
    assert callable(tiny_wan_copy)
    folder = tiny_wan_copy()
    for weights in folder.rglob("*.safetensors"):
        weights.write_bytes(b"")
    assert command("generate", "a star", *tiny_flags, "--model-path", str(folder), "--dry-run").code == 0
    result = command("generate", "a star", *tiny_flags, "--model-path", str(folder))
    assert result.code == 1
    assert list(Path.cwd().iterdir()) == []


def test_a_name_the_dry_run_says_is_the_name_that_is_written(command: Command, tiny_flags: Flags) -> None:
    arguments = ("generate", "a star", *tiny_flags, "--seed", "1,2", "-o", "x.npy", "--json")
    Path("x.json").touch()
    planned = [item["path"] for item in command(*arguments, "--dry-run").json["items"]]
    assert planned == ["x-2.npy", "x-3.npy"]
    assert [item["path"] for item in command(*arguments).json["items"]] == planned


def test_info_shows_how_a_file_was_made(command: Command, tiny_flags: Flags) -> None:
    command("generate", "a [red] star", *tiny_flags, "-o", "x.mp4", "--seed", "12")
    shown = command("info", "x.mp4")
    assert shown.code == 0
    text = " ".join(shown.out.split())
    for said in ("32 x 32", "frames 5", "request.prompt a [red] star", "request.seed 12", "torch_sdpa", "denoise"):
        assert said in text
    told = command("info", "x.mp4", "--json").json
    assert told["schema"] == "diffusion_runtime.info/1"
    assert (told["num_frames"], told["fps"], told["format"]) == (5, 16.0, "mp4")
    assert told["recipe"]["request"]["seed"] == 12
    assert told["attention_report"]["num_calls"] == 8
    Path("lo.pt").touch()
    assert "lo.pt: expected a file that ends in .mp4, " in (said := command("info", "lo.pt").said)
    assert said.endswith(", .safetensors, .sft, .gguf")


@pytest.mark.parametrize(("name", "said"), [("x.wav", "1.5 s, 1 channels, 8000 Hz"), ("x.gif", "8000 Hz, in x.wav")])
def test_info_of_sound(command: Command, name: str, said: str) -> None:
    from sample_media import make_media

    from diffusion_runtime.media import Audio

    make_media(audio=Audio(numpy.zeros((1, 12000), numpy.float32), 8000)).save("x.gif")
    shown = command("info", name)
    assert shown.code == 0, shown.err
    assert said in " ".join(shown.out.split())
    assert "request.seed" in shown.out
    assert command("info", name, "--json").json["audio"]["sample_rate"] == 8000


def test_info_shows_nothing_that_could_drive_a_terminal(command: Command) -> None:
    from sample_media import make_media

    recipe = {"request": {"prompt": "a\x1b]0;title\x07 star", "x": {"y": {"z": [1]}}}}
    make_media(num_frames=1, recipe=recipe).save("x.png")
    sidecar = json.loads(Path("x.json").read_text())
    Path("x.json").write_text(
        json.dumps(sidecar | {"attention_report": {"rows": ["?", {"count": "many"}], "notes": 3}})
    )
    shown = command("info", "x.png")
    assert shown.code == 0, shown.err
    assert "request.prompt" in shown.out
    assert "request.x.y.z" in shown.out
    assert not {"\x1b", "\x07"} & set(shown.out)


def test_info_of_a_file_without_a_recipe_says_so(command: Command) -> None:
    numpy.save("x.npy", numpy.zeros((2, 8, 8, 3), numpy.uint8))
    shown = command("info", "x.npy")
    assert shown.code == 0
    assert "No recipe" in shown.out
