"""`--backend diffusers` of folders whose weights have scales beside them: what is computed and what is said of them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from family_parity import record_latents
from plain_folders import write_plain
from safetensors.torch import load_file, save_file
from tables import table
from test_parity_with_diffusers import assert_equal_to, request

from diffusion_runtime import RuntimeConfig, load_pipeline
from diffusion_runtime.core.model_folder import ModelFolder
from diffusion_runtime.diffusers_bridge.passthrough import DiffusersPipeline
from diffusion_runtime.diffusers_bridge.stored_components import load_stored
from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.loading import inspect_pipeline
from diffusion_runtime.weights.tensor_files import SafetensorsFile
from scripts.train_embedded.eight_bits import WEIGHTS, write_folder

TRANSFORMER = Path("transformer") / WEIGHTS["transformer"]
MODULES = ("transformer", "text_encoder", "vae")


def in_int8(folder: Path) -> None:
    write_folder(folder, folder)


def in_rotated_int8(folder: Path) -> None:
    write_folder(folder, folder, rotates=True)


def in_scaled_fp8(folder: Path) -> None:
    """As ComfyUI's fp8_scaled files and those of MiniMax-H3: no config says so."""
    for component, name in WEIGHTS.items():
        stored = {}
        for key, value in load_file(folder / component / name).items():
            stored[key] = value.contiguous()
            if value.ndim == 2 and key.endswith(".weight"):
                scale = value.float().abs().amax() / 448
                stored[key] = (value.float() / scale).to(torch.float8_e4m3fn)
                stored[f"{key}_scale"] = scale
        save_file(stored, folder / component / name, metadata={"format": "pt"})


ROTATED = ("int8 ConvRot 16 and int8 and int8 ConvRot 64", "int8 ConvRot 64 and int8 ConvRot 16")
WAYS: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "int8": (in_int8, ["text_encoder int8", "transformer int8", "vae int8"]),
    "rotated": (in_rotated_int8, [f"text_encoder {ROTATED[0]}", f"transformer {ROTATED[1]}", "vae int8"]),
    "fp8": (in_scaled_fp8, ["text_encoder 8-bit floats", "transformer 8-bit floats"]),
}


def diffusers_pipeline(folder: Path, dtype: str = "float32") -> DiffusersPipeline:
    found = load_pipeline(str(folder), backend="diffusers", device="cpu", dtype=dtype)
    assert isinstance(found, DiffusersPipeline)
    return found


@pytest.fixture
def stored(tiny_wan_copy: Callable[[], Path]) -> Path:
    folder = tiny_wan_copy()
    in_int8(folder)
    return folder


@pytest.mark.parametrize("way", WAYS)
def test_latents_are_those_of_the_native_model(
    tiny_wan_copy: Callable[[], Path], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    folder, (store, formats) = tiny_wan_copy(), WAYS[way]
    store(folder)
    kinds = {tensor.dtype for name in WEIGHTS for tensor in load_file(folder / name / WEIGHTS[name]).values()}
    assert kinds & {torch.int8, torch.float8_e4m3fn}
    theirs = diffusers_pipeline(folder)
    assert_equal_to(
        load_pipeline(str(folder), device="cpu", dtype="float32"),
        theirs.pipeline,
        [request()],
        record_latents(monkeypatch),
    )
    said = theirs(request(negative_prompt="")).attention_report.notes
    planned = inspect_pipeline(RuntimeConfig(str(folder), backend="diffusers", device="cpu", dtype="float32"))
    assert planned.quantization is not None
    notes = [note for note in said if "dequantised at load, computed in float32" in note]
    assert planned.quantization == "; ".join(notes)
    # The decoder has convolutions alone, which fp8_scaled files have in 16 bits.
    assert sorted(re.sub(r": stored as (.*), deq.*", r" \1", note) for note in notes) == formats


@table("dtype", ["float32", "bfloat16", "float16"])
def test_modules_are_those_of_from_pretrained_on_plain_numbers(stored: Path, tmp_path: Path, dtype: str) -> None:
    """Down to dtypes, tables that are in no file, and what shares its memory."""
    found = diffusers_pipeline(stored, dtype).pipeline
    expected = diffusers_pipeline(write_plain(stored, tmp_path / "plain"), dtype).pipeline
    for name in MODULES:
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert type(ours) is type(theirs)
        assert ours.training == theirs.training is False
        for kind in ("named_parameters", "named_buffers"):
            values = dict(getattr(theirs, kind)())
            assert [each for each, _ in getattr(ours, kind)()] == list(values)
            for key, value in getattr(ours, kind)():
                assert (value.dtype, value.device) == (values[key].dtype, values[key].device), (name, key)
                assert torch.equal(value, values[key]), (name, key)


class Table(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """Computes a table in the dtype that is torch's default then."""

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(self) -> None:
        super().__init__()
        self.proj = torch.nn.Linear(4, 4)
        self.register_buffer("table", torch.linspace(0.0, 1.0, 7), persistent=False)


def test_tables_have_the_dtype_of_from_pretrained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffusers.Table", Table, raising=False)
    Table().save_pretrained(tmp_path / "vae")
    expected = Table.from_pretrained(tmp_path / "vae", dtype=torch.bfloat16)
    found = load_stored(ModelFolder(tmp_path), "vae", ("diffusers", "Table"), torch.bfloat16)
    assert torch.equal(found.table, expected.table)
    assert (found.table.dtype, torch.get_default_dtype()) == (torch.bfloat16, torch.float32)


def without_a_scale(tensors: dict[str, torch.Tensor]) -> str:
    del tensors["blocks.0.attn1.to_q.weight_scale"]
    return r"blocks.0.attn1.to_q.weight is stored as I8 .*its own is missing"


def with_a_scale_of_zero(tensors: dict[str, torch.Tensor]) -> str:
    tensors["blocks.0.attn1.to_q.weight_scale"][3] = 0.0
    return r"blocks.0.attn1.to_q.weight_scale holds 0; expected positive numbers"


def with_one_scale_too_few(tensors: dict[str, torch.Tensor]) -> str:
    name = "blocks.0.attn1.to_q.weight_scale"
    tensors[name] = tensors[name][:-1].clone()
    return r"blocks.0.attn1.to_q.weight_scale is F32 \[\d+\]; expected"


def with_a_scale_that_nothing_reads(tensors: dict[str, torch.Tensor]) -> str:
    tensors["blocks.0.attn1.to_q.own_scale"] = torch.ones(4)
    return r"do not fit WanTransformer3DModel; unexpected: blocks.0.attn1.to_q.own_scale"


def without_a_bias(tensors: dict[str, torch.Tensor]) -> str:
    del tensors["proj_out.bias"]
    return r"do not fit WanTransformer3DModel; missing: proj_out.bias"


@table(
    "damage",
    [
        without_a_scale,
        with_a_scale_of_zero,
        with_one_scale_too_few,
        with_a_scale_that_nothing_reads,
        without_a_bias,
    ],
)
def test_what_cannot_be_dequantised_is_refused(
    stored: Path, tmp_path: Path, damage: Callable[[dict[str, torch.Tensor]], str]
) -> None:
    folder = Path(shutil.copytree(stored, tmp_path / "model"))
    tensors, file = load_file(folder / TRANSFORMER), SafetensorsFile(folder / TRANSFORMER)
    told = damage(tensors)
    save_file(tensors, folder / TRANSFORMER, metadata=dict(file.metadata))
    file.close()
    with pytest.raises(ModelLoadError, match=told):
        diffusers_pipeline(folder)


def test_a_text_encoder_that_lacks_a_tensor_is_refused(stored: Path) -> None:
    path = stored / "text_encoder" / WEIGHTS["text_encoder"]
    tensors, file = load_file(path), SafetensorsFile(path)
    del tensors["encoder.final_layer_norm.weight"]
    save_file(tensors, path, metadata=dict(file.metadata))
    file.close()
    with pytest.raises(ModelLoadError, match=r"text_encoder: .*missing: encoder.final_layer_norm.weight"):
        diffusers_pipeline(stored)


def test_scales_of_floats_by_a_name_that_nothing_reads(tiny_wan_copy: Callable[[], Path]) -> None:
    folder, name = tiny_wan_copy(), "blocks.0.attn1.to_q.weight"
    tensors = load_file(folder / TRANSFORMER)
    tensors[name] = (100 * tensors[name].float()).to(torch.float8_e4m3fn)
    save_file({**tensors, f"{name}_own_scale": torch.tensor(0.01)}, folder / TRANSFORMER, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"unexpected: blocks.0.attn1.to_q.weight_own_scale"):
        diffusers_pipeline(folder)


def test_another_method_is_left_to_its_package(stored: Path) -> None:
    config = stored / "transformer" / "config.json"
    values = json.loads(config.read_text()) | {"quantization_config": {"quant_method": "of nobody"}}
    config.write_text(json.dumps(values))
    with pytest.raises(ModelLoadError, match=r"quantised: transformer \('of nobody'\)"):
        diffusers_pipeline(stored)
