"""Folders as they are published: shards, bfloat16, variants; and those whose weights are none this runtime reads.

Written by diffusers' own save_pretrained, one model of every family.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_families import WRITERS, small_request

from diffusion_runtime import load_pipeline
from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.loading import inspect_pipeline

# What importing diffusers' pipelines says about packages that are not here, and about guiders.
pytestmark = pytest.mark.filterwarnings("ignore")


SHARD = "20KB"


@pytest.fixture(scope="module", params=list(WRITERS))
def family_folder(request: pytest.FixtureRequest, tiny_folder_of: Callable[[str], Path]) -> Path:
    """Read only."""
    return tiny_folder_of(request.param)


def frames(folder: Path) -> numpy.ndarray:
    pipeline = load_pipeline(str(folder), device="cpu", dtype="float32")
    return pipeline(small_request(pipeline)).frames.astype(int)


def save_again(folder: Path, target: Path, dtype: torch.dtype, **how: Any) -> Path:
    from diffusers import DiffusionPipeline

    if "Qwen3VLProcessor" in (folder / "model_index.json").read_text():
        # transformers makes it of torchvision: without the pipeline.
        return save_parts_again(folder, target, dtype, **how)
    DiffusionPipeline.from_pretrained(folder, dtype=dtype).save_pretrained(target, **how)
    # It changes what belongs to no component.
    for name in ("model_index.json", "generation.json"):
        if (folder / name).exists():
            shutil.copy(folder / name, target / name)
    return target


def save_parts_again(folder: Path, target: Path, dtype: torch.dtype, **how: Any) -> Path:
    import diffusers
    import transformers

    shutil.copytree(folder, target)
    for name, entry in json.loads((folder / "model_index.json").read_text()).items():
        if list((folder / name).glob("*.safetensors")):
            shutil.rmtree(target / name)
            made_by = getattr({"diffusers": diffusers, "transformers": transformers}[entry[0]], entry[1])
            made_by.from_pretrained(folder / name, dtype=dtype).save_pretrained(target / name, **how)
    return target


# Files are found and read alike in every family; these have one encoder of text and two, and sound.
SHARDED = ("wan", "flux1", "hunyuan_video_15", "ltx2")
# Of pipelines that diffusers does not have, and so does not save.
NOT_SAVED = ("wan_animate_2", "anima", "moss_image", "seedvr2", "scail_2")


@pytest.mark.parametrize(
    "family_folder",
    [
        pytest.param(each, marks=[] if each in SHARDED else [pytest.mark.slow])
        for each in WRITERS
        if each not in NOT_SAVED
    ],
    indirect=True,
    scope="module",
)
def test_shards_and_variants_give_the_same_as_one_file(family_folder: Path, tmp_path: Path) -> None:
    shards = save_again(family_folder, tmp_path / "shards", torch.float32, max_shard_size=SHARD)
    half = save_again(family_folder, tmp_path / "half", torch.bfloat16)
    variant = save_again(family_folder, tmp_path / "variant", torch.bfloat16, variant="bf16", max_shard_size=SHARD)
    for component in ("text_encoder", "transformer"):
        assert len(list((shards / component).glob("*-of-*.safetensors"))) > 1
        names = [path.name for path in (variant / component).glob("*.safetensors*")]
        assert len(names) > 2
        assert all("bf16" in name for name in names), names
    plain, rounded = frames(family_folder), frames(half)
    assert numpy.abs(frames(shards) - plain).max() <= 1
    assert numpy.abs(frames(variant) - rounded).max() <= 1
    # Rounded weights make another picture, but the same one.
    assert 0 < numpy.abs(rounded - plain).max() <= 40


def test_every_missing_component_is_named_before_a_weight_is_read(
    family_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_first = "diffusion_runtime.loading.text_encoders.TextEncoderLoader.load"
    monkeypatch.setattr(read_first, lambda *_: pytest.fail("weights were read first"))
    folder = Path(shutil.copytree(family_folder, tmp_path / "folder"))
    components = [path for path in folder.iterdir() if path.is_dir()]
    names = {path.name for path in components}
    assert {"transformer", "vae", "scheduler"} <= names
    # The text of SeedVR2 comes with the package.
    assert "text_encoder" not in names or {"tokenizer", "processor"} & names
    for component in components:
        component.rename(tmp_path / "away")
        assert f"{component}/" in refusal(folder)
        (tmp_path / "away").rename(component)


# --- weights that this runtime does not read --------------------------------------------------------------------------

STEMS = {"transformer": "diffusion_pytorch_model", "vae": "diffusion_pytorch_model", "text_encoder": "model"}


@pytest.fixture
def no_weight_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every family begins with the text encoder."""

    def load_text_encoder(*_: object) -> None:
        raise AssertionError("weights were read first")

    monkeypatch.setattr("diffusion_runtime.loading.text_encoders.TextEncoderLoader.load", load_text_encoder)


def refusal(folder: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load_pipeline(str(folder), device="cpu")
    return str(caught.value)


@pytest.mark.parametrize("component", list(STEMS))
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_tensors_of_eight_bits_are_refused(
    tiny_wan_copy: Callable[[], Path], no_weight_is_read: None, component: str, dtype: torch.dtype
) -> None:
    folder = tiny_wan_copy()
    path = folder / component / f"{STEMS[component]}.safetensors"
    tensors = load_file(path)
    name = next(name for name, tensor in tensors.items() if tensor.dim() >= 2)
    save_file({**tensors, name: tensors[name].to(dtype)}, path)
    said = refusal(folder)
    assert f"{path}: 1 of {len(tensors)} tensors are stored as " in said
    assert name in said
    assert "These weights are quantised" in said
    assert "use the model's own folder" in said


@pytest.mark.parametrize("component", list(STEMS))
def test_a_quantisation_in_config_json_is_refused_without_a_weight(
    tiny_wan_copy: Callable[[], Path], component: str
) -> None:
    folder = tiny_wan_copy()
    for path in folder.rglob("*.safetensors"):
        path.unlink()
    path = folder / component / "config.json"
    values = json.loads(path.read_text())
    for method in ("bitsandbytes", "torchao", "quanto", "gguf", "fp8"):
        settings = {"quant_method": method, "load_in_4bit": True}
        path.write_text(json.dumps({**values, "quantization_config": settings}))
        with pytest.raises(ModelLoadError) as caught:
            inspect_pipeline(RuntimeConfig(model_path=str(folder)))
        said = str(caught.value)
        assert f"{path}: key 'quantization_config': the weights are quantised ({method})" in said
        assert "use the model's own folder" in said
        assert ("--transformer-path with a safetensors file in 8-bit floats or a GGUF" in said) == (
            component == "transformer"
        )


@pytest.mark.parametrize("component", list(STEMS))
@pytest.mark.parametrize(
    ("name", "told"),
    [("model-Q4_K_S.gguf", "--transformer-path "), ("pytorch_model.bin", "pickled weights can run code")],
)
def test_other_formats_are_refused(
    tiny_wan_copy: Callable[[], Path], no_weight_is_read: None, component: str, name: str, told: str
) -> None:
    folder = tiny_wan_copy()
    (folder / component / f"{STEMS[component]}.safetensors").rename(folder / component / name)
    said = refusal(folder)
    assert f"{folder / component}: expected {STEMS[component]}.safetensors" in said
    assert name in said
    assert told in said


@pytest.mark.parametrize("name", ["flux1-dev-Q4_K_S.gguf", "flux1-dev.safetensors", "flux1-dev.sft"])
def test_a_checkpoint_in_one_file_is_no_folder(tmp_path: Path, name: str) -> None:
    """Given itself, and given the folder it was downloaded into."""
    (tmp_path / name).write_bytes(b"GGUF")
    assert f"{name} is cut off" in refusal(tmp_path / name)
    assert f"{name} is one file, and a model is a folder: it cannot be read" in refusal(tmp_path)


def test_a_damaged_head_is_no_reason_to_fall(tiny_wan_copy: Callable[[], Path], no_weight_is_read: None) -> None:
    folder = tiny_wan_copy()
    path = folder / "vae" / "diffusion_pytorch_model.safetensors"
    content = bytearray(path.read_bytes())
    content[8:12] = b'"x":'
    path.write_bytes(content)
    assert f"{path} is damaged" in refusal(folder)
