"""`--resume`: what is there is left alone, what is missing is made, what is somebody else's is an error."""

from __future__ import annotations

import json
from pathlib import Path

from cli_support import Command


def written() -> list[str]:
    return sorted(path.name for path in Path("outputs").iterdir())


def test_only_what_is_missing_is_made(command: Command, tiny_flags: tuple[str, ...]) -> None:
    arguments = ("generate", "a star", "--prompt", "a ring", *tiny_flags, "--seed", "1-2", "--format", "npy")
    assert command(*arguments).code == 0
    kept = Path("outputs/a-star-seed2.npy")
    (before, bytes_before) = kept.stat().st_mtime_ns, kept.read_bytes()
    names = written()
    lost = Path("outputs/a-ring-seed1.npy")
    lost_bytes = lost.read_bytes()
    lost.unlink()
    lost.with_suffix(".json").unlink()

    resumed = command(*arguments, "--resume", "--json")
    assert resumed.code == 0, resumed.err
    assert written() == names
    assert lost.read_bytes() == lost_bytes
    assert (kept.stat().st_mtime_ns, kept.read_bytes()) == (before, bytes_before)
    assert resumed.json["num_items"] == 4
    assert [(item["path"], item.get("done_already", False)) for item in resumed.json["items"]] == [
        ("outputs/a-star-seed1.npy", True),
        ("outputs/a-star-seed2.npy", True),
        ("outputs/a-ring-seed2.npy", True),
        ("outputs/a-ring-seed1.npy", False),
    ]

    again = command(*arguments, "--resume")
    assert (again.code, again.out) == (0, "")
    assert again.err.count("done already: outputs/") == 4
    assert "loading the transformer" not in again.err


def test_names_that_prompts_share_are_told_apart(command: Command, tiny_flags: tuple[str, ...]) -> None:
    arguments = ("generate", "a star", "--prompt", "a star!", *tiny_flags, "--format", "npy")
    assert command(*arguments).code == 0
    assert "a-star-seed0-2.npy" in written()
    resumed = command(*arguments, "--resume")
    assert (resumed.code, resumed.out) == (0, "")
    other_order = ("generate", "--prompt", "a star!", "--prompt", "a star", *tiny_flags, "--format", "npy", "--resume")
    assert command(*other_order).err.count("done already") == 2
    Path("outputs/a-star-seed0-2.npy").unlink()
    assert command(*other_order).out == "outputs/a-star-seed0-2.npy\n"


def test_a_file_of_another_recipe_is_an_error(command: Command, tiny_flags: tuple[str, ...]) -> None:
    arguments = ("generate", "a star", *tiny_flags, "--format", "npy")
    assert command(*arguments, "--guidance-scale", "3").code == 0
    resumed = command(*arguments, "--resume")
    assert resumed.code == 2
    assert "a-star-seed0.npy was not made by this command" in resumed.said
    assert written() == ["a-star-seed0.json", "a-star-seed0.npy"]

    Path("outputs/a-star-seed0.json").unlink()
    assert "its recipe is another one, or missing" in command(*arguments, "--resume").said


def test_another_attention_is_another_recipe(command: Command, tiny_flags: tuple[str, ...]) -> None:
    arguments = ("generate", "a star", *tiny_flags, "--format", "npy")
    assert command(*arguments).code == 0
    assert command(*arguments, "--attention-backend", "reference", "--resume").code == 2
    assert command(*arguments, "--attention-backend", "torch_sdpa", "--resume").out == ""


def test_half_of_a_pair_is_made_again(command: Command, tiny_flags: tuple[str, ...]) -> None:
    """A process that is killed between its two names leaves the sidecar alone."""
    arguments = ("generate", "a star", *tiny_flags, "--format", "npy")
    assert command(*arguments).code == 0
    Path("outputs/a-star-seed0.npy").unlink()
    resumed = command(*arguments, "--resume")
    assert resumed.out == "outputs/a-star-seed0.npy\n"
    assert written() == ["a-star-seed0.json", "a-star-seed0.npy"]
    assert json.loads(Path("outputs/a-star-seed0.json").read_text())["recipe"]["request"]["prompt"] == "a star"
