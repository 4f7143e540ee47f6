"""Transformers stored in 8-bit floats: what stays 8-bit, which numbers they are, LoRA files, what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fp8_files
import pytest
import torch
from fp8_files import Fp8File
from lora_kinds import of_every_kind
from safetensors.torch import load_file, save_file
from tables import table
from tiny_families import WRITERS, small_request

from diffusion_runtime import RuntimeConfig, load_pipeline
from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.kernels.fp8_rows.reference import QuantizedRows, dequantize, quantize_rows
from diffusion_runtime.layers.fp8_linear import Fp8Linear
from diffusion_runtime.loading.preparation import inspect_pipeline

WEIGHTS = Path("transformer") / "diffusion_pytorch_model.safetensors"
CONFIG = Path("transformer") / "config.json"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The tiny folder of a family, written once."""
    made: dict[str, Path] = {}

    def of(family: str) -> Path:
        if family not in made:
            made[family] = WRITERS[family](tmp_path_factory.mktemp(family) / family)
        return made[family]

    return of


def write(folder: Path, source: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> str:
    """A copy of a model folder with other weights of its transformer."""
    shutil.copytree(source, folder)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS, metadata=metadata)
    return str(folder)


def write_fp8(folder: Path, source: Path, file: Fp8File, settings: dict[str, str] | None = None) -> str:
    written = write(folder, source, file.stored, file.metadata)
    if settings is not None:
        values = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps({**values, "quantization_config": settings}))
    return written


def held_numbers(pipeline: Any) -> dict[str, torch.Tensor]:
    """The parameters of a transformer, those of 8-bit layers as the numbers they stand for."""
    state = dict(pipeline.transformer.state_dict())
    for name, layer in pipeline.transformer.named_modules():
        if isinstance(layer, Fp8Linear):
            rows = QuantizedRows(state[f"{name}.weight"], state.pop(f"{name}.weight_scale"))
            state[f"{name}.weight"] = dequantize(rows, torch.float32)
    return state


def eight_bit_layers(pipeline: Any) -> dict[str, Fp8Linear]:
    return {name: layer for name, layer in pipeline.transformer.named_modules() if isinstance(layer, Fp8Linear)}


STYLES: dict[str, tuple[Callable[[Any], Fp8File], dict[str, str] | None, torch.dtype]] = {
    "a plain cast": (fp8_files.plain_cast, None, torch.float8_e4m3fn),
    "a plain cast to e5m2": (
        lambda tensors: fp8_files.plain_cast(tensors, torch.float8_e5m2),
        None,
        torch.float8_e5m2,
    ),
    "ComfyUI, a scale per tensor": (fp8_files.comfy_scaled, None, torch.float8_e4m3fn),
    "ComfyUI, a scale per row": (fp8_files.comfy_mixed, None, torch.float8_e4m3fn),
    "ModelOpt": (fp8_files.modelopt, fp8_files.MODELOPT, torch.float8_e4m3fn),
}


@table(
    ("family", "style"),
    [
        *(("wan", style) for style in STYLES),
        ("flux1", "ComfyUI, a scale per tensor"),
        ("ltx2", "ComfyUI, a scale per row"),
    ],
)
def test_weights_stay_as_they_are_stored(
    folders: Callable[[str], Path], tmp_path: Path, family: str, style: str
) -> None:
    """Fused projections, rows in another order (LTX-2) and layers in float32 (Wan) hold the numbers that the file
    means, to the bit."""
    make, settings, dtype = STYLES[style]
    source = folders(family)
    file = make(load_file(source / WEIGHTS))
    quantized = load_pipeline(write_fp8(tmp_path / "fp8", source, file, settings), device="cpu")
    plain = load_pipeline(write(tmp_path / "plain", source, file.meant), device="cpu")
    layers = eight_bit_layers(quantized)
    assert any("feed_forward" in name or "qkv_up" in name for name in layers)
    assert {layer.weight.dtype for layer in layers.values()} == {dtype}
    numbers = held_numbers(quantized)
    for name, expected in plain.transformer.state_dict().items():
        assert torch.equal(numbers[name], expected), name


def test_what_ran_is_counted_and_said(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """On a device with 8-bit products, modulation and the first and last block are dequantised all the same."""
    source = folders("flux1")
    file = fp8_files.comfy_mixed(load_file(source / WEIGHTS))
    pipeline = load_pipeline(write_fp8(tmp_path / "fp8", source, file), device="cpu")
    report = pipeline(small_request(pipeline)).attention_report
    told = {row.implementation.partition(": ")[2] for row in report.products}
    assert told >= {
        "cpu has no 8-bit float products here",
        "one row per sample: nothing is saved, and every token of the block depends on it",
    }
    assert any("as in the file" in note and "linear layers have 8-bit weights" in note for note in report.notes)


def test_loras_are_merged_and_can_be_switched(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """Rows that a LoRA changes are dequantised, merged and quantised again by row; all others stay, to the bit."""
    source = folders("wan")
    file = fp8_files.comfy_scaled(load_file(source / WEIGHTS))
    folder = write_fp8(tmp_path / "fp8", source, file)
    changed = "blocks.0.attn1.to_k"
    dim = file.meant[f"{changed}.weight"].shape[0]
    other, out = "blocks.0.attn1.to_v", "blocks.0.attn1.to_out.0"
    lora, added = of_every_kind((changed, other, out), dim)
    save_file(lora, tmp_path / "style.safetensors")
    fresh = load_pipeline(folder, device="cpu", lora=[str(tmp_path / "style.safetensors")])
    switched = load_pipeline(folder, device="cpu")
    before = {name: value.clone() for name, value in switched.transformer.state_dict().items()}
    switched.set_loras([str(tmp_path / "style.safetensors")])
    for name, value in fresh.transformer.state_dict().items():
        assert torch.equal(value.float(), switched.transformer.state_dict()[name].float()), name
    layer = eight_bit_layers(switched)["blocks.0.self_attention.qkv"]
    for rows, name in ((layer.weight[dim : 2 * dim], changed), (layer.weight[2 * dim :], other)):
        expected = quantize_rows(file.meant[f"{name}.weight"] + added[name])
        assert torch.allclose(rows.float(), expected.values.float(), rtol=0.07), name
    expected = quantize_rows(file.meant[f"{out}.weight"] + added[out])
    found = eight_bit_layers(switched)["blocks.0.self_attention.out"].weight
    assert torch.equal(found.float(), expected.values.float())
    stored = file.stored["blocks.0.attn1.to_q.weight"]
    assert torch.equal(layer.weight[:dim].float(), stored.float())
    switched.set_loras([])
    for name, value in before.items():
        assert torch.equal(value.float(), switched.transformer.state_dict()[name].float()), name


def test_fp8_by_flag_takes_the_layers_that_the_file_has_in_bfloat16(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    source = folders("wan")
    file = fp8_files.comfy_scaled(load_file(source / WEIGHTS))
    for name in [name for name in file.stored if "ffn" in name and "scale" in name]:
        del file.stored[name]
    for name, meant in file.meant.items():
        if "ffn" in name:
            file.stored[name] = meant.bfloat16()
    folder = write_fp8(tmp_path / "fp8", source, file)
    held = set(eight_bit_layers(load_pipeline(folder, device="cpu")))
    assert held
    assert not any("feed_forward" in name for name in held)
    both = set(eight_bit_layers(load_pipeline(folder, device="cpu", quantization="fp8-all")))
    assert {name for name in both - held if "feed_forward" in name} == both - held != set()


LAYER = "blocks.0.ffn.net.2"


def without(*names: str) -> Callable[[Fp8File], None]:
    def change(file: Fp8File) -> None:
        for name in names:
            del file.stored[name]

    return change


def with_tensor(name: str, tensor: torch.Tensor) -> Callable[[Fp8File], None]:
    return lambda file: file.stored.__setitem__(name, tensor)


def with_byte(value: int) -> Callable[[Fp8File], None]:
    return lambda file: file.stored[f"{LAYER}.weight"].view(torch.uint8)[0].fill_(value)


def text(value: str) -> torch.Tensor:
    return torch.tensor(list(value.encode()), dtype=torch.uint8)


@table(
    ("change", "said"),
    [
        (without(f"{LAYER}.scale_weight"), rf"{LAYER}.weight is stored as F8_E4M3 .* its own is missing"),
        (
            with_tensor(f"{LAYER}.scale_weight", torch.ones(3)),
            rf"{LAYER}.scale_weight is F32 \[3\]; expected F32 .* \[\] or",
        ),
        (with_tensor(f"{LAYER}.scale_weight", torch.tensor(0.0)), rf"{LAYER}.scale_weight holds 0; expected positive"),
        (with_tensor(f"{LAYER}.scale_weight", torch.tensor(float("nan"))), rf"{LAYER}.scale_weight holds nan"),
        (with_tensor(f"{LAYER}.scale_weight", torch.tensor(float("inf"))), rf"{LAYER}.scale_weight holds inf"),
        (with_tensor(f"{LAYER}.scale_weight", torch.tensor(-1.0)), rf"{LAYER}.scale_weight holds -1"),
        (with_tensor(f"{LAYER}.weight_scale", torch.tensor(1.0)), rf"{LAYER}.weight has two scales"),
        (
            with_tensor("lost.scale_weight", torch.tensor(1.0)),
            r"lost.scale_weight is a scale, and lost.weight is missing",
        ),
        (with_tensor("proj_out.scale_weight", torch.tensor(1.0)), r"proj_out.weight is stored as BF16, which has none"),
        (with_tensor(f"{LAYER}.weight_scale_inv", torch.ones(1, 1)), r"one scale per block of 128 x 128 numbers"),
        (with_byte(0x7F), rf"tensor {LAYER}.weight holds NaN"),
        (
            with_tensor(f"{LAYER}.comfy_quant", text('{"format": "nvfp5"}')),
            r"expected format .*float8_e4m3fn .*got 'nvfp5'",
        ),
        (with_tensor(f"{LAYER}.comfy_quant", text("{")), rf"{LAYER}.comfy_quant: "),
        (
            with_tensor(f"{LAYER}.comfy_quant", torch.zeros(9999, dtype=torch.uint8)),
            r"expected up to 4096 bytes of JSON",
        ),
        (
            with_tensor(f"{LAYER}.weight", torch.zeros(2, 2, dtype=torch.int8)),
            r"stored as I8.*reads 8-bit floats and GGUF",
        ),
        (
            lambda file: file.metadata.update(_quantization_metadata="[]"),
            r"_quantization_metadata.*expected a JSON object",
        ),
    ],
)
def test_what_cannot_be_right_is_named(
    folders: Callable[[str], Path], tmp_path: Path, change: Callable[[Fp8File], None], said: str
) -> None:
    source = folders("wan")
    file = fp8_files.comfy_scaled(load_file(source / WEIGHTS))
    change(file)
    with pytest.raises(ModelLoadError, match=said) as caught:
        load_pipeline(write_fp8(tmp_path / "fp8", source, file), device="cpu")
    assert WEIGHTS.name in str(caught.value)


def test_other_quantizations_in_config_json_stay_refused(folders: Callable[[str], Path], tmp_path: Path) -> None:
    source = folders("wan")
    file = fp8_files.modelopt(load_file(source / WEIGHTS))
    for number, settings in enumerate(
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, {"quant_method": "fbgemm"})
    ):
        folder = write_fp8(tmp_path / str(number), source, file, settings)
        with pytest.raises(ModelLoadError, match="the weights are quantised"):
            inspect_pipeline(RuntimeConfig(model_path=folder, device="cpu"))


@pytest.mark.gpu
def test_layers_of_a_file_multiply_in_eight_bits_on_a_gpu(folders: Callable[[str], Path], tmp_path: Path) -> None:
    source = folders("flux1")
    file = fp8_files.comfy_scaled(load_file(source / WEIGHTS))
    given = {"device": "cuda", "dtype": "bfloat16"}
    quantized = load_pipeline(write_fp8(tmp_path / "fp8", source, file), **given)
    media = quantized(small_request(quantized))
    assert "fp8 products" in {row.implementation for row in media.attention_report.products}
    plain = load_pipeline(write(tmp_path / "plain", source, file.meant), **given)
    expected = torch.as_tensor(plain(small_request(plain)).frames).float()
    assert float((torch.as_tensor(media.frames).float() - expected).abs().mean()) < 16.0
