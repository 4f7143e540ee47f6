"""Model folders whose weights are all in 8 bits (scripts/train_embedded/eight_bits.py): what is computed of them."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path

import pytest
import torch
from offloaded_pipelines import planned
from plain_folders import write_plain
from safetensors.torch import load_file, save_file
from tiny_families import WRITERS as FAMILIES
from tiny_families import small_request

from diffusion_runtime import Pipeline, RuntimeConfig, load_pipeline
from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.layers.eight_bit_linear import eight_bit_layers
from diffusion_runtime.loading import prepare
from diffusion_runtime.loading.native_model import PreparedModel
from diffusion_runtime.weights.tensor_files import SafetensorsFile
from diffusion_runtime.weights.weight_files import QUANTIZATION_METADATA
from scripts.train_embedded.eight_bits import LORA, WEIGHTS, shortened, write_folder, write_lora

CONFIG = Path("transformer") / "config.json"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny Wan in 8 bits, and the numbers of its weights in float32."""
    place = tmp_path_factory.mktemp("eight_bits")
    stored = place / "stored"
    write_folder(FAMILIES["wan"](place / "model"), stored)
    return stored, write_plain(stored, place / "wide")


def frames(pipeline: Pipeline) -> torch.Tensor:
    return torch.from_numpy(pipeline(small_request(pipeline)).frames)


def test_weights_of_every_component_are_dequantised_at_load(folders: tuple[Path, Path]) -> None:
    stored, wide = folders
    for component, name in WEIGHTS.items():
        dtypes = {tensor.dtype for tensor in load_file(stored / component / name).values()}
        assert torch.int8 in dtypes, component
    found = load_pipeline(str(stored), device="cpu", dtype="float32")
    expected = load_pipeline(str(wide), device="cpu", dtype="float32")
    assert not eight_bit_layers(found.transformer)
    assert torch.equal(frames(found), frames(expected))
    said = found(small_request(found)).attention_report.notes
    assert "transformer: 8-bit weights, dequantised at load, as its config.json asks" in said


def test_without_the_request_layers_stay_in_eight_bits(folders: tuple[Path, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders[0], tmp_path / "model"))
    values = json.loads((folder / CONFIG).read_text())
    values["quantization_config"].pop("dequantize")
    (folder / CONFIG).write_text(json.dumps(values))
    assert eight_bit_layers(load_pipeline(str(folder), device="cpu", dtype="float32").transformer)


@pytest.mark.parametrize("backend", ["native", "diffusers"])
@pytest.mark.parametrize("component", WEIGHTS)
def test_a_layer_without_its_mark_never_becomes_noise(
    folders: tuple[Path, Path], tmp_path: Path, component: str, backend: str
) -> None:
    """Without its scale too, the numbers would be read as they are."""
    folder = Path(shutil.copytree(folders[0], tmp_path / "model"))
    path = folder / component / WEIGHTS[component]
    with closing(SafetensorsFile(path)) as file:
        metadata = dict(file.metadata)
    tensors, marks = load_file(path), json.loads(metadata[QUANTIZATION_METADATA])
    layer = next(iter(marks["layers"]))
    del marks["layers"][layer], tensors[f"{layer}.weight_scale"]
    save_file(tensors, path, metadata={**metadata, QUANTIZATION_METADATA: json.dumps(marks)})
    with pytest.raises(ModelLoadError, match=f"{layer}.weight is stored as I8 without a mark .*{layer}.comfy_quant"):
        load_pipeline(str(folder), device="cpu", backend=backend)


def test_a_request_to_dequantise_is_true_or_false(folders: tuple[Path, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders[0], tmp_path / "model"))
    values = json.loads((folder / CONFIG).read_text())
    values["quantization_config"]["dequantize"] = "yes"
    (folder / CONFIG).write_text(json.dumps(values))
    with pytest.raises(ModelLoadError, match=r"quantization_config.dequantize': expected true or false, got 'yes'"):
        prepare(RuntimeConfig(str(folder), device="cpu"))


def test_flags_quantise_what_was_dequantised(folders: tuple[Path, Path]) -> None:
    layers = [
        {name: (layer.weight, layer.weight_scale) for name, layer in eight_bit_layers(pipeline.transformer).items()}
        for pipeline in (load_pipeline(str(folder), device="cpu", quantization="int8") for folder in folders)
    ]
    assert layers[0].keys() == layers[1].keys() != set()
    for name, tensors in layers[0].items():
        assert all(torch.equal(a, b) for a, b in zip(tensors, layers[1][name], strict=True)), name


def test_offloaded_weights_compute_the_same(folders: tuple[Path, Path]) -> None:
    """By blocks, from the machine's memory or from the files."""
    expected = frames(load_pipeline(str(folders[1]), device="cpu", dtype="float32"))
    for waits in (False, True):
        prepared = prepare(RuntimeConfig(str(folders[0]), device="cpu", dtype="float32"))
        assert isinstance(prepared, PreparedModel)
        pipeline = planned(prepared, "layers", {"transformer": 0}, waits_in_files=waits).load()
        assert torch.equal(frames(pipeline), expected), waits
        pipeline.close()


def test_a_lora_in_eight_bits_is_read_as_others(folders: tuple[Path, Path], tmp_path: Path) -> None:
    torch.manual_seed(3)
    weight = "blocks.0.attn1.to_q.weight"
    size = load_file(folders[1] / "transformer" / WEIGHTS["transformer"])[weight].shape[0]
    down, up = 0.1 * torch.randn(4, size), 0.05 * torch.randn(size, 4)
    factors = {"lora_A": down, "lora_B": up}
    (tmp_path / "lora").mkdir()
    save_file(
        {f"transformer.{weight.removesuffix('weight')}{name}.weight": each for name, each in factors.items()},
        tmp_path / "lora" / LORA,
    )
    write_lora(tmp_path / "lora", tmp_path / "stored")
    assert {each.dtype for each in load_file(tmp_path / "stored" / LORA).values()} == {torch.float8_e4m3fn}
    pipeline = load_pipeline(str(folders[0]), device="cpu", dtype="float32")
    before = {name: value.clone() for name, value in pipeline.transformer.state_dict().items()}
    pipeline.set_loras([str(tmp_path / "stored")])
    apart = {name: value - before[name] for name, value in pipeline.transformer.state_dict().items()}
    (changed,) = (name for name, value in apart.items() if value.any())
    delta = torch.zeros_like(apart[changed])
    delta[:size] = up @ down
    # Two factors with 3 bits of mantissa: 1 / 28 of either on average.
    assert float((apart[changed] - delta).norm() / delta.norm()) < 0.06
    pipeline.set_loras([])
    for name, value in pipeline.transformer.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_shortened_lora_keeps_the_largest_parts_of_its_products() -> None:
    torch.manual_seed(4)
    wide, narrow = torch.linalg.qr(torch.randn(64, 8)).Q, torch.linalg.qr(torch.randn(32, 8)).Q
    # One layer that nearly is of rank 1, one with eight equal parts; columns are mixed, so no factor shows it.
    mixes = torch.linalg.qr(torch.randn(8, 8)).Q, torch.linalg.qr(torch.randn(8, 8)).Q
    strengths = torch.tensor([9.0, *[0.1] * 7]), torch.full((8,), 2.0)
    pairs = [(mix.T @ narrow.T, wide * each @ mix) for mix, each in zip(mixes, strengths, strict=True)]
    (one, eight) = shortened(pairs, 0.5)
    assert (len(one[0]), len(eight[0])) == (1, 7)
    for (down, up), (before_down, before_up), lost in zip((one, eight), pairs, (0.07**0.5, 2.0), strict=True):
        assert float((up @ down - before_up @ before_down).norm()) == pytest.approx(lost, rel=1e-3)
    assert shortened(pairs, 1.0) == pairs
