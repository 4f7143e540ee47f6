"""`--save-latents`, `--stop-after-step` and `finish`, in this process, on two processes and after failures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_support import Command, command_process

from diffusion_runtime.decoders.interface import LatentDecoder
from diffusion_runtime.errors import DeviceMemoryError

SAMPLER = ("--sampler", "er_sde", "--num-inference-steps", "4", "--format", "npy")
LATENTS = "draft/a-star-seed0.latents.safetensors"


def test_drafts_are_finished(command: Command, tiny_flags: tuple[str, ...]) -> None:
    made = ("generate", "a star", *tiny_flags, *SAMPLER, "--seed", "0-1")
    assert command(*made, "-o", "whole/").code == 0
    draft = command(*made, "-o", "draft/", "--save-latents", "--stop-after-step", "2", "--json")
    assert [item["latents"] for item in draft.json["items"]] == [LATENTS, LATENTS.replace("seed0", "seed1")]
    assert f"`diffusion-runtime finish {LATENTS}` goes on from its latents" in draft.err
    assert "2 of 4 steps" in command("info", LATENTS).out
    assert command("info", LATENTS, "--json").json["progress"]["done"] == 2
    dry = command("finish", LATENTS, "--dry-run")
    assert (dry.code, Path("done").exists()) == (0, False)
    # A third step, which is saved again, and the rest of both.
    third = command("finish", LATENTS, "--stop-after-step", "3", "--save-latents", "-o", "third/", "--format", "npy")
    assert third.code == 0, third.err
    again = "third/a-star-seed0.latents.safetensors"
    other = LATENTS.replace("seed0", "seed1")
    assert command("finish", again, other, "-o", "done/", "--format", "npy").code == 0
    for name in ("a-star-seed0.npy", "a-star-seed1.npy"):
        assert Path("done", name).read_bytes() == Path("whole", name).read_bytes()
    assert not [path for path in Path("draft").iterdir() if path.name.startswith(".")]


@pytest.mark.slow
def test_two_processes_finish_what_two_have_begun(tiny_flags: tuple[str, ...], tmp_path: Path) -> None:
    made = ("generate", "a star", *tiny_flags, *SAMPLER, "--device", "cpu", "--num-gpus", "2")
    for arguments in (
        (*made, "-o", "whole/"),
        (*made, "-o", "draft/", "--save-latents", "--stop-after-step", "2"),
        ("finish", LATENTS, "--num-gpus", "2", "--device", "cpu", "-o", "done/", "--format", "npy"),
    ):
        result = command_process(*arguments, cwd=tmp_path)
        assert result.code == 0, result.err
    found, whole = (tmp_path / name / "a-star-seed0.npy" for name in ("done", "whole"))
    assert found.read_bytes() == whole.read_bytes()


def test_latents_outlive_a_failed_decoding(
    command: Command, tiny_flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = ("generate", "a star", *tiny_flags, "--format", "npy")
    assert command(*made, "-o", "whole/").code == 0

    def fail(*_: object) -> None:
        raise DeviceMemoryError("too large to decode")

    with monkeypatch.context() as patch:
        for kind in (LatentDecoder, *LatentDecoder.__subclasses__()):
            patch.setattr(kind, "stream", fail)
        failed = command(*made, "-o", "draft/")
    assert failed.code == DeviceMemoryError.exit_code
    assert f"too large to decode; `diffusion-runtime finish {LATENTS}` goes on from its latents" in failed.said
    assert [path.name for path in Path("draft").iterdir()] == [Path(LATENTS).name]
    assert command("finish", LATENTS, "-o", "done/", "--format", "npy").code == 0
    assert Path("done/a-star-seed0.npy").read_bytes() == Path("whole/a-star-seed0.npy").read_bytes()


def test_what_cannot_be_finished_is_refused(command: Command, tiny_flags: tuple[str, ...]) -> None:
    missing = command("finish", "none.latents.safetensors")
    assert (missing.code, "none.latents.safetensors" in missing.said) == (2, True)
    Path("other.latents.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    other = command("finish", "other.latents.safetensors")
    assert (other.code, "it holds something else" in other.said) == (1, True)
    Path("clip.json").write_text(json.dumps({}))
    assert command("finish", "clip.json").code != 0


def test_recipes_of_finished_files_are_those_of_whole_runs(command: Command, tiny_flags: tuple[str, ...]) -> None:
    """The dtype is `auto` where the user left it so; one that other values have begun says so when it is repeated."""
    made = ("generate", "a star", *tiny_flags, *SAMPLER)
    assert command(*made, "-o", "whole/").code == 0
    assert command(*made, "-o", "draft/", "--save-latents", "--stop-after-step", "2").code == 0
    assert command("finish", LATENTS, "-o", "done/", "--format", "npy").code == 0
    whole, done = (json.loads(Path(name, "a-star-seed0.json").read_text())["recipe"] for name in ("whole", "done"))
    assert done == whole
    changed = ("--allow-changes", "--set", "request.guidance_scale=3.5", "-o", "changed/", "--format", "npy")
    assert command("finish", LATENTS, *changed).code == 0
    repeated = command("generate", "--from", "changed/a-star-seed0.npy", "--dry-run")
    assert "its first 2 steps were made with other values (request.guidance_scale)" in repeated.err
    assert (
        "steps were made with other values"
        not in command("generate", "--from", "done/a-star-seed0.npy", "--dry-run").err
    )


def test_resumed_files_without_latents_are_named(command: Command, tiny_flags: tuple[str, ...]) -> None:
    made = ("generate", "a star", *tiny_flags, "--format", "npy", "-o", "out/", "--seed", "0-1")
    assert command(*made).code == 0
    again = command(*made, "--resume", "--save-latents")
    assert again.code == 0
    assert "--save-latents: out/a-star-seed0.npy and 1 more is done and has none beside it" in again.said
    assert "generate --from out/a-star-seed0.npy --save-latents -o FOLDER/` makes both" in again.said
    assert (
        command("generate", "--from", "out/a-star-seed0.npy", "--save-latents", "-o", "both/", "--format", "npy").code
        == 0
    )
    assert Path("both/a-star-seed0.latents.safetensors").exists()
