"""`--resume`: what is there is left alone, what is missing is made, what is somebody else's is an error."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
from cli_support import Command, tiny_arguments
from sample_media import make_media

from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.media import Audio
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.session.outputs import Outputs
from diffusion_runtime.session.resume import find_finished, output_identity


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


def test_weights_that_changed_in_place_are_other_weights(command: Command, tiny_wan_copy: Callable[[], Path]) -> None:
    folder = tiny_wan_copy()
    arguments = ("generate", "a star", *tiny_arguments(folder), "--format", "npy", "--resume")
    assert command(*arguments).code == 0
    assert command(*arguments).out == ""
    path = next((folder / "transformer").glob("*.safetensors"))
    content = bytearray(path.read_bytes())
    # Of the last number, the lowest bits.
    content[-4] ^= 1
    path.write_bytes(content)
    refused = command(*arguments)
    assert (refused.code, "a file of weights has changed since" in refused.said) == (2, True), refused.err


def test_another_attention_is_another_recipe(command: Command, tiny_flags: tuple[str, ...]) -> None:
    arguments = ("generate", "a star", *tiny_flags, "--format", "npy")
    assert command(*arguments).code == 0
    assert command(*arguments, "--attention-backend", "reference", "--resume").code == 2
    assert command(*arguments, "--attention-backend", "torch_sdpa", "--resume").out == ""


def test_other_weights_and_another_decoder_are_another_recipe() -> None:
    recipe = {"request": {"prompt": "a"}, "model": {"family": "wan"}, "attention": []}
    plain = RuntimeConfig(device="cpu")
    known = output_identity({**recipe, "runtime": dataclasses.asdict(plain)})
    # Of an earlier version, and of another machine.
    assert output_identity(recipe) == known
    others = RuntimeConfig(device="cuda", self_check=False, model_path=plain.model_path)
    assert output_identity({**recipe, "runtime": dataclasses.asdict(others)}) == known
    for changes in (
        {"lora": ["style.safetensors"]},
        {"lora": [["style.safetensors", 0.5]]},
        {"vae_decode": "fast"},
        {"vae_tiling": "on"},
        {"vae_decoder": "tiny"},
        {"transformer_path": "fp8.safetensors"},
        {"transformer_2_path": "fp8.safetensors"},
        {"quantization": "fp8"},
        {"quantization": "fp8", "quantization_ignored_layers": ["blocks.1.*"]},
    ):
        changed = output_identity({**recipe, "runtime": dataclasses.asdict(dataclasses.replace(plain, **changes))})
        assert changed != known, changes
        known_too = output_identity({**recipe, "runtime": json.loads(json.dumps(changed["runtime"]))})
        assert known_too == changed


def test_dense_calls_the_text_encoder_and_files_of_attention_are_another_recipe(
    command: Command, tiny_flags: tuple[str, ...]
) -> None:
    """Of a sparse backend what makes its dense calls; what has no row of attention; what a file named by it says."""
    sparse = ("generate", "a star", *tiny_flags, "--format", "npy", "--resume", "--attention-backend")
    assert command(*sparse, "vmoba,torch_sdpa").code == 0
    assert command(*sparse, "vmoba,reference").code == 2
    assert command(*sparse, "vmoba,torch_sdpa").out == ""
    recipe = {"request": {"prompt": "a"}, "model": {"family": "wan"}, "attention": []}
    known = output_identity({**recipe, "runtime": dataclasses.asdict(RuntimeConfig())})
    for level in ("attention", "attention_override"):
        chosen = {level: {"per_role": {"text_encoder": {"backend": "reference"}}}}
        assert output_identity({**recipe, "runtime": {**dataclasses.asdict(RuntimeConfig()), **chosen}}) != known
    strategy = Path("strategy.json")
    strategy.write_text(json.dumps({"0_0_0": [1, 1, 1]}))
    tiles = ("sliding_tile_attn", "--attention-config.default.extra.mask_strategy_file_path", str(strategy))
    plain = (*sparse, *tiles, "--output-path", "tiles/")
    assert command(*plain).code == 0
    strategy.write_text(json.dumps({"0_0_1": [1, 1, 1]}))
    refused = command(*plain)
    assert (refused.code, "a file of its attention has changed since" in refused.said) == (2, True), refused.err


def test_another_calibration_is_another_recipe(command: Command, tiny_flags: tuple[str, ...]) -> None:
    flags = ("--num-inference-steps", "4", "--format", "npy")
    calibrate = ("calibrate", "a star", *tiny_flags, *flags[:2], "-o", "calibration.json")
    assert command(*calibrate).code == 0
    cached = (
        "generate",
        "a star",
        *tiny_flags,
        *flags,
        "--resume",
        "--step-cache",
        "magcache:file=calibration.json,force=true",
    )
    assert command(*cached).code == 0
    assert command(*cached).out == ""
    path = Path("calibration.json")
    path.write_text(path.read_text() + " ")
    refused = command(*cached)
    assert (refused.code, "its calibration has changed since" in refused.said) == (2, True), refused.err
    assert "calibration.json has changed since" in command("generate", "--from", *Path("outputs").glob("*.npy")).said


def test_half_of_a_pair_is_made_again(command: Command, tiny_flags: tuple[str, ...]) -> None:
    """A process that is killed between its two names leaves the sidecar alone."""
    arguments = ("generate", "a star", *tiny_flags, "--format", "npy")
    assert command(*arguments).code == 0
    Path("outputs/a-star-seed0.npy").unlink()
    resumed = command(*arguments, "--resume")
    assert resumed.out == "outputs/a-star-seed0.npy\n"
    assert written() == ["a-star-seed0.json", "a-star-seed0.npy"]
    assert json.loads(Path("outputs/a-star-seed0.json").read_text())["recipe"]["request"]["prompt"] == "a star"


def test_another_format_leaves_the_first_one_whole(command: Command, tiny_flags: tuple[str, ...]) -> None:
    """All formats of a name share one sidecar: it stays the first file's, and the second one's has a number."""
    arguments = ("generate", "a star", *tiny_flags)
    assert command(*arguments, "--format", "npy").code == 0
    sidecar = Path("outputs/a-star-seed0.json").read_bytes()
    resumed = command(*arguments, "--format", "gif", "--resume")
    assert (resumed.code, resumed.out) == (0, "outputs/a-star-seed0-2.gif\n"), resumed.err
    assert Path("outputs/a-star-seed0.json").read_bytes() == sidecar
    for file_format in ("gif", "npy"):
        again = command(*arguments, "--format", file_format, "--resume")
        assert (again.code, again.out) == (0, ""), again.err
    assert written() == ["a-star-seed0-2.gif", "a-star-seed0-2.json", "a-star-seed0.json", "a-star-seed0.npy"]


@pytest.mark.parametrize(("lost", "left"), [("gif", []), ("wav", ["clip.gif", "clip.json"])])
def test_what_is_left_of_a_clip_with_sound(tmp_path: Path, lost: str, left: list[str]) -> None:
    """Sound without its pictures is made again with them; pictures without their sound are somebody's choice."""
    request = GenerationRequest("a star")
    audio = Audio(numpy.zeros((1, 100), numpy.float32), 8000)
    make_media(recipe={"request": request.to_dict()}, audio=audio).save(tmp_path / "clip.gif")
    (tmp_path / f"clip.{lost}").unlink()
    outputs = Outputs.parse(str(tmp_path / f"clip.{lost}"), None)
    assert find_finished([request], outputs, {}) == [None]
    assert sorted(path.name for path in tmp_path.iterdir()) == left


def test_one_file_for_several_prompts_and_seeds(command: Command, tiny_flags: tuple[str, ...]) -> None:
    arguments = ("generate", "a star", "--prompt", "a ring", *tiny_flags, "--seed", "1-2", "-o", "x.npy")
    made = command(*arguments)
    assert made.out.split() == ["x.npy", "x-2.npy", "x-3.npy", "x-4.npy"]
    kept = {path.name: path.read_bytes() for path in Path().iterdir()}
    Path("x-3.npy").unlink()
    resumed = command(*arguments, "--resume")
    assert (resumed.code, resumed.out) == (0, "x-3.npy\n"), resumed.err
    # Names that a result would not get are nobody's business.
    Path("x-4.npy").rename("x-2024.npy")
    Path("x-2024.npy").write_bytes(b"mine")
    remade = command(*arguments, "--resume")
    assert (remade.code, remade.out) == (0, "x-4.npy\n"), remade.err
    Path("x-2024.npy").unlink()
    assert {path.name: path.read_bytes() for path in Path().glob("*.npy")} == {
        name: content for name, content in kept.items() if name.endswith(".npy")
    }


def test_a_file_is_repeated_where_it_is_missing(command: Command, tiny_flags: tuple[str, ...]) -> None:
    assert command("generate", "a star", *tiny_flags, "--format", "npy").code == 0
    source = "outputs/a-star-seed0.npy"
    repeat = ("generate", "--from", source, "--format", "npy", "--device", "cpu", "--resume")
    repeated = command(*repeat)
    assert (repeated.code, repeated.out) == (0, ""), repeated.err
    further = command(*repeat, "--seed", "0,5")
    assert (further.code, further.out) == (0, "outputs/a-star-seed5.npy\n"), further.err
