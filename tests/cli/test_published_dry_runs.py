"""`generate --dry-run` of every published model: from the configs inside the package, without network and weights."""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy
import pytest
from published_configs import PUBLISHED, write_published
from tables import table

from diffusion_runtime.cli.app import run
from diffusion_runtime.core.model_folder import ModelFolder
from diffusion_runtime.models.memory_demand import StepDemand
from diffusion_runtime.models.model_sources import find_configs
from diffusion_runtime.models.published import PublishedModel, published_models
from diffusion_runtime.models.published_folders import packaged_folder
from diffusion_runtime.models.registry import family_for_folder
from diffusion_runtime.request.generation_request import REQUEST_FIELDS
from diffusion_runtime.text_encoders.encoder_size import shapes_by_config

pytestmark = pytest.mark.filterwarnings("ignore")

# SeedVR2 is run by `upscale`: tests/models/seedvr2.
MODELS = {model.name: model for model in published_models() if model.is_download and not model.files_alone}


@pytest.fixture(autouse=True)
def nothing_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No network, and nothing in the hub's cache."""
    asked: list[object] = []

    def refuse(_: socket.socket, address: object) -> None:
        asked.append(address)
        raise OSError("no network here")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    yield
    assert asked == []


def image(tmp_path: Path, model: PublishedModel) -> str:
    """A picture of the model's own size."""
    from PIL import Image

    path = tmp_path / "image.png"
    Image.new("RGB", (model.request.get("width", 64), model.request.get("height", 64)), "white").save(path)
    return str(path)


def image_flags(model: PublishedModel, tmp_path: Path) -> list[str]:
    """A picture for every field of pictures that the model takes."""
    words = []
    for field in model.images:
        place = "8:" if field == "frame_conditions" else ""
        if field == "video_path" and model.images[field]:
            numpy.save(tmp_path / "video.npy", numpy.zeros((81, 8, 8, 3), dtype=numpy.uint8))
            words += ["--video-path", str(tmp_path / "video.npy")]
            continue
        words += [REQUEST_FIELDS[field].flag or f"--{field.replace('_', '-')}", place + image(tmp_path, model)]
    return words


# Of these two activations are counted too, by a forward pass of every layer without memory: 0.5 to 2 s each.
COUNTED = ("wan2.1-1.3b", "flux.1-dev")


# One of each family and of each kind of input; that all have their names, sizes and weights is tested in
# tests/models/test_published_settings.py and tests/benchmark/test_step.py.
PLANNED = {*{(model.family, *model.images): name for name, model in MODELS.items()}.values(), *COUNTED}


@pytest.mark.parametrize(
    "names",
    [PLANNED, pytest.param(MODELS.keys() - PLANNED, marks=pytest.mark.slow)],
    ids=["one of each kind", "others"],
)
def test_published_models_are_planned_from_the_package(
    names: Collection[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in sorted(names):
        (tmp_path / name).mkdir()
        with pytest.MonkeyPatch.context() as monkeypatch:
            check_plan(name, tmp_path / name, capsys, monkeypatch)


def check_plan(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS[name]
    if name not in COUNTED:
        monkeypatch.setattr("diffusion_runtime.models.memory_demand.step_demand", lambda *_: StepDemand(1, 0))
        monkeypatch.setattr("diffusion_runtime.models.memory_demand.decoding_bytes", lambda *_, **__: 1)
    images = image_flags(model, tmp_path)
    arguments = ["generate", "x", "--model-path", name, "--device", "cpu", "--dtype", "bfloat16", *images]
    assert run([*arguments, "--dry-run", "--json", "--output-path", str(tmp_path / "out")]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["folder"], plan["download_gb"]) == (None, model.download_gb)
    request = plan["items"][0]["request"]
    assert request["height"] > 0
    assert request["width"] > 0
    assert all(row["backend"] for row in plan["attention"])
    assert {"self"} <= {row["role"] for row in plan["attention"]}
    weights, memory = plan["memory"]["weights"], plan["memory"]
    assert memory["notes"] == []
    # Encoders of images and halves of autoencoders that nothing reads are the difference to all that is published.
    transformers = sum(billions for part, billions in model.parameters if part.startswith("transformer"))
    assert sum(size for part, size in weights.items() if part.startswith("transformer")) == pytest.approx(
        2e9 * transformers, rel=0.05
    )
    assert memory["phases"]["denoise"] > sum(weights.values())


# A sample, of which one has reference images before the clip and one several streams: all models take most of a minute.
EXPLAINED = ("wan2.1-vace-1.3b", "flux.1-kontext-dev", "flux.2-klein-9b", "qwen-image-2.1", "z-image-turbo", "ltx-2")


@table("name", EXPLAINED)
def test_a_published_model_is_explained_from_the_package(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every layer of every step of the model's own size, without a weight."""
    model = MODELS[name]
    monkeypatch.setattr("diffusion_runtime.models.memory_demand.step_demand", lambda *_: StepDemand(1, 0))
    monkeypatch.setattr("diffusion_runtime.models.memory_demand.decoding_bytes", lambda *_, **__: 1)
    monkeypatch.setattr("diffusion_runtime.explanation.explanation.count_decoding", lambda *_: 1.0)
    arguments = ["explain", "x", "--model-path", name, "--device", "cpu", "--dtype", "bfloat16"]
    assert run([*arguments, *image_flags(model, tmp_path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    rows = [row for row in answer["schedule"] if row["role"] == "self"]
    assert {len(row["backends"]) for row in rows} == {answer["num_steps"] + (answer["num_first_chunk_steps"] or 0)}
    assert answer["parts"][0]["operations"] > 1e13


def test_models_says_which_images_a_model_takes() -> None:
    for model in MODELS.values():
        folder = packaged_folder(model.model_path)
        assert folder is not None, f"{model.name}: the json of its folder belongs into published_folders.yaml"
        if model.workflow is not None:
            # Its transformer is another one of the folder: tests/models/minimax_h3.
            continue
        opened = ModelFolder(folder)
        images = family_for_folder(opened).describe(opened).inputs.images
        assert dict(images) == dict(model.images), f"{model.name}: `published: images:` in published.yaml"


def test_encoders_have_the_sizes_that_are_published() -> None:
    sizes: dict[str, int] = {}
    for model in MODELS.values():
        folder = packaged_folder(model.model_path)
        assert folder is not None
        index = PUBLISHED[model.model_path.rpartition("/")[2]]["model_index.json"]
        for component, billions in model.parameters:
            library, class_name = index[component]
            if library == "transformers":
                key = json.dumps([class_name, json.loads((folder / component / "config.json").read_text())])
                if key not in sizes:
                    sizes[key] = sum(map(math.prod, shapes_by_config(folder / component, class_name).values()))
                assert sizes[key] == pytest.approx(1e9 * billions, rel=0.01), (model.name, component)


def test_the_folder_in_the_hubs_cache_comes_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diffusion_runtime.models.memory_demand.step_demand", lambda *_: StepDemand(1, 0))
    monkeypatch.setattr("diffusion_runtime.models.memory_demand.decoding_bytes", lambda *_, **__: 1)
    hub_id = "black-forest-labs/FLUX.1-dev"
    repository = tmp_path / "hub" / "models--black-forest-labs--FLUX.1-dev"
    snapshot = repository / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123")
    # A part of the folder is none.
    (snapshot / "model_index.json").write_text("{}")
    assert find_configs("flux.1-dev") == find_configs(hub_id)
    assert find_configs(hub_id).downloads_gb == MODELS["flux.1-dev"].downloads_gb
    write_published(snapshot, "FLUX.1-dev")
    assert find_configs("flux.1-dev").path.samefile(snapshot)
    # Its weights are not there yet, as after a download that was interrupted.
    assert find_configs(hub_id).downloads_gb == MODELS["flux.1-dev"].downloads_gb
    vae = snapshot / "vae" / "diffusion_pytorch_model.safetensors"
    vae.touch()
    assert "vae" not in (find_configs(hub_id).downloads_gb or {"vae": 0})
    # Offline nothing can be downloaded, and a dry run says what is missing.
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    for name in ("tokenizer", "tokenizer_2", "scheduler"):
        (snapshot / name).mkdir(exist_ok=True)
    assert run(["generate", "x", "--model-path", hub_id, "--device", "cpu", "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert Path(plan["folder"]).samefile(snapshot)
    assert plan["download_gb"] == pytest.approx(MODELS["flux.1-dev"].download_gb - 0.168, abs=0.01)
    for component, stem in (("text_encoder", "model"), ("text_encoder_2", "model"), ("transformer", vae.stem)):
        (snapshot / component / f"{stem}.safetensors").touch()
    assert find_configs(hub_id).downloads_gb is None


def test_the_size_of_a_variant_is_not_claimed(capsys: pytest.CaptureFixture[str]) -> None:
    """A folder's json counts its default weights alone."""
    flags = ("generate", "a cat", "--model-path", "wan2.1-1.3b", "--dry-run")
    said = []
    for variant in ((), ("--variant", "fp16")):
        assert run((*flags, *variant)) == 0
        printed = capsys.readouterr()
        said.append(" ".join((printed.out + printed.err).split()))
    assert "28.90 GB from the hub" in said[0]
    assert "the default weights" not in said[0]
    assert "28.90 GB from the hub; that is the size of the default weights, not of the variant fp16" in said[1]
