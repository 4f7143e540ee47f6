"""`transformer_path`: weights from a file or another folder, by diffusers' names or the authors'; whose file it is."""

from __future__ import annotations

import contextlib
import importlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import fp8_files
import pytest
import torch
from original_names import ORIGINALS, converted, flux1_as_authors, original_tensors
from safetensors.torch import load_file, save_file
from tables import table
from tiny_families import WRITERS, small_request
from tiny_models import write_tiny_wan

from diffusion_runtime import RuntimeConfig, load_pipeline
from diffusion_runtime.errors import ConfigError, DiffusionRuntimeError, ModelLoadError
from diffusion_runtime.layers.fp8_linear import Fp8Linear
from diffusion_runtime.loading.preparation import inspect_pipeline
from diffusion_runtime.models.registry import lora_names_of_families
from diffusion_runtime.weights.tensor_files import SafetensorsFile, read_tensors
from diffusion_runtime.weights.tensor_names import Expected
from diffusion_runtime.weights.transformer_files import TransformerFile

# Tensors of the authors' files that nothing reads.
UNREAD = ("norm_final.weight", "video_embeddings_connector.")


def read(path: Path, family: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """The tensors of a file as a model of the family meets them."""
    folder = family.partition(" ")[0]
    names = importlib.import_module(f"diffusion_runtime.models.{folder}.weights").LORA_NAMES
    expected = Expected(shapes, names, lora_names_of_families, lambda name: name.startswith(UNREAD))
    with contextlib.ExitStack() as stack:
        rows = TransformerFile(str(path), "transformer_path", "transformer").source(expected)(stack)
        return {name: torch.cat([part.numbers(torch.float32) for part in parts]) for name, parts in rows.items()}


def shapes_of(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


@table("prefix", ["", "model.diffusion_model.", "diffusion_model."])
@table("family", ORIGINALS)
def test_the_authors_names_give_what_diffusers_makes_of_them(tmp_path: Path, family: str, prefix: str) -> None:
    """Bit for bit: names, fused projections, and the halves of the last layer that change places."""
    tensors = original_tensors(family)
    theirs = converted(family, tensors)
    other = {"vae.decoder.conv_in.weight": torch.zeros(1)} if prefix else {}
    save_file({**{f"{prefix}{name}": tensor for name, tensor in tensors.items()}, **other}, tmp_path / "a.safetensors")
    ours = read(tmp_path / "a.safetensors", family, shapes_of(theirs))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


@pytest.fixture(scope="module")
def flux1(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return WRITERS["flux1"](tmp_path_factory.mktemp("flux1") / "model")


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")


def test_a_file_takes_the_place_of_the_folders_weights(flux1: Path, tmp_path: Path) -> None:
    """By diffusers' names, by the authors', as a folder, and as a folder whose own weights are not there."""
    given = {name: tensor + 0.01 for name, tensor in weights_of(flux1).items()}
    expected = shutil.copytree(flux1, tmp_path / "expected")
    save_file(given, expected / "transformer" / "diffusion_pytorch_model.safetensors")
    state = load_pipeline(str(expected), device="cpu").transformer.state_dict()
    bare = shutil.copytree(flux1, tmp_path / "bare")
    (bare / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    save_file(given, tmp_path / "theirs.safetensors")
    authors = flux1_as_authors(given)
    save_file(
        {f"model.diffusion_model.{name}": each for name, each in authors.items()}, tmp_path / "authors.safetensors"
    )
    for path in ("theirs.safetensors", "authors.safetensors", "expected/transformer"):
        pipeline = load_pipeline(str(bare), device="cpu", transformer_path=str(tmp_path / path))
        for name, value in pipeline.transformer.state_dict().items():
            assert torch.equal(value, state[name]), (path, name)
        assert pipeline.recipe["runtime"]["transformer_path"] == str(tmp_path / path)


def test_scales_follow_the_rows_of_fused_projections(flux1: Path, tmp_path: Path) -> None:
    """ComfyUI's fp8_scaled file with the authors' names: one scale for q, k, v and the feed-forward network."""
    authors = flux1_as_authors(weights_of(flux1))
    file = fp8_files.comfy_scaled(authors)
    save_file({f"diffusion_model.{name}": each for name, each in file.stored.items()}, tmp_path / "fp8.safetensors")
    save_file(file.meant, tmp_path / "meant.safetensors")
    quantized = load_pipeline(str(flux1), device="cpu", transformer_path=str(tmp_path / "fp8.safetensors"))
    plain = load_pipeline(str(flux1), device="cpu", transformer_path=str(tmp_path / "meant.safetensors"))
    layers = {name: each for name, each in quantized.transformer.named_modules() if isinstance(each, Fp8Linear)}
    assert "single_blocks.0.qkv_up" in layers
    for name, layer in layers.items():
        assert torch.equal(layer.weight.float() * layer.weight_scale, plain.transformer.get_submodule(name).weight), (
            name
        )
    request = small_request(quantized)
    assert torch.allclose(
        torch.as_tensor(quantized(request).frames).float(), torch.as_tensor(plain(request).frames).float(), atol=2
    )


def with_names(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path, Path], RuntimeConfig]:
    """A config with a file of the authors' names, after a change."""

    def make(folder: Path, place: Path) -> RuntimeConfig:
        tensors = flux1_as_authors(weights_of(folder))
        change(tensors)
        save_file(tensors, place / "given.safetensors")
        return RuntimeConfig(str(folder), device="cpu", transformer_path=str(place / "given.safetensors"))

    return make


def of_family(family: str) -> Callable[[Path, Path], RuntimeConfig]:
    def make(folder: Path, place: Path) -> RuntimeConfig:
        save_file(original_tensors(family), place / "given.safetensors")
        return RuntimeConfig(str(folder), device="cpu", transformer_path=str(place / "given.safetensors"))

    return make


def named(path: str, content: bytes = b"", key: str = "transformer_path") -> Callable[[Path, Path], RuntimeConfig]:
    def make(folder: Path, place: Path) -> RuntimeConfig:
        if content:
            (place / path).write_bytes(content)
        return RuntimeConfig(str(folder), device="cpu", **{key: str(place / path)})

    return make


def whole_folder(folder: Path, place: Path) -> RuntimeConfig:
    return RuntimeConfig(str(folder), device="cpu", transformer_path=str(folder))


def of_component(name: str) -> Callable[[Path, Path], RuntimeConfig]:
    return lambda folder, _: RuntimeConfig(
        str(folder), device="cpu", transformer_path=str(next((folder / name).glob("*.safetensors")))
    )


def of_other_class(folder: Path, place: Path) -> RuntimeConfig:
    other = shutil.copytree(folder / "transformer", place / "other")
    values = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**values, "_class_name": "ZImageTransformer2DModel"}))
    return RuntimeConfig(str(folder), device="cpu", transformer_path=str(other))


def of_modelopt(folder: Path, place: Path) -> RuntimeConfig:
    other = shutil.copytree(folder / "transformer", place / "other")
    values = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**values, "quantization_config": {"quant_method": "gguf"}}))
    return RuntimeConfig(str(folder), device="cpu", transformer_path=str(other))


def of_other_settings(folder: Path, place: Path) -> RuntimeConfig:
    other = shutil.copytree(folder / "transformer", place / "other")
    values = json.loads((other / "config.json").read_text())
    values |= {"axes_dims_rope": values["axes_dims_rope"][::-1], "_name_or_path": "elsewhere", "a_note": 1}
    (other / "config.json").write_text(json.dumps(values))
    return RuntimeConfig(str(folder), device="cpu", transformer_path=str(other))


@table(
    ("make", "error", "said"),
    [
        (of_family("wan"), ModelLoadError, r"given.safetensors: the file is for Wan, and the model is FLUX.1"),
        (of_component("vae"), ModelLoadError, r"holds an autoencoder, expected a transformer: give it by --vae-path"),
        (of_component("text_encoder"), ModelLoadError, r"holds a CLIP text encoder, .* by --text-encoder-path, or use"),
        (of_other_class, ModelLoadError, r"expected 'FluxTransformer2DModel', the model's own, got 'ZImageTran"),
        (of_family("z_image"), ModelLoadError, r"the file is for Z-Image, and the model is FLUX.1"),
        (of_family("ltx2"), ModelLoadError, r"the file is for LTX-2, and the model is FLUX.1"),
        (with_names(lambda given: given.update(alien=torch.ones(1))), ModelLoadError, r"1 of \d+ tensors .*: alien"),
        (
            with_names(lambda given: given.update({"img_in.weight": torch.ones(3, 3)})),
            ModelLoadError,
            r"x_embedder.weight is \[3, 3\], expected \[32, 16\]",
        ),
        (
            with_names(lambda given: given.update({"double_blocks.0.img_attn.qkv.bias": torch.ones(9)})),
            ModelLoadError,
            r"double_blocks.0.img_attn.qkv.bias is \[9\], expected \[96\]",
        ),
        (
            with_names(lambda given: given.update({"x_embedder.weight": given["img_in.weight"] + 1})),
            ModelLoadError,
            r"are both for x_embedder.weight",
        ),
        (
            with_names(lambda given: given.update({"model.diffusion_model.img_in.weight": given["img_in.weight"] + 1})),
            ModelLoadError,
            r"img_in.weight and model.diffusion_model.img_in.weight are one tensor of a transformer, given twice",
        ),
        (
            with_names(lambda given: given.pop("txt_in.bias")),
            ModelLoadError,
            r"config.json of the model's folder. 1 of \d+ tensors are missing: context_embedder.bias",
        ),
        (named("a.safetensors"), ModelLoadError, r"transformer_path: .*a.safetensors: no such file"),
        (named("a.safetensors", b"x" * 40), ModelLoadError, r"a.safetensors is cut off"),
        (named("a.ckpt", b"x" * 40), ModelLoadError, r"a pickle can run code"),
        (named("a.safetensors", b"x" * 40, "transformer_2_path"), ConfigError, r"has one transformer, and no"),
        (whole_folder, ModelLoadError, r"is the folder of a whole model: give .*transformer"),
        (of_modelopt, ModelLoadError, r"the weights are quantised \(gguf\)"),
        (
            of_other_settings,
            ModelLoadError,
            r"config.json: 1 settings differ .*: axes_dims_rope is .* --transformer-path",
        ),
    ],
)
def test_files_that_cannot_be_used_say_why(
    flux1: Path,
    tmp_path: Path,
    make: Callable[[Path, Path], RuntimeConfig],
    error: type[DiffusionRuntimeError],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before any weight is read, and in a dry run."""

    def load_text_encoder(*_: object) -> None:
        raise AssertionError("weights were read first")

    monkeypatch.setattr("diffusion_runtime.loading.text_encoders.TextEncoderLoader.load", load_text_encoder)
    config = make(flux1, tmp_path)
    with pytest.raises(error, match=said):
        load_pipeline(config)
    with pytest.raises(error, match=said):
        inspect_pipeline(config)


def test_a_model_of_two_transformers_takes_one_file_each(tmp_path: Path) -> None:
    folder = write_tiny_wan(tmp_path / "model", boundary_ratio=0.875)
    config = RuntimeConfig(str(folder), device="cpu")
    paths = {}
    for component in ("transformer", "transformer_2"):
        tensors = load_file(folder / component / "diffusion_pytorch_model.safetensors")
        save_file({name: tensor + 0.5 for name, tensor in tensors.items()}, tmp_path / f"{component}.safetensors")
        paths[f"{component}_path"] = str(tmp_path / f"{component}.safetensors")
    changed = load_pipeline(str(folder), device="cpu", **paths).transformer.state_dict()
    for name, value in load_pipeline(config).transformer.state_dict().items():
        assert torch.allclose(changed[name], value + 0.5), name


def test_a_head_of_more_tensors_than_any_component_has_is_refused_at_once(tmp_path: Path) -> None:
    """Telling what a file is looks at every name."""
    path = tmp_path / "many.safetensors"
    names = [f"blocks.{number}.self_attn.q.lora_A.weight" for number in range(20_001)]
    head = {name: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for name in names}
    text = json.dumps(head).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    for read in (SafetensorsFile, lambda path: read_tensors(path, "lora.path")):
        with pytest.raises(ModelLoadError, match="it would hold 20001 tensors, more than 20000"):
            read(path)
