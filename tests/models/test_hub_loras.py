"""LoRA files of the hub: by repository, file and revision; the cache, a dry run, offline; what recipes say of them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cli_support import tiny_arguments
from safetensors.torch import save_file

from diffusion_runtime import GenerationRequest, RuntimeConfig, load_pipeline
from diffusion_runtime.cli.app import run
from diffusion_runtime.cli.lora_flags import parse_lora
from diffusion_runtime.config import LoraConfig
from diffusion_runtime.errors import ConfigError, ModelLoadError
from diffusion_runtime.models.lora_sources import located, recorded_loras


def write_lora(path: Path, value: float = 0.5) -> Path:
    key = "diffusion_model.blocks.0.self_attn.q"
    path.parent.mkdir(parents=True, exist_ok=True)
    down, up = torch.full((4, 64), value), torch.full((64, 4), value)
    save_file({f"{key}.lora_down.weight": down, f"{key}.lora_up.weight": up}, path)
    return path


def fill(hub: SimpleNamespace) -> None:
    """Write repositories of one LoRA file (of two revisions), of several, of peft's and of a pickle."""
    write_lora(hub.root / "owner/one/style.sft")
    write_lora(hub.root / "owner/one@v1/style.sft", 0.1)
    write_lora(hub.root / "owner/several/a.safetensors")
    write_lora(hub.root / "owner/several/deep/b.safetensors")
    write_lora(hub.root / "owner/peft/adapter.safetensors")
    (hub.root / "owner/peft/adapter_config.json").write_text('{"r": 4, "lora_alpha": 8}')
    (hub.root / "owner/pickle").mkdir()
    (hub.root / "owner/pickle/lora.pt").write_bytes(b"a pickle")


def test_texts_of_the_flag_and_configs() -> None:
    for text, expected in {
        "owner/one:0.8": LoraConfig("owner/one", 0.8),
        "owner/one@0.8": LoraConfig("owner/one", 0.8),
        "owner/one@v1:0.8": LoraConfig("owner/one", 0.8, revision="v1"),
        "owner/one@0.8:1": LoraConfig("owner/one", 1.0, revision="0.8"),
        "both=hf://owner/one/a b.sft@refs/pr/1:-1": LoraConfig("hf://owner/one/a b.sft", -1, "both", "refs/pr/1"),
        "./file@v1.safetensors": LoraConfig("./file@v1.safetensors"),
    }.items():
        assert LoraConfig.parse(parse_lora(text)) == expected, text
    with pytest.raises(ConfigError, match="path says 'v1' and revision 'v2'"):
        LoraConfig("owner/one@v1", revision="v2")
    with pytest.raises(ConfigError, match=r"lora\.revision: expected a branch"):
        LoraConfig("owner/one", revision="../../x")


def test_repositories_files_and_revisions(hub: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    fill(hub)
    snapshots = hub.cache / "models--owner--one" / "snapshots"
    for path, commit, asked in (("owner/one", "main", "main"), ("hf://owner/one/style.sft@v1", "v1", "v1")):
        (found,) = located([LoraConfig(path, 0.5)])
        assert found == LoraConfig(str(snapshots / hub.commit_of(commit) / "style.sft"), 0.5, revision=asked)
        assert located([found]) == (found,), "located once"
        assert recorded_loras([found])[0] == {
            **{"path": "owner/one/style.sft", "scale": 0.5, "component": "auto", "revision": asked}
        }
    hub.requests.clear()
    (found,) = located([LoraConfig("owner/one")], offline=True)
    assert found.path == str(snapshots / hub.commit_of("main") / "style.sft")
    assert hub.requests == []
    # peft's settings count for a file of any name, as in a folder.
    (found,) = located([LoraConfig("owner/peft")])
    assert {path.name for path in Path(found.path).iterdir()} == {"adapter.safetensors", "adapter_config.json"}
    assert recorded_loras([found])[0]["path"] == "owner/peft"
    for path, kind, said in (
        ("owner/several", ModelLoadError, "such as --lora owner/several/a.safetensors: a.safetensors, deep/b"),
        ("owner/several/deep/c.safetensors", ModelLoadError, "Did you mean 'deep/b.safetensors'"),
        ("owner/one/x.safetensors", ModelLoadError, "no safetensors file 'x.safetensors'"),
        ("owner/one@v2", ModelLoadError, "has no revision v2"),
        ("owner/none", ModelLoadError, "there is no owner/none here, and of the hub"),
        ("owner/pickle", ModelLoadError, "lora.pt is never loaded"),
        ("owner/pickle/lora.pt", ConfigError, "is a pickle, which is never loaded"),
        ("hf://owner", ConfigError, "expected hf://ORG/NAME"),
        ("hf://owner/one/../x.sft", ConfigError, "expected hf://ORG/NAME"),
    ):
        with pytest.raises(kind, match=said):
            located([LoraConfig(path)])
    with pytest.raises(ModelLoadError, match=r"owner/several is not in the hub's cache, and --offline is given"):
        located([LoraConfig("owner/several/a.safetensors")], offline=True)
    # What is here comes first, and is said; a misspelt file is no repository.
    write_lora(Path("owner/one/pytorch_lora_weights.safetensors"))
    with caplog.at_level(logging.INFO):
        assert located([LoraConfig("owner/one")]) == (LoraConfig("owner/one"),)
    assert "owner/one is what is here; the hub's of that name is hf://owner/one" in caplog.text
    with pytest.raises(ConfigError, match="only files of the hub have revisions"):
        located([LoraConfig("owner/one", revision="v1")])
    hub.requests.clear()
    assert located([LoraConfig("owner/stile.safetensors")]) == (LoraConfig("owner/stile.safetensors"),)
    assert hub.requests == []


def test_a_generation_and_its_recipe(
    hub: SimpleNamespace, tiny_wan_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(hub)

    def command(*arguments: str, code: int = 0) -> str:
        capsys.readouterr()
        assert run(arguments) == code, capsys.readouterr().err
        return " ".join("".join(capsys.readouterr()).split())

    flags = ("generate", "a star", *tiny_arguments(tiny_wan_folder), "--lora", "owner/one:0.5")
    said = command(*flags, "--dry-run")
    assert "owner/one/style.sft@main:0.5; a run downloads it from the hub" in said
    assert f"commit {hub.commit_of('main')}: a run downloads 0.00 MB" in said
    assert not list(hub.cache.rglob("*.sft"))
    command(*flags, "-o", "hub.npy")
    command(*flags[:-1], str(hub.root / "owner/one/style.sft@0.5"), "-o", "local.npy")
    assert Path("hub.npy").read_bytes() == Path("local.npy").read_bytes()
    recipe = json.loads(Path("hub.json").read_text())["recipe"]
    (lora,) = recipe["runtime"]["lora"]
    assert lora == {"path": "owner/one/style.sft", "scale": 0.5, "component": "auto", "revision": "main"}
    assert recipe["weights"]["lora_commits"] == [hub.commit_of("main")]
    hub.requests.clear()
    again = command("generate", "--from", "hub.npy", "--offline", "-o", "again.npy")
    assert "has changed" not in again
    assert hub.requests == []
    assert Path("hub.npy").read_bytes() == Path("again.npy").read_bytes()
    assert "hub.npy" in command(*flags, "-o", "hub.npy", "--resume")
    # The branch moved.
    snapshot = hub.cache / "models--owner--one" / "snapshots" / hub.commit_of("main") / "style.sft"
    write_lora(snapshot.resolve(), 0.2)
    assert "has changed since the file of --from was made" in command(
        *("generate", "--from", "hub.npy", "--offline", "--dry-run")
    )


def test_switched_files_come_from_the_hub_too(hub: SimpleNamespace, tiny_wan_folder: Path) -> None:
    fill(hub)
    request = GenerationRequest("a star", height=32, width=32, num_frames=1, num_inference_steps=1)
    loaded = load_pipeline(RuntimeConfig(str(tiny_wan_folder), device="cpu", lora=["owner/one@v1"]))
    switched = load_pipeline(str(tiny_wan_folder), device="cpu")
    switched.set_loras(["hf://owner/one@v1"])
    assert (loaded(request).frames == switched(request).frames).all()
    assert switched.recipe["runtime"]["lora"] == loaded.recipe["runtime"]["lora"]
    assert switched.recipe["weights"] == loaded.recipe["weights"]
