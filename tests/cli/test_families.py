"""Models of other families through the command line: their roles by name, images to start from, what they refuse."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy
import pytest
from cli_support import Command, command_process, tiny_arguments
from PIL import Image
from tiny_families import WRITERS
from tiny_models import write_tiny_wan

from diffusion_runtime.media import read_recipe
from diffusion_runtime.media.encode import FrameChunks, encode

# What importing diffusers' pipelines says about packages that are not here.
pytestmark = pytest.mark.filterwarnings("ignore")
TEXT_ROLE = "hunyuan_video.text_refiner"
THEIRS = f"theirs, and the categories: self, {TEXT_ROLE}, cross"
CHOICE = (f"--attention-config.per_role.{TEXT_ROLE}.backend", "reference")


@pytest.fixture(scope="module")
def hunyuan_video(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    return tiny_arguments(WRITERS["hunyuan_video"](tmp_path_factory.mktemp("models") / "hunyuan_video"))


@pytest.fixture(scope="module")
def image_to_video(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Latents are 32 pixels wide. Read only."""
    return write_tiny_wan(tmp_path_factory.mktemp("models") / "wan_ti2v", vae="residual", takes_image=True)


def backends(report: dict[str, object]) -> dict[str, str]:
    rows = report["rows"]
    assert isinstance(rows, list)
    return {row["role"]: row["backend"] for row in rows}


def test_a_role_of_a_family_is_chosen_by_its_dotted_name(
    hunyuan_video: tuple[str, ...], tmp_path: Path, command: Command
) -> None:
    """In a process of its own: no family has been loaded when the command line is read."""
    made = command_process("generate", "a cat", *hunyuan_video, *CHOICE, "--json", cwd=tmp_path)
    assert made.code == 0, made.err
    (item,) = made.json["items"]
    assert backends(item["attention_report"]) == {TEXT_ROLE: "reference", "self": "torch_sdpa"}
    again = command("generate", "--from", str(tmp_path / item["path"]), "--json")
    assert again.code == 0, again.err
    assert backends(again.json["items"][0]["attention_report"])[TEXT_ROLE] == "reference"


def test_a_config_may_choose_for_a_role_of_a_family(hunyuan_video: tuple[str, ...], command: Command) -> None:
    Path("mine.yaml").write_text(f"runtime: {{attention: {{per_role: {{{TEXT_ROLE}: reference}}}}}}\n")
    planned = command("generate", "a cat", *hunyuan_video, "--config", "mine.yaml", "--dry-run", "--json").json
    assert {row["role"]: row["backend"] for row in planned["attention"]}[TEXT_ROLE] == "reference"


@pytest.mark.parametrize(
    ("role", "said"),
    [
        ("hunyuan_video.text_refinr", f"Did you mean '{TEXT_ROLE}'"),
        ("ltx2.audio_to_video", f"have no attention role 'ltx2.audio_to_video'; {THEIRS}"),
    ],
)
def test_a_role_that_the_model_lacks_names_those_it_has(
    role: str, said: str, hunyuan_video: tuple[str, ...], command: Command
) -> None:
    for choice in (
        [f"--attention-config.per_role.{role}.backend", "reference"],
        ["--attention-config", schedule(role)],
    ):
        result = command("generate", "a cat", *hunyuan_video, *choice)
        assert result.code == 2, result.err
        assert said in result.said
        assert "loading the text encoder" not in result.err


def schedule(role: str) -> str:
    return json.dumps({"schedule": [{"role": role, "steps": "0", "backend": "reference"}]})


def test_each_prompt_has_its_negative_prompt(command: Command, tiny_flags: tuple[str, ...]) -> None:
    negative = ("--negative-prompt", "blue", "--negative-prompt", "a square")
    prompts = ("--prompt", "a star", "--prompt", "a ring")
    made = command("generate", *tiny_flags, *prompts, *negative, "--num-frames", "1", "-o", "here/")
    assert made.code == 0, made.err
    requests = [read_recipe(path)["request"] for path in made.out.splitlines()]
    assert [(it["prompt"], it["negative_prompt"]) for it in requests] == [("a star", "blue"), ("a ring", "a square")]
    swapped = ("--negative-prompt", "a square", "--negative-prompt", "blue")
    other = command("generate", *tiny_flags, *prompts, *swapped, "--num-frames", "1", "-o", "there/")
    for mine, theirs in zip(made.out.splitlines(), other.out.splitlines(), strict=True):
        assert (pixels(mine) != pixels(theirs)).any()
    planned = command("generate", *tiny_flags, *prompts, *negative, "--dry-run").said
    assert "negative_prompt blue a square" in planned


def pixels(path: str) -> numpy.ndarray:
    return numpy.asarray(Image.open(path))


def test_a_video_from_an_image(image_to_video: Path, command: Command) -> None:
    sizes = ("--height", "64", "--width", "64", "--num-frames", "5", "--num-inference-steps", "2", "--format", "npy")
    arguments = ("a star moving left", "--model-path", str(image_to_video), *sizes)
    frames = {}
    for colour in ("red", "blue"):
        Image.new("RGB", (128, 128), colour).save(f"{colour}.png")
        image = ("--image-path", f"{colour}.png", "-o", f"{colour}.npy")
        made = command("generate", *arguments, *image)
        assert made.code == 0, made.err
        assert made.out == f"{colour}.npy\n"
        frames[colour] = numpy.load(f"{colour}.npy")
    assert frames["red"].shape == (5, 64, 64, 3)
    assert (frames["red"] != frames["blue"]).any()
    assert read_recipe("red.json")["request"]["image_path"] == "red.png"


def test_a_changed_image_is_told_and_its_video_is_not_taken_for_this_one(
    image_to_video: Path, command: Command
) -> None:
    sizes = ("--height", "64", "--width", "64", "--num-frames", "5", "--num-inference-steps", "1", "--format", "npy")
    given = ("generate", "a star", "--model-path", str(image_to_video), *sizes, "--image-path", "star.gif")
    Image.new("RGB", (64, 64), "red").save("star.gif", save_all=True, append_images=[Image.new("RGB", (64, 64))])
    made = command(*given, "-o", "made/")
    assert "image_path: star.gif: it is animated: its first frame is used" in made.said
    digest = hashlib.sha256(Path("star.gif").read_bytes()).hexdigest()
    assert read_recipe(made.out.strip())["inputs"] == {"image_path": digest}
    assert "has changed" not in command("generate", "--from", made.out.strip()).err
    assert command(*given, "-o", "made/", "--resume").out == ""
    Image.new("RGB", (64, 64), "blue").save("star.gif")
    Image.new("RGB", (64, 64), "blue").save("other.png")
    again = command("generate", "--from", made.out.strip())
    assert again.code == 0
    assert "star.gif has changed since the file of --from was made; the result will differ" in again.said
    other = command("generate", "--from", made.out.strip(), "--image-path", "other.png")
    assert "has changed" not in other.err
    resumed = command(*given, "-o", "made/", "--resume")
    assert resumed.code == 2
    assert "was not made by this command: an image has changed since" in resumed.said


def test_a_control_video_is_checked_told_of_and_known_again(tmp_path: Path, command: Command) -> None:
    folder = write_tiny_wan(tmp_path / "vace", condition="control")
    sizes = ("--height", "32", "--width", "48", "--num-frames", "5", "--num-inference-steps", "1", "--format", "npy")
    given = ("generate", "a star", "--model-path", str(folder), *sizes, "--video-path", "v.mp4", "--mask-path", "m.png")
    frames = numpy.zeros((7, 64, 96, 3), numpy.uint8)
    encode("mp4", FrameChunks.of(frames), 8, None, Path("v.mp4"))
    Image.new("L", (96, 64), 255).save("m.png")
    made = command(*given, "--conditioning-scale", "0.5,1", "-o", "made/")
    assert made.code == 0, made.err
    assert "video_path: v.mp4: its first 5 frames are used" in made.said
    assert "it has 8 frames per second, the clip 16: frame by frame, what takes 1 s there takes 0.5 s" in made.said
    recipe = read_recipe(made.out.strip())
    files = {"video_path": Path("v.mp4"), "mask_path": Path("m.png")}
    assert recipe["inputs"] == {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}
    assert recipe["request"]["conditioning_scale"] == [0.5, 1.0]
    assert command(*given, "--conditioning-scale", "0.5,1", "-o", "made/", "--resume").out == ""
    Image.new("L", (96, 64), 254).save("m.png")
    again = command("generate", "--from", made.out.strip())
    assert again.code == 0, again.err
    assert "m.png has changed since the file of --from was made; the result will differ" in again.said
    assert "v.mp4 has changed" not in again.said
    longer = command(*given, "--num-frames", "9")
    assert longer.code == 2
    assert "v.mp4 has 7 frames, the clip 9; give a longer one, or --num-frames 5" in longer.said


def test_one_image_path_is_one_image(image_to_video: Path, command: Command) -> None:
    for name in ("a.png", "b.png"):
        Image.new("RGB", (64, 64)).save(name)
    two = ("--image-path", "a.png", "--image-path", "b.png")
    result = command("generate", "a star", "--model-path", str(image_to_video), *two)
    assert result.code == 2, result.err
    assert "image_path: expected one image, got 2: 'a.png', 'b.png'" in result.said
    last = ("--image-path", "a.png", "--last-image-path", "b.png", "--height", "64", "--width", "64")
    result = command("generate", "a star", "--model-path", str(image_to_video), *last)
    assert result.code == 2
    assert "last_image_path: this model takes no image to end with; leave it out" in result.said


@pytest.mark.parametrize(
    ("image", "said"),
    [
        ("missing.png", "no such file"),
        ("folder", "this is a folder"),
        ("notes.png", "is not a readable PNG, JPEG, WEBP, GIF image"),
        ("wide.png", "wide.png is 128 x 64 (width x height), the clip 64 x 64"),
        ("drawing.bmp", "is not a readable PNG, JPEG, WEBP, GIF image"),
    ],
)
def test_images_that_no_video_can_start_from(image: str, said: str, image_to_video: Path, command: Command) -> None:
    Path("folder").mkdir()
    Path("notes.png").write_text("not an image")
    Image.new("RGB", (128, 64)).save("wide.png")
    Image.new("RGB", (64, 64)).save("drawing.bmp")
    sizes = ("--height", "64", "--width", "64", "--num-frames", "5", "--num-inference-steps", "2")
    result = command("generate", "a star", "--model-path", str(image_to_video), *sizes, "--image-path", image)
    assert result.code == 2, result.err
    assert f"image_path: {image}" in result.said
    assert said in result.said
    assert "loading the text encoder" not in result.err


def test_a_model_that_makes_images_from_text_says_so(tmp_path: Path, command: Command) -> None:
    folder = WRITERS["flux1"](tmp_path / "flux1")
    Image.new("RGB", (64, 64)).save("star.png")
    result = command("generate", "a star", "--model-path", str(folder), "--image-path", "star.png")
    assert result.code == 2
    assert "image_path: this model makes images from text alone; leave it out" in result.said
