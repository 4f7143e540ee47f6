"""ComfyUI's folders of tiny random weights, with the files that a workflow's nodes name, and the names of tensors that
such files have. The published model of the workflow has these sizes meanwhile."""

from __future__ import annotations

import fnmatch
import functools
import json
import re
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from comfy_files import Numbers, Stored, Writer, int8, nvfp4, quantised
from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel
from models.anima.test_files import as_authors as anima_as_authors
from models.test_found_files import connectors_as_authors, tensors_of, write
from original_names import (
    AUTOENCODERS,
    as_authors,
    encoder_as_comfyui,
    flux1_as_authors,
    minimax_h3_as_authors,
)
from PIL import Image
from sample_media import make_media
from tiny_anima import write_tiny_anima
from tiny_flux1 import write_tiny_flux1
from tiny_flux2 import write_tiny_flux2, write_tiny_flux2_klein
from tiny_hunyuan_video_15 import write_tiny_hunyuan_video_15
from tiny_longcat_image import write_tiny_longcat_image
from tiny_ltx2 import VIDEO_CHANNELS, write_tiny_ltx2
from tiny_minimax_h3 import write_tiny_minimax_h3
from tiny_models import write_tiny_wan
from tiny_qwen_image import write_tiny_qwen_image
from tiny_qwen_image_21 import write_tiny_qwen_image_21
from tiny_z_image import write_tiny_z_image

from diffusion_runtime.core.model_folder import ModelFolder
from diffusion_runtime.models import published_folders
from diffusion_runtime.models.part_files import PART_KEYS
from diffusion_runtime.models.published import model_of_name
from diffusion_runtime.models.registry import family_for_folder
from diffusion_runtime.workflows.translation import Translation

# By patterns of published names; the first that fits.
WRITERS: Mapping[str, Callable[[Path], Path]] = {
    "minimax-h3*": write_tiny_minimax_h3,
    "ltx-2": write_tiny_ltx2,
    "ltx-2.3*": partial(write_tiny_ltx2, is_ltx23=True),
    "ltx-2.5": partial(write_tiny_ltx2, is_ltx25=True),
    "qwen-image-2.1*": partial(write_tiny_qwen_image_21, sees=True),
    "qwen-image-edit": partial(write_tiny_qwen_image, edits="QwenImageEditPipeline"),
    "qwen-image-edit-*": partial(write_tiny_qwen_image, edits="QwenImageEditPlusPipeline"),
    "qwen-image": write_tiny_qwen_image,
    "z-image*": write_tiny_z_image,
    "wan2.2-i2v-a14b": partial(write_tiny_wan, boundary_ratio=0.9, condition="clip"),
    "flux.2-dev": write_tiny_flux2,
    "flux.2-klein-base-*": write_tiny_flux2_klein,
    "flux.2-klein-9b-kv": partial(write_tiny_flux2_klein, is_distilled=True, caches_references=True),
    "flux.2-klein-*": partial(write_tiny_flux2_klein, is_distilled=True),
    "flux.1-dev": write_tiny_flux1,
    "flux.1-kontext-dev": partial(write_tiny_flux1, pipeline_class="FluxKontextPipeline"),
    "anima*": write_tiny_anima,
    "hunyuan-video-1.5-t2v": write_tiny_hunyuan_video_15,
    "longcat-image": write_tiny_longcat_image,
}
COMPONENTS = {"model_path": "transformer", "transformer_2_path": "transformer_2", **PART_KEYS}


def writer_of(model: str) -> Callable[[Path], Path]:
    return next(writer for pattern, writer in WRITERS.items() if fnmatch.fnmatchcase(model, pattern))


def use_as_published(model: str, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the published model of a name the json of a folder of tiny sizes, and its tokenizers."""
    published = model_of_name(model)
    assert published is not None
    name = published.model_path.rpartition("/")[2]
    place = whole.parent / f"{whole.name}-published" / name
    if not place.exists():
        shutil.copytree(whole, place, ignore=shutil.ignore_patterns("*.safetensors"))
    files = {str(path.relative_to(whole)): json.loads(path.read_text()) for path in whole.rglob("*.json")}
    known = {**published_folders.published_folders(), name: files}
    theirs, ours = published_folders._temporary_folder, SimpleNamespace(name=str(place.parent))
    monkeypatch.setattr(published_folders, "published_folders", lambda: known)
    monkeypatch.setattr(published_folders, "_temporary_folder", lambda asked: ours if asked == name else theirs(asked))


def write_files(found: Translation, whole: Path, models: Path) -> None:
    """Write the files that the nodes of a workflow name below a folder of models. whole: the folder of tiny weights."""
    for key, weights in found.files.items():
        place = models / weights.folder / weights.file
        if key == "upsampler_path":
            _write_upsampler(place)
        else:
            made = _checkpoint(whole) if weights.folder == "checkpoints" else _tensors(whole, COMPONENTS[key])
            write(place, in_named_format(weights.file, made))
    for lora, component in found.loras:
        _write_lora(models / "loras" / lora.file, whole, component)


def in_named_format(file: str, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Return the tensors with the matrices of blocks in the numbers that a file's name says; others as they are."""
    writer = next((writer for words, writer in FORMATS.items() if re.search(words, file)), None)

    def takes(name: str) -> bool:
        tensor = tensors[name]
        return (
            re.search(r"(layers?|blocks?)\.\d+\..*\.weight$", name) is not None
            and re.search(r"norm|audio_vae|vocoder|connector|adaln", name) is None
            and tensor.dim() == 2
            and tensor.shape[1] % 16 == 0
        )

    if writer is None:
        return tensors
    stored, _ = quantised(tensors, writer, takes)
    assert any(name.endswith(".comfy_quant") for name in stored), f"{file}: no matrix of it is of these numbers"
    return stored


def _fp8(numbers: Numbers) -> Stored:
    scale = numpy.float32(numpy.abs(numbers).max() / 448)
    values = torch.from_numpy(numbers / scale).to(torch.float8_e4m3fn)
    tensors = {"weight": values, "weight_scale": torch.tensor(float(scale))}
    return Stored(tensors, {"format": "float8_e4m3fn"}, values.double().numpy() * numpy.float64(scale))


# By what stands in a file's name.
FORMATS: Mapping[str, Writer] = {
    "int8.convrot": partial(int8, group=16),
    "nvfp4|fp4_mixed": nvfp4,
    "fp8": _fp8,
}


def write_inputs(found: Translation, folder: Path) -> None:
    """Write the pictures, videos and sounds that a workflow starts from, of its clip's sides."""
    size = (found.request.get("width") or 640, found.request.get("height") or 384)
    for _, name in found.inputs:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix in (".mp4", ".webm"):
            make_media(9, height=size[1], width=size[0]).save(path.with_suffix(".mp4")).rename(path)
        else:
            Image.new("RGB", size, "red").save(path, format="PNG")


def _tensors(whole: Path, component: str) -> dict[str, torch.Tensor]:
    tensors, folder = tensors_of(whole, component), ModelFolder(whole)
    family = family_for_folder(folder)
    if component.startswith("transformer"):
        if family.name == "minimax_h3":
            return dict(minimax_h3_as_authors(tensors))
        if family.name == "anima":
            conditioner = tensors_of(whole, "text_conditioner")
            own = {f"net.{anima_as_authors(name)}": each for name, each in tensors.items()}
            return own | {f"net.llm_adapter.{name}": each for name, each in conditioner.items()}
        if family.name == "flux1":
            return dict(flux1_as_authors(tensors))
        if family.name == "ltx2":
            own = {f"model.diffusion_model.{name}": each for name, each in tensors.items()}
            return own | _connectors(whole, projects=False)
        return dict(as_authors(tensors, family.weights.lora_names))
    if "encoder" in component:
        made = dict(encoder_as_comfyui(tensors))
        return made | _connectors(whole, projects=True) if family.name == "ltx2" else made
    own = json.loads((whole / component / "config.json").read_text())["_class_name"]
    made = dict(AUTOENCODERS.get(own, dict)(tensors))
    if component == "audio_vae" and (whole / "vocoder").is_dir():
        # One file of both.
        vocoder = tensors_of(whole, "vocoder")
        return {f"audio_vae.{name}": each for name, each in tensors.items()} | {
            f"vocoder.{name}": each for name, each in vocoder.items()
        }
    return made


def _connectors(whole: Path, *, projects: bool) -> dict[str, torch.Tensor]:
    """LTX-2.5's, most of which are in its transformer's file, and the projections in its text encoder's."""
    if not (whole / "connectors").is_dir():
        return {}
    made = connectors_as_authors(tensors_of(whole, "connectors"))
    return {name: each for name, each in made.items() if name.startswith("text_embedding_projection.") is projects}


def _checkpoint(whole: Path) -> dict[str, torch.Tensor]:
    """LTX-2's: all but the text encoder."""
    made = {f"model.diffusion_model.{name}": each for name, each in tensors_of(whole, "transformer").items()}
    made |= connectors_as_authors(tensors_of(whole, "connectors"))
    for component in ("vae", "audio_vae", "vocoder"):
        made |= {f"{component}.{name}": each for name, each in tensors_of(whole, component).items()}
    return made


@functools.cache
def _upsampler() -> dict[str, torch.Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LTX2LatentUpsamplerModel(in_channels=VIDEO_CHANNELS, mid_channels=32, num_blocks_per_stage=1)
    return dict(model.state_dict())


def _write_upsampler(place: Path) -> None:
    write(place, _upsampler())


def _write_lora(place: Path, whole: Path, component: str) -> None:
    """Rank 2, of one linear layer of the blocks."""
    of_component = "transformer" if component == "auto" else component
    tensors = tensors_of(whole, of_component)
    name = next(name for name in sorted(tensors) if "blocks." in name and name.endswith("to_q.weight"))
    rows, columns = tensors[name].shape
    module = name.removesuffix(".weight")
    generator = torch.Generator().manual_seed(0)
    write(
        place,
        {
            f"transformer.{module}.lora_A.weight": torch.randn(2, columns, generator=generator) / 8,
            f"transformer.{module}.lora_B.weight": torch.randn(rows, 2, generator=generator) / 8,
        },
    )
