"""A model from single files: which one a transformer is of, the parts that are found around it, and what is said of
parts that are not."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from comfy_files import mark_of
from original_names import (
    AUTOENCODERS,
    as_authors,
    as_ldm,
    encoder_as_comfyui,
    flux1_as_authors,
    minimax_h3_as_authors,
)
from PIL import Image
from published_files import write_transformer_file
from safetensors.torch import load_file, save_file
from tables import table
from tiny_families import WRITERS, small_request
from tiny_ltx2 import write_tiny_ltx2
from tiny_minimax_h3 import write_tiny_minimax_h3
from tiny_models import write_tiny_wan

from diffusion_runtime import RuntimeConfig, load_pipeline
from diffusion_runtime.core.model_folder import ModelFolder
from diffusion_runtime.errors import ConfigError, DiffusionRuntimeError, ModelLoadError
from diffusion_runtime.models import recognised_files
from diffusion_runtime.models.found_files import VARIABLE, with_found_files
from diffusion_runtime.models.recognised_files import Recognised, recognise_transformer
from diffusion_runtime.models.registry import family_for_folder, family_of_class, supported_transformer_classes

Tensors = Mapping[str, torch.Tensor]
FOLDERS = {
    "transformer": "diffusion_models",
    "transformer_2": "diffusion_models",
    "vae": "vae",
    "audio_vae": "vae/sound",
    "vocoder": "vae",
    "connectors": "checkpoints",
    "text_encoder": "text_encoders",
    "text_encoder_2": "clip",
    "image_encoder": "clip_vision",
}


def tensors_of(folder: Path, component: str) -> dict[str, torch.Tensor]:
    return {name: each for file in (folder / component).glob("*.safetensors") for name, each in load_file(file).items()}


def write(path: Path, tensors: Tensors, prefix: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({f"{prefix}{name}": each.clone().contiguous() for name, each in tensors.items()}, path)
    return path


def settings_of(folder: Path, place: Path) -> Path:
    """A copy without weights."""
    return shutil.copytree(folder, place, ignore=shutil.ignore_patterns("*.safetensors"))


def in_comfyui(folder: Path, root: Path, prefix: str = "model.diffusion_model.") -> Path:
    """Every component of a folder as a file of its own, named after nothing, with the names of tensors that ComfyUI's
    files have; returns the transformer's."""
    names = family_for_folder(ModelFolder(folder)).weights.lora_names
    for component in sorted(FOLDERS.keys() & {path.name for path in folder.iterdir()}):
        noise = {"transformer": "high", "transformer_2": "low"}.get(component, "")
        place, tensors = (
            root / FOLDERS[component] / f"{noise}{component[-4:]}.safetensors",
            tensors_of(folder, component),
        )
        if noise:
            tensors = as_authors(tensors, names)
        elif "encoder" in component:
            tensors = encoder_as_comfyui(tensors)
        else:
            own = json.loads((folder / component / "config.json").read_text())["_class_name"]
            tensors = AUTOENCODERS.get(own, dict)(tensors)
        write(place, tensors, prefix if noise else "")
    return root / "diffusion_models" / "highrmer.safetensors"


def connectors_as_authors(tensors: Tensors) -> dict[str, torch.Tensor]:
    """By the names of Lightricks' files, in which the transformer's prefix is in front of all but the projections."""
    made = {}
    for name, tensor in tensors.items():
        name = re.sub(r"^(video_|audio_|)text_proj_in", r"text_embedding_projection.\1aggregate_embed", name)
        name = re.sub(r"^(video|audio)_connector", r"model.diffusion_model.\1_embeddings_connector", name)
        name = name.replace("transformer_blocks", "transformer_1d_blocks")
        made[name.replace("norm_q", "q_norm").replace("norm_k", "k_norm")] = tensor
    return made


def all_of_flux1(folder: Path, root: Path) -> Path:
    parts = {
        "model.diffusion_model.": flux1_as_authors(tensors_of(folder, "transformer")),
        "text_encoders.clip_l.transformer.": tensors_of(folder, "text_encoder"),
        "text_encoders.t5xxl.transformer.": tensors_of(folder, "text_encoder_2"),
        "vae.": as_ldm(tensors_of(folder, "vae")),
        "": {"something.else": torch.zeros(3)},
    }
    whole = {f"{prefix}{name}": each for prefix, part in parts.items() for name, each in part.items()}
    return write(root / "checkpoints" / "all.safetensors", whole)


def most_of_ltx2(folder: Path, root: Path) -> Path:
    """All but the text encoder, which is elsewhere."""
    whole = {f"model.diffusion_model.{name}": each for name, each in tensors_of(folder, "transformer").items()}
    whole |= connectors_as_authors(tensors_of(folder, "connectors"))
    for component in ("vae", "audio_vae", "vocoder"):
        whole |= {f"{component}.{name}": each for name, each in tensors_of(folder, component).items()}
    write(root / "text_encoders" / "deeper" / "any.sft", tensors_of(folder, "text_encoder"))
    return write(root / "checkpoints" / "most.safetensors", whole)


def files_of_ltx25(folder: Path, root: Path) -> Path:
    """The connectors in two files: most of them with the transformer, their projections with the text encoder."""
    connectors = connectors_as_authors(tensors_of(folder, "connectors"))
    projections = {name: each for name, each in connectors.items() if name.startswith("text_embedding_projection.")}
    text = {re.sub(r"^model\.language_model\.", "model.", name): each for name, each in gemma_of(folder).items()}
    write(root / "text_encoders" / "with-proj.safetensors", text | projections)
    for component in ("vae", "audio_vae", "vocoder"):
        write(root / "vae" / f"{component}.safetensors", tensors_of(folder, component))
    blocks = {name: each for name, each in connectors.items() if name not in projections}
    transformer = {f"model.diffusion_model.{name}": each for name, each in tensors_of(folder, "transformer").items()}
    return write(root / "diffusion_models" / "whole.safetensors", transformer | blocks)


def gemma_of(folder: Path) -> dict[str, torch.Tensor]:
    """The language model alone."""
    return {name: each for name, each in tensors_of(folder, "text_encoder").items() if "language_model" in name}


def is_linear(name: str) -> bool:
    return re.fullmatch(r"decoder\.transformer_blocks\.\d+\.(attn|ff)\..*\.weight", name) is not None


def minimax_h3_in_64ths(folder: Path) -> Path:
    """The linear layers of its video autoencoder have weights that 8 bits hold exactly."""
    tensors = tensors_of(write_tiny_minimax_h3(folder), "vae")
    tensors |= {name: (each * 64).round().clamp(-127, 127) / 64 for name, each in tensors.items() if is_linear(name)}
    write(folder / "vae" / "diffusion_pytorch_model.safetensors", tensors)
    return folder


def files_of_minimax_h3(folder: Path, root: Path) -> Path:
    """The transformer by its authors' names, the video autoencoder in int8, and of the text encoder the 50 layers that
    are read, without a norm behind them."""
    last = re.compile(r"(lm_head|.*layers\.50\.|model\.language_model\.norm\.)")
    text = {name: each for name, each in tensors_of(folder, "text_encoder").items() if not last.match(name)}
    names = {name: re.sub(r"^model\.(language_model\.)?(?=visual)?", "model.", name) for name in text}
    names = {name: each.replace("model.visual.", "visual.") for name, each in names.items()}
    write(root / "text_encoders" / "any.safetensors", {names[name]: each for name, each in text.items()})
    write(root / "vae" / "audio.safetensors", tensors_of(folder, "audio_vae"))
    video = tensors_of(folder, "vae")
    for name in filter(is_linear, list(video)):
        video[name] = (video[name] * 64).to(torch.int8)
        video[f"{name}_scale"] = torch.tensor(1 / 64)
        video[name.replace(".weight", ".comfy_quant")] = mark_of({"format": "int8_tensorwise"})
    write(root / "vae" / "video.safetensors", video)
    transformer = minimax_h3_as_authors(tensors_of(folder, "transformer"))
    return write(root / "diffusion_models" / "any.safetensors", transformer)


# Of Anima: models/anima/test_files.py.
# SeedVR2's text is in the package, of the published width.
OTHERS = ("flux1", "flux2", "ltx2", "minimax_h3", "anima", "seedvr2")
# The folder, as a family or its writer; its files; what a request needs.
Layout = Callable[[Path, Path], Path]
CASES: dict[str, tuple[str | Callable[[Path], Path], Layout, dict[str, Any]]] = {
    **{family: (family, in_comfyui, {}) for family in WRITERS if family not in OTHERS},
    "minimax_h3 by its authors' names": (minimax_h3_in_64ths, files_of_minimax_h3, {}),
    "flux1 in one file": ("flux1", all_of_flux1, {}),
    "flux2": ("flux2", partial(in_comfyui, prefix="net."), {}),
    "ltx2 in two files": ("ltx2", most_of_ltx2, {}),
    "ltx2.5": (partial(write_tiny_ltx2, is_ltx25=True), files_of_ltx25, {"stg_scale": 0.0}),
    "two experts": (partial(write_tiny_wan, boundary_ratio=0.875), partial(in_comfyui, prefix=""), {}),
    "an image encoder": (partial(write_tiny_wan, condition="clip and tokens"), in_comfyui, {"image_path": "image.png"}),
}


def frames_of(path: Path, request: dict[str, Any], **options: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """In bfloat16, which every weight is copied for: float32 stays where its file has it, and products of matrices at
    other addresses round otherwise."""
    pipeline = load_pipeline(str(path), device="cpu", dtype="bfloat16", **options)
    media = pipeline(dataclasses.replace(small_request(pipeline), **request))
    return torch.as_tensor(media.frames), media.recipe


def weights_of(path: Path, **options: Any) -> dict[str, torch.Tensor]:
    """Everything that a pipeline in float32 holds, by where it is."""
    return dict(tensors_in(load_pipeline(str(path), device="cpu", dtype="float32", **options).parts, "", set()))


def tensors_in(owner: object, place: str, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    if id(owner) in seen:
        return
    seen.add(id(owner))
    if isinstance(owner, torch.nn.Module):
        yield from ((f"{place}:{name}", each) for name, each in owner.state_dict().items())
        return
    for name, each in getattr(owner, "__dict__", {}).items():
        if isinstance(each, torch.nn.Module) or type(each).__module__.startswith("diffusion_runtime"):
            yield from tensors_in(each, f"{place}.{name}", seen)


def test_every_family_has_a_case() -> None:
    """Anima's are in models/anima, as are SeedVR2's, whose files are its authors' own."""
    families = {family_of_class(each).name for each in supported_transformer_classes()}
    named = {name.split()[0].split(".")[0] for name in CASES}
    assert sorted(families - named) == ["anima", "seedvr2"]


# Whose text encoder is another case's: that of Wan with two experts or an image encoder, Qwen-Image, Qwen-Image 2.1.
ALSO_SLOW = ("wan", "wan_animate_2", "longcat_image", "krea2")


@table("name", [name for name in CASES if name not in ALSO_SLOW])
def test_files_in_comfyuis_folders_give_the_frames_of_the_folder(
    name: str, tiny_folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    check_frames_of_files(name, tiny_folder_of, tmp_path)


@pytest.mark.slow
@table("name", ALSO_SLOW)
def test_files_of_further_families_give_the_frames_of_the_folder(
    name: str, tiny_folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    check_frames_of_files(name, tiny_folder_of, tmp_path)


def check_frames_of_files(name: str, tiny_folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    source, layout, request = CASES[name]
    whole = tiny_folder_of(source) if isinstance(source, str) else source(tmp_path / "whole")
    if "image_path" in request:
        request = {"image_path": str(tmp_path / request["image_path"])}
        Image.new("RGB", (64, 64), "red").save(request["image_path"])
    expected, _ = frames_of(whole, request)
    file = layout(whole, tmp_path / "ComfyUI" / "models")
    folder = settings_of(whole, tmp_path / "settings")
    found, recipe = frames_of(file, request, like=str(folder))
    assert torch.equal(found, expected)
    weights, held = weights_of(whole), weights_of(file, like=str(folder))
    assert len({name.partition(":")[0] for name in weights}) >= 3
    assert held.keys() == weights.keys()
    assert [name for name, each in weights.items() if not torch.equal(held[name], each)] == []
    paths = {key: path for key, path in recipe["runtime"].items() if key.endswith("_path") and path is not None}
    assert paths.pop("model_path") == str(folder)
    assert paths.keys() == recipe["weight_bytes"].keys() == recipe["weights"].keys()
    assert all(recipe["weight_bytes"][key] == Path(path).stat().st_size for key, path in paths.items())


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_wan(tmp_path_factory.mktemp("wan") / "model")


@pytest.fixture
def file(wan: Path, tmp_path: Path) -> Path:
    return in_comfyui(wan, tmp_path / "models")


def found(file: Path, like: Path | None = None, **options: Any) -> RuntimeConfig:
    return with_found_files(RuntimeConfig(str(file), like=None if like is None else str(like), **options))


@pytest.fixture
def settings(wan: Path, tmp_path: Path) -> Path:
    return settings_of(wan, tmp_path / "settings")


def test_places_that_are_looked_at(file: Path, settings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside it, in folders that are named, in the model's own folder; what a flag names is not looked for."""
    elsewhere = tmp_path / "elsewhere" / "models" / "vae" / "deep" / "x.safetensors"
    elsewhere.parent.mkdir(parents=True)
    vae = (tmp_path / "models" / "vae" / "vae.safetensors").rename(elsewhere)
    with pytest.raises(ModelLoadError, match=r"parts of .* are missing:\n  vae") as missing:
        found(file, settings)
    assert all(text in str(missing.value) for text in ("--vae-path", "--models-dir", VARIABLE))
    assert found(file, settings, models_dir=str(tmp_path / "elsewhere")).vae_path == str(vae)
    assert found(file, settings, vae_path=str(vae)).vae_path == str(vae)
    monkeypatch.setenv(VARIABLE, os.pathsep.join([str(tmp_path), str(tmp_path / "elsewhere" / "models")]))
    config = found(file, settings)
    assert (config.vae_path, config.model_path, config.transformer_path) == (str(vae), str(settings), str(file))
    # Beside it and in the named folder, as a link: one file.
    (tmp_path / "models" / "vae" / "link.safetensors").symlink_to(vae)
    assert found(file, settings).vae_path == str(tmp_path / "models" / "vae" / "link.safetensors")
    monkeypatch.delenv(VARIABLE)
    shutil.rmtree(tmp_path / "models" / "vae")
    shutil.copytree(tmp_path / "elsewhere" / "models" / "vae" / "deep", settings / "vae", dirs_exist_ok=True)
    (settings / "vae" / "x.safetensors").rename(settings / "vae" / "diffusion_pytorch_model.safetensors")
    assert found(file, settings).vae_path is None


def two_that_fit(file: Path, settings: Path) -> None:
    shutil.copy(file.parents[1] / "vae" / "vae.safetensors", file.parents[1] / "vae" / "other.safetensors")


def no_tokenizer(file: Path, settings: Path) -> None:
    shutil.rmtree(settings / "tokenizer")


def a_text_encoder(file: Path, settings: Path) -> None:
    shutil.copy(file.parents[1] / "text_encoders" / "oder.safetensors", file)


def a_lora(file: Path, settings: Path) -> None:
    write(
        file,
        {"blocks.0.attn1.to_q.lora_A.weight": torch.ones(4, 8), "blocks.0.attn1.to_q.lora_B.weight": torch.ones(8, 4)},
    )


Change = Callable[[Path, Path], None]


@table(
    ("change", "options", "expected", "texts"),
    [
        (
            two_that_fit,
            {},
            ConfigError,
            ("2 files fit as the vae", "vae/other.safetensors", "vae/vae.safetensors", "--vae-path"),
        ),
        (no_tokenizer, {}, ModelLoadError, ("tokenizer: ", "--download", "--like FOLDER")),
        (
            None,
            {"like": None},
            ModelLoadError,
            ("it holds a transformer of Wan, of no published size", "--like FOLDER"),
        ),
        (a_text_encoder, {"like": None}, ModelLoadError, ("it holds a UMT5 text encoder", "--text-encoder-path")),
        (a_lora, {"like": None}, ModelLoadError, ("it is a LoRA", "--lora")),
        (
            None,
            {"transformer_path": "other.safetensors"},
            ConfigError,
            ("transformer_path: other.safetensors", "one of them"),
        ),
        (None, {"models_dir": "nowhere"}, ConfigError, ("models_dir: nowhere: expected a folder of models",)),
        (
            None,
            {"like": "wan2.2-t2v-a14b"},
            ModelLoadError,
            ("of low noise", "such as lowrmer.safetensors", "--transformer-2-path"),
        ),
    ],
)
def test_what_is_wrong_is_said_with_what_to_type(
    change: Change | None,
    options: dict[str, Any],
    expected: type[DiffusionRuntimeError],
    texts: tuple[str, ...],
    wan: Path,
    tmp_path: Path,
) -> None:
    file = in_comfyui(wan, tmp_path / "models")
    settings = settings_of(wan, tmp_path / "settings")
    if change is not None:
        change(file, settings)
    with pytest.raises(expected) as error:
        with_found_files(RuntimeConfig(str(file), **{"like": str(settings), **options}))
    assert [text for text in texts if text not in str(error.value)] == [], str(error.value)


def test_loras_are_found_by_name(file: Path, settings: Path, wan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loras = file.parents[1] / "loras"
    with pytest.raises(ModelLoadError, match=rf"no 'style.safetensors' here, and none in {loras}; put it into"):
        found(file, settings, lora=["style.safetensors"])
    style = write(loras / "wan" / "style.safetensors", {"x": torch.ones(1)})
    for lora in (("style.safetensors", 0.5), ("wan/style.safetensors", 0.5)):
        config = found(file, settings, lora=[lora])
        assert [(each.path, each.scale) for each in config.lora] == [(str(style), 0.5)]
    with pytest.raises(ModelLoadError, match=r"none in .*Did you mean 'style.safetensors'"):
        found(file, settings, lora=["styl.safetensors"])
    # For a model that is no file, too; the hub's files keep their names.
    config = with_found_files(RuntimeConfig(str(wan), models_dir=str(loras.parent), lora=["style.safetensors"]))
    assert (config.lora[0].path, config.models_dir) == (str(style), ())
    assert found(file, settings, lora=["org/name/style.safetensors"]).lora[0].path == "org/name/style.safetensors"
    write(loras / "style.safetensors", {"x": torch.zeros(1)})
    with pytest.raises(ConfigError, match=r"2 files are named 'style\.safetensors'"):
        found(file, settings, lora=["style.safetensors"])
    assert found(file, settings, lora=["wan/style.safetensors"]).lora[0].path == str(style)
    monkeypatch.chdir(write(settings.parent / "here" / "style.safetensors", {"x": torch.ones(1)}).parent)
    assert found(file, settings, lora=["style.safetensors"]).lora[0].path == "style.safetensors"


@table("options", [{"like": "wan2.1-1.3b"}, {"models_dir": "."}, {"download": True}])
def test_options_of_the_search_are_for_a_file(options: dict[str, Any], wan: Path) -> None:
    with pytest.raises(ConfigError, match=f"^{next(iter(options))}: for a model that is one file"):
        with_found_files(RuntimeConfig(str(wan), **options))
    # Of a name that was typed wrong, that it is not there.
    with pytest.raises(ModelLoadError, match=r"there is no file nowhere\.safetensors"):
        with_found_files(RuntimeConfig("nowhere.safetensors", **options))


def test_experts_are_told_by_their_names(wan: Path, tmp_path: Path) -> None:
    folder = write_tiny_wan(tmp_path / "model", boundary_ratio=0.875)
    high = in_comfyui(folder, tmp_path / "models")
    low, like = high.with_name("lower_2.safetensors"), settings_of(folder, tmp_path / "settings")
    assert found(high, like).transformer_2_path == str(low)
    with pytest.raises(ConfigError, match="of low noise, the second of two: give the one of high noise"):
        found(low, like)
    shutil.copy(low, low.with_name("low_again.safetensors"))
    with pytest.raises(ConfigError, match="2 files fit as the second transformer"):
        found(high, like)
    same = low.rename(low.with_name("lowrmer.safetensors"))
    assert found(high, like).transformer_2_path == str(same)


def test_folders_of_strangers(file: Path, settings: Path, tmp_path: Path) -> None:
    """FIFOs, loops, a header that lies, one of 100 MB, text and a thousand files beside those that fit."""
    vae = tmp_path / "models" / "vae"
    os.mkfifo(vae / "fifo.safetensors")
    (vae / "itself.safetensors").symlink_to(vae / "itself.safetensors")
    (vae / "loop").symlink_to(vae)
    (vae / "text.safetensors").write_text("not a safetensors file")
    (vae / "lie.safetensors").write_bytes(struct.pack("<Q", 2**60) + b"{}")
    with (vae / "large.safetensors").open("wb") as large:
        large.write(struct.pack("<Q", 99_000_000))
        large.truncate(99_000_100)
    assert found(file, settings).vae_path == str(vae / "vae.safetensors")
    (vae / "vae.safetensors").unlink()
    for index in range(1000):
        (vae / f"{index}.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    unread = "Not readable as weights: large.safetensors, lie.safetensors, text.safetensors"
    with pytest.raises(ModelLoadError, match=rf"(?s)are missing:\n  vae.*{unread}"):
        with_found_files(RuntimeConfig(str(file), like=str(settings)))


# ComfyUI's Wan-Animate 2 has the names and sizes of Wan's transformer for images.
ANIMATE_2 = '{"transformer": {"model_type": "animate2"}}'


@table(
    ("model", "name", "metadata", "expected", "told_by"),
    [
        ("ltx-video-0.9.0", "model", {}, "ltx-video-0.9.0", ""),
        ("ltx-video-0.9.0", "ltx-video-2b-v0.9.1", {}, "ltx-video-0.9.1", "name"),
        ("z-image", "z_image_turbo_bf16", {}, "z-image-turbo", "name"),
        ("z-image", "z_image_turbo_bf16", {"modelspec.title": "Z-Image"}, "z-image", "metadata"),
        ("wan2.1-1.3b", "z_image_turbo_bf16", {}, "wan2.1-1.3b", "tensors"),
        ("krea-2-raw", "krea2_turbo_fp8_scaled", {}, "krea-2-turbo", "name"),
        ("minimax-h3", "fasth3-4step-bf16", {}, "fasth3-4-step", "name"),
        ("wan2.2-animate-2-14b", "wan_2", {"config": ANIMATE_2}, "wan2.2-animate-2-14b", "metadata"),
        ("scail-2-14b", "wan2.1_14B_SCAIL_2_fp16", {}, "scail-2-14b", "tensors"),
    ],
)
def test_a_published_model_is_recognised(
    model: str,
    name: str,
    metadata: dict[str, str],
    expected: str,
    told_by: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    file = write_transformer_file(tmp_path / f"{name}.safetensors", model, metadata, by_authors="config" in metadata)
    # A choice that cannot run here is that of a run, and says nothing of a file.
    with monkeypatch.context() as patch, caplog.at_level("INFO"):
        caplog.clear()
        patch.setenv("DIFFUSION_ATTENTION_BACKEND", "aiter")
        recognised = recognise_transformer(file)
    assert recognised is not None
    assert (recognised.name, recognised.told_by) == (expected, told_by)
    assert expected not in recognised.others
    assert "attention backend" not in caplog.text


def test_a_file_that_may_be_of_a_model_without_an_entry_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LTX-2.5's dev transformer, which has the tensors of the distilled one; building that takes a while."""
    monkeypatch.setattr(recognised_files, "models_that_fit", lambda _: ["ltx-2.5"])
    named, dev = (
        write(tmp_path / f"ltx-2.5-22b-{kind}.safetensors", {"a": torch.ones(1)}) for kind in ("Distilled", "dev")
    )
    assert recognise_transformer(named) == Recognised("ltx-2.5", (), "tensors")
    assert recognise_transformer(dev) == Recognised("ltx-2.5", (), "tensors", "distilled")
    with pytest.raises(ModelLoadError, match=r"--like ltx-2\.5, or --like ltx-2\.5 --preset dev"):
        with_found_files(RuntimeConfig(str(dev)))
