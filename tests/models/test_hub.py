"""Models of a hub: which files are downloaded, resumed, at which revision; the cache, offline; what recipes say of it.

huggingface_hub's own client asks a real server on this machine and writes a real cache.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli_support import tiny_arguments

from diffusion_runtime import RuntimeConfig, load_pipeline
from diffusion_runtime.cli.app import run
from diffusion_runtime.core.memory_size import size_text
from diffusion_runtime.errors import ConfigError, ModelLoadError
from diffusion_runtime.loading import inspect_pipeline, prepare
from diffusion_runtime.models.hub import cached_models, needed_files
from diffusion_runtime.models.model_sources import resolve_model_folder
from diffusion_runtime.weights.lora.reading import lora_file


def test_download_list_and_a_generation_without_the_network(
    hub: SimpleNamespace, tiny_wan_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(*arguments: str, code: int = 0) -> tuple[str, str]:
        capsys.readouterr()
        assert run(arguments) == code, capsys.readouterr().err
        return tuple(capsys.readouterr())  # type: ignore[return-value]

    expected = {path.relative_to(tiny_wan_folder).as_posix() for path in tiny_wan_folder.rglob("*") if path.is_file()}
    answer = json.loads(command("models", "download", "owner/tiny@v1", "--dry-run", "--json")[0])
    assert {file["name"] for file in answer["files"]} == expected, "no pickle, no second copy, no other variant"
    assert (answer["commit"], answer["folder"]) == (hub.commit_of("v1"), None)
    assert not list(hub.cache.rglob("*.safetensors"))

    # It ends in the middle: the files that are whole are not asked for again.
    last = max(expected, key=lambda name: (tiny_wan_folder / name).stat().st_size)
    hub.refused.add(last)
    _, err = command("models", "download", "owner/tiny@v1", code=1)
    assert f"owner/tiny@{hub.commit_of('v1')} is neither a folder here nor whole in the hub's cache" in " ".join(
        err.split()
    )
    hub.refused.clear()
    hub.requests.clear()
    out, err = command("models", "download", "owner/tiny", "--revision", "v1")
    asked = {path.rpartition(hub.commit_of("v1") + "/")[2] for kind, path in hub.requests if "/resolve/" in path}
    assert asked == {last}
    folder = Path(out.strip())
    assert folder == hub.cache / "models--owner--tiny" / "snapshots" / hub.commit_of("v1")
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} == expected
    assert (folder / last).read_bytes() == (tiny_wan_folder / last).read_bytes()
    size = sum((tiny_wan_folder / name).stat().st_size for name in expected)
    rest = f"{(tiny_wan_folder / last).stat().st_size / 1e6:.2f} MB"
    assert f"to download: 1 of {len(expected)} files, {rest} of {size_text(size)}; 3 files of the repository" in err
    assert f"1/1 files, {rest} of {rest}: {last}" in err
    _, err = command("models", "download", "owner/tiny@v1", "--log-format", "json")
    assert (
        f"to download: 0 of {len(expected)} files, 0.00 MB"
        in [json.loads(line) for line in err.splitlines()][-1]["message"]
    )

    listing = json.loads(command("models", "list", "--cached", "--json")[0])
    (row,) = listing["models"]
    assert (row["model_path"], row["refs"], row["runs"], row["lacks"]) == ("owner/tiny", ["v1"], "native", None)
    assert row["num_bytes"] == size
    hub.requests.clear()
    sizes = tiny_arguments(Path("unused"))[2:]
    out, _ = command("generate", "a star", "--model-path", "owner/tiny@v1", *sizes, "--offline", "-o", "star.npy")
    assert hub.requests == []
    recipe = json.loads(Path("star.json").read_text())["recipe"]
    assert recipe["model"]["commit"] == hub.commit_of("v1")
    assert (recipe["runtime"]["model_path"], recipe["runtime"]["revision"]) == ("owner/tiny", "v1")

    # The branch moves: the recipe says so, and with the commit it repeats.
    (hub.cache / "models--owner--tiny" / "refs" / "v1").write_text("f" * 40)
    shutil.copytree(folder, folder.with_name("f" * 40), symlinks=True)
    _, err = command("generate", "--from", "star.npy", "--offline", "--dry-run")
    assert f"owner/tiny is at commit {'f' * 40}" in " ".join(err.split())
    assert f"`--revision {hub.commit_of('v1')}` repeats it" in " ".join(err.split())
    _, err = command("generate", "--from", "star.npy", "--offline", "--dry-run", "--revision", hub.commit_of("v1"))
    assert "at commit" not in err
    (folder / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    shown = " ".join(command("models", "list", "--cached")[0].split())
    assert "native, incomplete: transformer: expected" in shown
    # No branch that is called main.
    way = f"`diffusion-runtime models download owner/tiny --revision {hub.commit_of('v1')}` downloads the rest"
    assert way in shown
    for flags in ((), ("--dry-run",)):
        path = f"owner/tiny@{hub.commit_of('v1')}"
        _, err = command("generate", "x", "--model-path", path, *sizes, "--offline", *flags, code=1)
        assert way in " ".join(err.split())
    _, err = command("generate", "x", "--model-path", "owner/tiny", "--offline", code=1)
    assert "--offline is given: leave it out, or `diffusion-runtime models download owner/tiny`" in " ".join(
        err.split()
    )


def test_a_dry_run_misses_the_weight_files_that_a_load_would(
    tiny_wan_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And reads none of those that are there."""
    folder = tmp_path / "incomplete"
    shutil.copytree(tiny_wan_folder, folder)
    for path in folder.rglob("*.safetensors"):
        path.write_bytes(b"")
    flags = ("generate", "x", "--dry-run", *tiny_arguments(folder))
    assert run(flags) == 0, capsys.readouterr().err
    for name in ("vae/diffusion_pytorch_model", "text_encoder/model", "transformer/diffusion_pytorch_model"):
        path = folder / f"{name}.safetensors"
        path.unlink()
        for backend in ("native", "diffusers"):
            assert run((*flags, "--backend", backend)) == 1
            said = " ".join(capsys.readouterr().err.split())
            assert f"error: {path.parent}: expected {path.name}, or" in said
            assert "copy or download the whole model folder" in said
        path.touch()
    shutil.rmtree(folder / "vae")
    assert run(flags) == 1


def test_a_cache_without_refs_is_taken_or_its_snapshots_are_named(
    hub: SimpleNamespace, tmp_path: Path, tiny_wan_folder: Path
) -> None:
    """As a copy of a cache may be: by hub id, and by its own folder."""
    folder = tmp_path / "cache" / "models--owner--tiny"
    one, two = "a" * 40, "b" * 40
    shutil.copytree(tiny_wan_folder, folder / "snapshots" / one)
    assert resolve_model_folder("owner/tiny", offline=True) == folder / "snapshots" / one
    assert resolve_model_folder(str(folder)) == folder / "snapshots" / one
    shutil.copytree(tiny_wan_folder, folder / "snapshots" / two)
    with pytest.raises(ModelLoadError, match="without refs/main; give ") as failure:
        resolve_model_folder(str(folder))
    named = str(failure.value).partition("; give ")[2].split(" or ")
    assert {resolve_model_folder(path) for path in named} == {folder / "snapshots" / each for each in (one, two)}
    with pytest.raises(ModelLoadError, match="a snapshot of it is there: write --model-path owner/tiny@") as failure:
        resolve_model_folder("owner/tiny", offline=True)
    path = re.findall(r"--model-path (\S+)", str(failure.value))[0]
    assert resolve_model_folder(path, offline=True).parent == folder / "snapshots"
    assert resolve_model_folder(str(folder), revision=two) == folder / "snapshots" / two
    assert resolve_model_folder(str(folder / "snapshots"), revision=two) == folder / "snapshots" / two
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(two)
    assert resolve_model_folder(str(folder)) == folder / "snapshots" / two


def test_parts_in_the_cache_are_found_by_its_folder(tmp_path: Path, tiny_wan_folder: Path) -> None:
    """Repositories of one component, and of a LoRA."""
    cache = {name: tmp_path / f"models--owner--{name}" / "snapshots" / ("a" * 40) for name in ("vae", "lora", "whole")}
    shutil.copytree(tiny_wan_folder / "vae", cache["vae"])
    shutil.copytree(tiny_wan_folder, cache["whole"])
    cache["lora"].mkdir(parents=True)
    (cache["lora"] / "pytorch_lora_weights.safetensors").touch()
    assert lora_file(str(cache["lora"].parent.parent), "lora.path").parent == cache["lora"]
    config = RuntimeConfig(str(tiny_wan_folder), device="cpu", vae_path=str(cache["vae"].parent.parent))
    assert inspect_pipeline(config).model_folder.parts.keys() == {"vae"}
    config = RuntimeConfig(str(tiny_wan_folder), device="cpu", transformer_path=str(cache["whole"].parent.parent))
    with pytest.raises(ModelLoadError, match=f"is the folder of a whole model: give {cache['whole'] / 'transformer'}"):
        inspect_pipeline(config)


def test_a_revision_that_cannot_be(hub: SimpleNamespace, tiny_wan_folder: Path) -> None:
    with pytest.raises(ModelLoadError, match="owner/tiny has no revision v2 on the hub"):
        resolve_model_folder("owner/tiny@v2")
    for path in ("shapes@v1", f"{tiny_wan_folder}"):
        with pytest.raises(ModelLoadError, match="is a folder here, and only models of the hub have revisions"):
            resolve_model_folder(path, revision="v1")
    with pytest.raises(ConfigError, match="model_path says 'v1' and revision 'v2'"):
        RuntimeConfig("owner/tiny@v1", revision="v2")
    for revision in ("../x", "a b", "", "-v", "a//b", 1):
        with pytest.raises(ConfigError, match="revision: expected a branch, a tag or a commit"):
            RuntimeConfig("owner/tiny", revision=revision)  # type: ignore[arg-type]
    # A folder that is here is meant, whatever its name.
    shutil.copytree(tiny_wan_folder, "mine@home")
    assert RuntimeConfig("mine@home").model_path == "mine@home"
    assert RuntimeConfig("wan2.1-1.3b@refs/pr/3").revision == "refs/pr/3"


def test_a_load_downloads_what_is_not_given(hub: SimpleNamespace, tiny_wan_folder: Path) -> None:
    """Of a variant too, whose files are sought before anything is opened."""
    name = "diffusion_pytorch_model.safetensors"
    transformer, vae = tiny_wan_folder / "transformer" / name, hub.root / "owner" / "tiny" / "vae" / name
    shutil.copy(vae, vae.with_suffix(".fp16.safetensors"))
    for variant in (None, "fp16"):
        load_pipeline("owner/tiny", device="cpu", transformer_path=str(transformer), variant=variant)
        assert any("vae/" in name for name in map(str, hub.requests))
        assert not any("transformer/diffusion_pytorch_model" in name for name in map(str, hub.requests)), variant


def test_what_a_family_does_not_read_stays_on_the_hub(
    hub: SimpleNamespace, tiny_folder_of: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """A second transformer beside the one that runs, and all of it again in another layout: twice 66 GB and more."""
    repository = hub.root / "owner" / "h3"
    shutil.copytree(tiny_folder_of("minimax_h3"), repository)
    shutil.copytree(repository / "transformer", repository / "FL2VA" / "transformer")
    shutil.copytree(repository, hub.root / "owner" / "h3-too")
    assert run(["models", "download", "owner/h3", "--dry-run", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    weights = {file["name"].split("/")[0] for file in answer["files"] if file["name"].endswith(".safetensors")}
    assert weights == {"transformer", "text_encoder", "vae", "audio_vae"}
    load_pipeline("owner/h3", device="cpu")
    (cached,) = cached_models()[0]
    read = {path.relative_to(cached.folder).parts[0] for path in cached.folder.rglob("*.safetensors")}
    assert (read, cached.lacks) == (weights, None)
    prepare(RuntimeConfig("owner/h3", device="cpu", offline=True)).check_files()
    # The other transformer in place of the first.
    load_pipeline("owner/h3-too", device="cpu", workflow="ref2va")
    place = next(each.folder for each in cached_models()[0] if each.hub_id == "owner/h3-too")
    read = {path.relative_to(place).parts[0] for path in place.rglob("*.safetensors")}
    assert read == weights - {"transformer"} | {"transformer_ref"}
    prepare(RuntimeConfig("owner/h3-too", device="cpu", offline=True, workflow="ref2va")).check_files()
    with pytest.raises(ModelLoadError, match="transformer"):
        prepare(RuntimeConfig("owner/h3-too", device="cpu", offline=True)).check_files()


def test_one_variant_of_each_component_is_read() -> None:
    names = [
        *("a/model.safetensors", "a/model.fp16.safetensors", "b/model.fp16-00001-of-00002.safetensors"),
        *("b/model.bf16-00001-of-00002.safetensors", "b/model.safetensors.index.bf16.json", "c/other.safetensors"),
        *("text_encoder/model.safetensors", "text_encoder/diffusion_pytorch_model.safetensors", "top.safetensors"),
        *("model_index.json", "README.md", "a/model.bin", "a/model.gguf", "x/y/deep.json"),
    ]
    text = ["text_encoder/model.safetensors", "model_index.json"]
    index = "b/model.safetensors.index.bf16.json"
    b = "b/model.bf16-00001-of-00002.safetensors"
    assert sorted(needed_files(names)) == sorted(
        ["a/model.safetensors", b, index, "c/other.safetensors", *text, "x/y/deep.json"]
    )
    assert {"a/model.fp16.safetensors", "b/model.fp16-00001-of-00002.safetensors"} <= set(
        needed_files(names, variant="fp16")
    )
    assert "a/model.safetensors" not in needed_files(names, variant="fp16")
    assert sorted(needed_files(names, weights=False)) == sorted(["model_index.json", index, "x/y/deep.json"])
    assert "b/model.safetensors.index.bf16.json" in needed_files(names, elsewhere=["b"])
    assert b not in needed_files(names, elsewhere=["b"])


def test_a_file_takes_the_other_parts_from_the_hub_where_it_may(hub: SimpleNamespace, tmp_path: Path) -> None:
    file = tmp_path / "models" / "unet" / "any.safetensors"
    file.parent.mkdir(parents=True)
    shutil.copy(hub.root / "owner" / "tiny" / "transformer" / "diffusion_pytorch_model.safetensors", file)
    options: dict[str, Any] = {"device": "cpu", "like": "owner/tiny"}
    with pytest.raises(ModelLoadError, match=r"^like: owner/tiny: .*--download"):
        load_pipeline(str(file), **options)
    with pytest.raises(ConfigError, match=r"^download: offline"):
        load_pipeline(str(file), **options, download=True, offline=True)
    assert hub.requests == []
    recipe = load_pipeline(str(file), **options, download=True).recipe
    assert (recipe["runtime"]["model_path"], recipe["runtime"]["transformer_path"]) == ("owner/tiny", str(file))
    here = {path.parent.name for path in hub.cache.rglob("snapshots/**/*.safetensors")}
    assert {"vae", "text_encoder"} <= here
    assert "transformer" not in here
    hub.requests.clear()
    assert load_pipeline(str(file), **options).recipe["runtime"]["vae_path"] is None
    assert hub.requests == []
