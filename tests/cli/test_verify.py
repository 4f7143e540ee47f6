"""`verify`: a file that its recipe makes, one that it does not make, and recipes of strangers, of which nothing is
opened and no host is asked."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import pytest
from cli_support import Command
from PIL import Image
from sample_media import make_media
from tables import table

from diffusion_runtime.comparison import untrusted_recipe
from diffusion_runtime.comparison.untrusted_recipe import GivenFiles, config_of, request_of
from diffusion_runtime.comparison.verification import (
    CLOSE,
    DIFFERENT,
    IDENTICAL,
    Difference,
    _compare_sound,
    _Likeness,
    _verdict,
)
from diffusion_runtime.config import RuntimeConfig, runtime_options
from diffusion_runtime.errors import ConfigError, DiffusionRuntimeError
from diffusion_runtime.media.audio import Audio
from diffusion_runtime.media.sidecar import RECIPE_SCHEMA
from diffusion_runtime.models.weight_fingerprint import fingerprint
from diffusion_runtime.request.generation_request import INPUT_FIELDS, GenerationRequest


def test_a_file_is_reproduced_to_the_bit_or_not(command: Command, tiny_flags: tuple[str, ...]) -> None:
    model = ("--model-path", tiny_flags[1])
    for name in ("a.mp4", "a.npy"):
        assert command("generate", "a ring", *tiny_flags, "-o", name).code == 0
        Path("a.json").rename(Path(name).with_suffix(".kept"))
    Path("a.kept").rename("a.json")
    # A folder of this machine, which a recipe of a stranger might name, is the user's to name.
    refused = command("verify", "a.mp4")
    assert refused.code == 2
    assert "--model-path" in refused.said
    for name in ("a.mp4", "a.npy"):
        found = command("verify", name, *model, "--json")
        assert (found.code, found.json["verdict"], found.json["differences"]) == (0, IDENTICAL, [])
    frames = numpy.load("a.npy")
    frames[0, 0, 0, 0] ^= 1
    numpy.save("a.npy", frames)
    found = command("verify", "a.npy", *model)
    assert found.code == 7
    assert "NOT REPRODUCED" in found.out
    numpy.save("a.npy", frames[:3])
    found = command("verify", "a.npy", *model)
    assert found.code == 1
    assert "of another file" in found.said


def test_verdict_allows_rounding_elsewhere_and_no_other_model() -> None:
    rounded, equal = _Likeness(False, 45.0), _Likeness(True, 100.0)
    versions, weights = (Difference("torch", "1", "2"),), (Difference("weights", "a", "b", of_model=True),)
    cases = [
        ((equal, None, weights, 30.0), IDENTICAL),
        ((rounded, None, versions, 30.0), CLOSE),
        ((rounded, None, versions, 50.0), DIFFERENT),
        ((rounded, None, (), 30.0), DIFFERENT),
        ((rounded, None, (*versions, *weights), 30.0), DIFFERENT),
        ((equal, _Likeness(False, None, "no sound"), versions, 30.0), DIFFERENT),
    ]
    for arguments, expected in cases:
        assert _verdict(*arguments)[0] == expected, arguments


@table("file_format", ["wav", "mp4"])
def test_sound_is_compared_too(file_format: str, tmp_path: Path) -> None:
    wave = numpy.sin(numpy.arange(8000, dtype=numpy.float32) / 20)[None] / 2
    changed = wave.copy()
    changed[0, 4000:] *= 0.9
    paths = []
    for name, samples in (("one", wave), ("same", wave), ("other", changed)):
        media = make_media(5, audio=Audio(samples, 8000))
        paths.append(media.save(tmp_path / f"{name}.{file_format}"))
    sound = Audio(wave, 8000)
    same, other = (_compare_sound(path, paths[0], sound) for path in paths[1:])
    assert same == _Likeness(True, 100.0)
    assert other is not None
    assert other.psnr_db is not None
    assert 30 < other.psnr_db < 50
    assert not other.is_equal
    mute = _compare_sound(make_media(5).save(tmp_path / "mute.mp4"), paths[0], sound)
    assert mute is not None
    assert mute.reason == "the recipe makes sound, and the file has none"
    assert _compare_sound(tmp_path / "a.gif", paths[0], sound) is None


def test_every_option_that_changes_the_output_is_decided() -> None:
    """An option that is added is taken from a recipe of a stranger by decision alone."""
    decided = {
        name for group in ("TAKEN", "MODELS", "FILES", "OWN", "REFUSED") for name in getattr(untrusted_recipe, group)
    }
    assert decided == {name for name, option in runtime_options().items() if option.changes_output}


# Of a recipe: sections with a path in one place each, which name the secret file.
HOSTILE: dict[str, Callable[[str], dict[str, Any]]] = {
    **{name: lambda path, name=name: {"runtime": {name: path}} for name in untrusted_recipe.FILES},
    "model": lambda path: {"runtime": {"model_path": path}},
    "keywords of a pipeline": lambda path: {"runtime": {"pipeline_arguments": {"image": path}}},
    "model, relative": lambda path: {"runtime": {"model_path": "folder/secret.yaml"}},
    "like": lambda path: {"runtime": {"like": path}},
    "lora": lambda path: {"runtime": {"lora": [{"path": path}]}},
    "lora of the hub": lambda path: {"runtime": {"lora": [{"path": "org/name/file.safetensors"}]}},
    "vae_decoder": lambda path: {"runtime": {"vae_decoder": path}},
    "attention, a file": lambda path: {"runtime": {"attention": path}},
    "attention of diffusers": lambda path: {"runtime": {"attention_override": "flash_hub"}},
    "attention, an option": lambda path: {
        "runtime": {
            "attention": {"default.extra.mask_strategy_file_path": path, "default.backend": "sliding_tile_attn"}
        }
    },
    "step_cache": lambda path: {"request": {"prompt": "x", "step_cache": f'magcache:file="{path}"'}},
    **{
        name: lambda path, name=name: {
            "request": {"prompt": "x", name: [[0, path, 1.0]] if name == "frame_conditions" else [path]}
        }
        for name in INPUT_FIELDS
    },
    "an address": lambda path: {"request": {"prompt": "x", "image_path": "https://127.0.0.1/secret.png"}},
    "an unknown option": lambda path: {"runtime": {"plugin": path}},
    "no mapping": lambda path: {"runtime": [path], "request": path, "weights": path, "inputs": path},
    "of lists": lambda path: {"runtime": {"model_path": [path], "lora": [[path]], "vae_decoder": [path]}},
}


@contextmanager
def watched() -> Iterator[list[str]]:
    """Yield the list of files that are opened and hosts that are asked meanwhile."""
    events: list[str] = []
    is_on = True

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if is_on and event in ("open", "os.listdir", "socket.connect", "socket.getaddrinfo", "subprocess.Popen"):
            events.append(f"{event} {arguments}")

    sys.addaudithook(hook)
    try:
        yield events
    finally:
        is_on = False


def _is_refused(recipe: dict[str, Any]) -> bool:
    try:
        config_of(recipe, GivenFiles(()), None, "cpu")
        request_of(recipe, GivenFiles(()))
    except DiffusionRuntimeError:
        return True
    return False


def test_hostile_recipes_open_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (secret := tmp_path / "folder" / "secret.yaml").parent.mkdir()
    secret.write_text("default: torch_sdpa")
    with watched() as events:
        for name, make in HOSTILE.items():
            assert _is_refused({"request": {"prompt": "x"}, **make(str(secret))}), name
    assert [each for each in events if "secret" in each or "socket" in each or "Popen" in each] == []


def test_given_files_take_the_place_of_those_named(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(image := tmp_path / "image.png")
    (weights := tmp_path / "any.safetensors").write_bytes(b"weights")
    given = GivenFiles([str(image), str(weights)])
    digest = hashlib.sha256(image.read_bytes()).hexdigest()
    recipe = {
        "runtime": {
            "lora": [{"path": "/theirs/a.safetensors", "scale": 0.5}, {"path": "emoji-fast"}],
            "device": "mps",
        },
        "weights": {"lora": [fingerprint(weights), None]},
        "request": {"prompt": "x", "image_path": "/theirs/a.png", "frame_conditions": [[4, "/theirs/b.png", 0.5]]},
        "inputs": {"image_path": digest, "frame_conditions": [digest]},
        "model": {"dtype": "bfloat16"},
    }
    config = config_of(recipe, given, None, "cpu")
    assert [(each.path, each.scale) for each in config.lora] == [(str(weights), 0.5), ("emoji-fast", 1.0)]
    expected = RuntimeConfig(dtype="bfloat16", device="cpu", offline=True, lora=config.lora)
    assert dataclasses.asdict(config) == dataclasses.asdict(expected)
    request = request_of(recipe, given)
    assert request == GenerationRequest("x", image_path=str(image), frame_conditions=((4, str(image), 0.5),))
    image.write_bytes(b"another")
    with pytest.raises(ConfigError, match="give that file with --input"):
        request_of(recipe, GivenFiles([str(image)]))


@table("recipe", [{}, {"request": {"prompt": "x"}, "runtime": {"model_path": "wan2.1-1.3b"}}])
def test_command_refuses_what_cannot_be_made(recipe: dict[str, Any], tmp_path: Path, command: Command) -> None:
    numpy.save(tmp_path / "a.npy", numpy.zeros((1, 32, 32, 3), numpy.uint8))
    recipe = {"schema": RECIPE_SCHEMA, **recipe}
    sidecar = {"schema": "diffusion_runtime.sidecar/1", "file": {"format": "npy"}, "recipe": recipe}
    (tmp_path / "a.json").write_text(json.dumps(sidecar))
    found = command("verify", str(tmp_path / "a.npy"))
    assert found.code in (1, 2)
    assert "error:" in found.err
