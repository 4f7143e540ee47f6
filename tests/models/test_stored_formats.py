"""Weights in 8 and 4 bits, as ComfyUI marks them: their numbers against formulas in float64, what a model holds and
computes of them, LoRA files, offloading, plans, `info`, and hostile files."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy_files
import numpy
import pytest
import torch
from comfy_files import WRITERS, Tensors, mark_of, quantised
from lora_kinds import of_every_kind
from offloaded_pipelines import StrictTransfers, planned
from safetensors.torch import load_file, save_file
from tables import table
from tiny_families import WRITERS as FAMILIES
from tiny_families import small_request

from diffusion_runtime import Pipeline, RuntimeConfig, load_pipeline
from diffusion_runtime.errors import ConfigError, ModelLoadError
from diffusion_runtime.kernels.fp8_rows.reference import QuantizedRows
from diffusion_runtime.kernels.int8_rows import api, reference
from diffusion_runtime.layers.eight_bit_linear import ProductCounter, eight_bit_layers
from diffusion_runtime.layers.int8_linear import Int8Linear
from diffusion_runtime.layers.linear import Linear
from diffusion_runtime.layers.stored_linear import StoredLinear
from diffusion_runtime.layers.weight_share import WeightShare
from diffusion_runtime.loading import prepare
from diffusion_runtime.loading.native_model import PreparedModel
from diffusion_runtime.memory.weight_unit import num_bytes_of
from diffusion_runtime.models.weight_summary import summarise_weights
from diffusion_runtime.parallel.collectives import RankGroup
from diffusion_runtime.weights.quantization import Quantization
from diffusion_runtime.weights.stored_formats.registry import FORMATS
from diffusion_runtime.weights.stored_tensors import stored_rows
from diffusion_runtime.weights.tensor_files import SafetensorsFile

WEIGHTS = Path("transformer") / "diffusion_pytorch_model.safetensors"
CPU = torch.device("cpu")
NO_PRODUCTS = "this CPU has no products of 8-bit integers (VNNI)"


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def of(family: str) -> Path:
        if family not in made:
            made[family] = FAMILIES[family](tmp_path_factory.mktemp(family) / "model")
        return made[family]

    return of


def test_every_format_has_a_case() -> None:
    numbers = numpy.random.default_rng(0).normal(0, 1, (4, 256))
    written = {write(numbers).mark["format"] for write in WRITERS.values()}
    # An alias, and what tests/models/test_fp8_files.py writes.
    missing = FORMATS.keys() - {"awq", "float8_e4m3fn", "float8_e5m2"} - written
    assert not missing, "write the format after its formula in tests/comfy_files.py, with a line in WRITERS"


@table("name", WRITERS)
def test_numbers_are_those_of_the_formula(name: str, tmp_path: Path) -> None:
    """Read whole, by rows, and as a layer holds them; more rows and blocks than one tile of scales has."""
    numbers = numpy.random.default_rng(0).normal(0, 0.05, (200, 512))
    numbers[3, 17] = 2.0
    made = WRITERS[name](numbers)
    tensors = {f"a.{suffix}": tensor.contiguous() for suffix, tensor in made.tensors.items()}
    save_file(tensors | {"a.comfy_quant": mark_of(made.mark)}, tmp_path / "a.safetensors")
    with contextlib.closing(SafetensorsFile(tmp_path / "a.safetensors")) as file:
        rows = stored_rows([file])
        assert rows.keys() == {"a.weight"}
        (whole,) = rows["a.weight"]
        assert whole.shape == (200, 512)
        error = (whole.numbers(torch.float32).double() - torch.from_numpy(made.meant)).abs().max()
        assert float(error) <= 1e-6 * numpy.abs(made.meant).max()
        some = whole.some(130, 170)
        assert torch.equal(some.numbers(torch.float32), whole.numbers(torch.float32)[130:170])
        parts = [whole.some(0, 130), whole.some(130, 200)]
        layer = StoredLinear(512, 200, bias=False, counter=ProductCounter())
        layer.expect([part.packed_part for part in parts])
        expected = layer.weight.nbytes
        layer.hold([part.packed() for part in parts], CPU)
        assert layer.weight.nbytes == expected
        assert torch.equal(layer.numbers(torch.float32), whole.numbers(torch.float32))
        # A scale per tensor is kept by row, and everything aligned.
        assert whole.packed_part.num_bytes <= 1.02 * sum(tensor.nbytes for tensor in tensors.values())
        # Weights that wait elsewhere are NaN, whatever format they have.
        layer.weight.data.fill_(255)
        assert layer.numbers(torch.float32).isnan().all()


def takes_blocks(tensors: Tensors, multiple: int) -> Callable[[str], bool]:
    def takes(name: str) -> bool:
        shape = tensors[name].shape
        return name.endswith(".weight") and "block" in name and len(shape) == 2 and shape[1] % multiple == 0

    return takes


def write_both(folder: Path, tmp_path: Path, write: comfy_files.Writer, multiple: int = 16) -> tuple[str, str]:
    """Files of a transformer, quantised and of the numbers that it stands for."""
    tensors = load_file(folder / WEIGHTS)
    stored, meant = quantised(tensors, write, takes_blocks(tensors, multiple))
    save_file(stored, tmp_path / "quantised.safetensors")
    save_file(meant, tmp_path / "meant.safetensors")
    return str(tmp_path / "quantised.safetensors"), str(tmp_path / "meant.safetensors")


def load(folder: Path, path: str | None = None, **values: Any) -> Pipeline:
    loaded = load_pipeline(str(folder), device="cpu", transformer_path=path, **values)
    assert isinstance(loaded, Pipeline)
    return loaded


def held_numbers(pipeline: Pipeline) -> dict[str, torch.Tensor]:
    """The parameters of a transformer, those of quantised layers as the numbers they stand for."""
    state = dict(pipeline.transformer.state_dict())
    for name, layer in pipeline.transformer.named_modules():
        if isinstance(layer, StoredLinear):
            state[f"{name}.weight"] = layer.numbers(torch.float32)
        elif isinstance(layer, Int8Linear):
            rows = QuantizedRows(layer.weight, state.pop(f"{name}.weight_scale"))
            state[f"{name}.weight"] = reference.dequantize(rows, layer.group_size, torch.float32)
    return state


@table(
    ("family", "name", "multiple", "kind"),
    [
        ("flux1", "int8 ConvRot 16", 16, Int8Linear),
        ("wan", "int8, a scale per tensor", 16, Int8Linear),
        ("ltx2", "int8 ConvRot 16", 16, Int8Linear),
        ("flux1", "nvfp4", 16, StoredLinear),
        ("ltx2", "nvfp4", 16, StoredLinear),
        ("wan", "mxfp8", 32, StoredLinear),
        ("flux1", "convrot_w4a4", 16, StoredLinear),
    ],
)
def test_layers_stay_as_they_are_stored(
    folder_of: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    name: str,
    multiple: int,
    kind: type,
) -> None:
    """Fused projections, rows in another order (LTX-2), and what ran is counted by format."""
    monkeypatch.setattr(api, "_has_vnni", lambda: False)
    folder = folder_of(family)
    path, meant = write_both(folder, tmp_path, WRITERS[name], multiple)
    pipeline, plain = load(folder, path), load(folder, meant)
    layers = [layer for layer in pipeline.transformer.modules() if isinstance(layer, kind)]
    assert layers
    numbers = held_numbers(pipeline)
    for each, expected in plain.transformer.state_dict().items():
        assert torch.allclose(numbers[each], expected, rtol=1e-5, atol=1e-6), each
    media = pipeline(small_request(pipeline))
    apart = torch.as_tensor(media.frames).int() - torch.as_tensor(plain(small_request(plain)).frames).int()
    assert int(apart.abs().max()) <= 1
    counted = {row.implementation for row in media.attention_report.products}
    title = NO_PRODUCTS if kind is Int8Linear else FORMATS[name].described.split()[0]
    assert any(title in each for each in counted), counted
    assert any("as in the file: " in note for note in media.attention_report.notes)


def test_loras_are_merged_and_can_be_switched(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder, block = folder_of("flux1"), "transformer_blocks.0.attn"
    qkv = "double_blocks.0.joint_attention.qkv.weight"
    lora, added = of_every_kind([f"{block}.to_{part}" for part in "qkv"], 32)
    save_file(lora, tmp_path / "style.safetensors")
    for name in ("nvfp4", "int8 ConvRot 16"):
        path, _ = write_both(folder, tmp_path, WRITERS[name])
        fresh, switched = load(folder, path, lora=[str(tmp_path / "style.safetensors")]), load(folder, path)
        before = {each: value.clone() for each, value in switched.transformer.state_dict().items()}
        without = held_numbers(switched)[qkv]
        switched.set_loras([str(tmp_path / "style.safetensors")])
        # Merged rows are numbers of the model's dtype again, or the format's own.
        merged = without + torch.cat(list(added.values()))
        apart = held_numbers(switched)[qkv] - merged
        assert float(apart.abs().max()) < 0.02 * float(merged.abs().max()), name
        for loras, wanted in (([], before), ([str(tmp_path / "style.safetensors")], fresh.transformer.state_dict())):
            switched.set_loras(loras)
            for each, value in switched.transformer.state_dict().items():
                assert torch.equal(value, wanted[each]), (name, each)


def test_a_lora_adds_to_the_numbers_of_every_format(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    """Exactly where the rows become plain numbers; 8-bit rows are quantised again."""
    folder, changed = folder_of("flux1"), "transformer_blocks.0.ff.net.2"
    random = torch.Generator().manual_seed(0)
    down, up = torch.randn(2, 128, generator=random), torch.randn(32, 2, generator=random)
    lora = {f"transformer.{changed}.lora_A.weight": down, f"transformer.{changed}.lora_B.weight": up}
    save_file(lora, tmp_path / "style.safetensors")
    tensors, wrong = load_file(folder / WEIGHTS), {}
    for name in ("int8, a scale per row", "int8 ConvRot 64", "mxfp8", "convrot_w4a4", "svdquant_w4a4", "awq_w4a16"):
        stored, meant = quantised(tensors, WRITERS[name], f"{changed}.weight".__eq__)
        save_file(stored, tmp_path / "a.safetensors")
        pipeline = load(folder, str(tmp_path / "a.safetensors"), lora=[str(tmp_path / "style.safetensors")])
        expected = meant[f"{changed}.weight"] + up @ down
        off = held_numbers(pipeline)["double_blocks.0.feed_forward.down.weight"] - expected
        wrong[name] = float(off.abs().max() / expected.abs().max())
    assert {name for name, error in wrong.items() if error > (1e-2 if "int8" in name else 1e-6)} == set(), wrong


@pytest.mark.slow
def test_offloaded_weights_compute_the_same(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    """From the machine's memory, whole or by blocks, or from their files, read with what belongs to them."""
    folder = folder_of("flux1")
    for name in ("nvfp4", "int8 ConvRot 16"):
        path, _ = write_both(folder, tmp_path, WRITERS[name])
        pipeline = load(folder, path)
        expected = pipeline(small_request(pipeline)).frames
        for mode, waits in (("model", False), ("layers", False), ("layers", True)):
            prepared = prepare(RuntimeConfig(str(folder), device="cpu", transformer_path=path))
            assert isinstance(prepared, PreparedModel)
            resident = {"transformer": 1} if mode == "layers" else {}
            plan = planned(prepared, mode, resident, waits_in_files=waits)
            transfers = None if waits else StrictTransfers()
            offloaded = plan.load(transfers=transfers)
            if transfers is not None and offloaded.parts.offloading is not None:
                for part in offloaded.parts.offloading.parts:
                    transfers.hide(part.arena.bytes)
            assert (offloaded(small_request(offloaded)).frames == expected).all(), (name, mode, waits)
            offloaded.close()


def test_plans_and_info_know_the_file(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder = folder_of("flux1")
    path, _ = write_both(folder, tmp_path, WRITERS["nvfp4"])
    summary = summarise_weights(Path(path))
    assert summary.formats == {"NVFP4": summary.kinds["U8"]}
    assert summary.families == ("FLUX.1",)
    pipeline = load(folder, path)
    prepared = prepare(RuntimeConfig(model_path=str(folder), device="cpu", transformer_path=path, memory_limit="8GB"))
    plan = prepared.planned_for(()).description.memory
    assert plan is not None
    (transformer,) = plan.demand.transformers
    assert transformer.total == num_bytes_of(pipeline.transformer)


def test_int8_by_flag_is_what_a_file_has(folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """ConvRot in the largest groups that fit each layer, apart from ties of rounding."""
    monkeypatch.setattr(api, "_has_vnni", lambda: False)
    for family in ("wan", "flux1"):
        folder = folder_of(family)
        plain, online = load(folder), load(folder, quantization="int8")
        layers = eight_bit_layers(online.transformer)
        assert layers
        assert all(isinstance(layer, Int8Linear) for layer in layers.values())
        for name, layer in layers.items():
            assert layer.group_size == max(size for size in (16, 64, 256) if layer.in_features % size == 0)
            weight = plain.transformer.get_parameter(f"{name}.weight").double().numpy()
            made = comfy_files.int8(weight, layer.group_size)
            torch.testing.assert_close(layer.weight_scale, made.tensors["weight_scale"], rtol=1e-6, atol=0)
            off = (layer.weight.int() - made.tensors["weight"].int()).abs()
            assert int(off.max()) <= 1
            assert float((off > 0).float().mean()) < 1e-3
        report = online(small_request(online)).attention_report
        assert {row.implementation for row in report.products} == {f"weights dequantised per call: {NO_PRODUCTS}"}
        described = prepare(RuntimeConfig(str(folder), device="cpu", quantization="int8")).description.quantization
        assert str(described).startswith(f"int8: {len(layers)} of ")
        ignoring = load(folder, quantization="int8", quantization_ignored_layers=[next(iter(layers))])
        assert eight_bit_layers(ignoring.transformer).keys() == layers.keys() - {next(iter(layers))}


def test_int8_by_flag_is_bit_for_bit_its_file(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    """A file of what the flag's own rounding gives each tensor, apart from the fused weights that read it."""
    for family in ("wan", "flux1"):
        folder = folder_of(family)
        tensors, stored = load_file(folder / WEIGHTS), {}
        takes = takes_blocks(tensors, 16)
        for name, tensor in tensors.items():
            stored[name] = tensor
            if takes(name):
                group = max(size for size in (16, 64, 256) if tensor.shape[1] % size == 0)
                rows, layer = api.quantize_rows(tensor, group), name.removesuffix("weight")
                stored |= {name: rows.values, f"{layer}weight_scale": rows.scales}
                mark = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": group}
                stored[f"{layer}comfy_quant"] = mark_of(mark)
        save_file(stored, tmp_path / "a.safetensors")
        online = eight_bit_layers(load(folder, quantization="int8").transformer)
        of_file = eight_bit_layers(load(folder, str(tmp_path / "a.safetensors")).transformer)
        assert online
        for name, layer in online.items():
            assert torch.equal(layer.weight, of_file[name].weight), name
            assert torch.equal(layer.weight_scale, of_file[name].weight_scale), name


def test_products_in_int8_are_near_those_of_the_weights(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every kind of product of a layer, as on a GPU: within the specification's own error."""
    monkeypatch.setattr(Int8Linear, "refusal_of", lambda *_: None)
    for family in ("wan", "flux1", "z_image"):
        online, plain = load(folder_of(family), quantization="int8"), load(folder_of(family))
        media, expected = (each(small_request(each, 1)) for each in (online, plain))
        assert {row.implementation for row in media.attention_report.products} == {"int8 products"}
        apart = torch.as_tensor(media.frames).float() - torch.as_tensor(expected.frames).float()
        assert float(apart.abs().mean()) < 8


def test_processes_do_not_share_rotated_or_stored_weights(folder_of: Callable[[str], Path]) -> None:
    """What they share is cut between the numbers of a group."""
    transformer = load(folder_of("wan")).transformer
    for layer in transformer.modules():
        if isinstance(layer, Linear):
            layer.share = WeightShare("row", (), RankGroup())
    with pytest.raises(ConfigError, match=r"is not shared by processes in this version: it is rotated in groups"):
        Quantization.of("wan", "int8", ()).apply({"transformer": transformer})


LAYER = "transformer_blocks.0.attn.to_q"


def put(name: str, tensor: torch.Tensor) -> Callable[[Tensors], None]:
    return lambda stored: stored.__setitem__(name, tensor)


def drop(name: str) -> Callable[[Tensors], None]:
    return lambda stored: stored.__delitem__(name)


def scaled(suffix: str, value: float) -> Callable[[Tensors], None]:
    def change(stored: Tensors) -> None:
        tensor = stored[f"{LAYER}.{suffix}"].float()
        tensor.view(-1)[0] = value
        stored[f"{LAYER}.{suffix}"] = tensor.to(stored[f"{LAYER}.{suffix}"].dtype)

    return change


def marked(**settings: object) -> Callable[[Tensors], None]:
    return put(f"{LAYER}.comfy_quant", mark_of(settings))


NESTED = torch.tensor(list(b"[" * 3000), dtype=torch.uint8)


@table(
    ("name", "change", "said"),
    [
        (
            "int8 ConvRot 16",
            drop(f"{LAYER}.weight_scale"),
            rf"{LAYER}.weight .* its own is missing: expected {LAYER}.wei",
        ),
        (
            "int8 ConvRot 16",
            put(f"{LAYER}.weight_scale", torch.ones(3)),
            rf"{LAYER}.weight_scale is F32 \[3\]; expected",
        ),
        ("int8 ConvRot 16", scaled("weight_scale", torch.nan), rf"{LAYER}.weight_scale holds nan; expected positive"),
        ("int8 ConvRot 16", scaled("weight_scale", 0), rf"{LAYER}.weight_scale holds 0; expected positive"),
        ("int8 ConvRot 16", scaled("weight_scale", -1), rf"{LAYER}.weight_scale holds -1; expected positive"),
        ("int8 ConvRot 16", scaled("weight_scale", torch.inf), rf"{LAYER}.weight_scale holds inf; expected positive"),
        ("int8 ConvRot 16", drop(f"{LAYER}.comfy_quant"), rf"stored as I8.*{LAYER}.weight.*comfy_quant"),
        ("int8 ConvRot 16", marked(format="int9"), rf"{LAYER}.comfy_quant'?: expected format .*got 'int9'"),
        ("int8 ConvRot 16", marked(format="nvfp4"), rf"{LAYER}.weight is stored as I8; expected U8 in format 'nvfp4'"),
        ("int8 ConvRot 16", marked(format=["int8_tensorwise"]), rf"{LAYER}.comfy_quant.*with key 'format'"),
        (
            "int8 ConvRot 16",
            marked(format="int8_tensorwise", convrot=True, convrot_groupsize=48),
            rf"{LAYER}.*convrot_groupsize: expected 16 or 64 or 256, got 48",
        ),
        (
            "int8 ConvRot 16",
            marked(format="int8_tensorwise", convrot=True, convrot_groupsize=256),
            rf"{LAYER}.weight: expected a matrix with rows of a multiple of 256 numbers",
        ),
        (
            "int8 ConvRot 16",
            marked(format="int8_tensorwise", convrot="yes"),
            rf"{LAYER}.*convrot: expected true or false, got 'yes'",
        ),
        *(
            (
                name,
                marked(format=name, convrot=True),
                rf"{LAYER}.*convrot: expected none in format {name}, whose rows",
            )
            for name in ("mxfp8", "nvfp4")
        ),
        ("int8 ConvRot 16", put(f"{LAYER}.comfy_quant", NESTED), rf"{LAYER}.comfy_quant"),
        (
            "int8 ConvRot 16",
            put(f"{LAYER}.comfy_quant", torch.zeros(100_000_000, dtype=torch.uint8)),
            rf"{LAYER}.comfy_quant.*expected up to 4096 bytes of JSON, got 100000000",
        ),
        (
            "int8 ConvRot 16",
            put(f"model.diffusion_model.{LAYER}.weight", torch.ones(32, 32).bfloat16()),
            rf"{LAYER}.weight are one tensor of a transformer, given twice",
        ),
        (
            "int8 ConvRot 16",
            put(f"model.diffusion_model.{LAYER}.weight", torch.ones(32, 32, dtype=torch.int8)),
            rf"{LAYER}.weight are one tensor of a transformer, given twice",
        ),
        (
            "int8 ConvRot 16",
            put(f"{LAYER}.scale_weight", torch.ones(32)),
            rf"{LAYER}.weight has two scales",
        ),
        ("int8 ConvRot 16", put(f"{LAYER}.weight_scale_2", torch.ones(())), rf"{LAYER}.weight_scale_2.*no such tensor"),
        (
            "int8 ConvRot 16",
            put("lost.weight_scale", torch.ones(())),
            "lost.weight_scale is a scale, and lost.weight is missing",
        ),
        (
            "int8 ConvRot 16",
            put(f"{LAYER}.weight_scale.comfy_quant", mark_of({"format": "nvfp4"})),
            rf"{LAYER}.weight_scale.comfy_quant is the mark of a layer, and {LAYER}.weight_scale.weight is missing",
        ),
        (
            "int8 ConvRot 16",
            put(f"{LAYER}.weight", torch.ones(32, 16, dtype=torch.int8)),
            rf"{LAYER}.weight is \[32, 16\], expected \[32, 32\]",
        ),
        ("nvfp4", drop(f"{LAYER}.weight_scale_2"), rf"{LAYER}.weight .* expected {LAYER}.weight_scale_2"),
        ("nvfp4", scaled("weight_scale_2", torch.nan), rf"{LAYER}.weight_scale_2 holds nan; expected positive"),
        ("nvfp4", scaled("weight_scale_2", 0), rf"{LAYER}.weight_scale_2 holds 0; expected positive"),
        (
            "nvfp4",
            scaled("weight_scale", torch.nan),
            rf"{LAYER}.weight_scale holds nan; expected numbers of at least 0",
        ),
        ("nvfp4", scaled("weight_scale", -2), rf"{LAYER}.weight_scale holds -2; expected numbers of at least 0"),
        (
            "nvfp4",
            put(f"{LAYER}.weight_scale", torch.ones(32, 2).to(torch.float8_e4m3fn)),
            rf"{LAYER}.weight_scale is F8_E4M3 \[32, 2\]; expected F8_E4M3 \[128, 4\]",
        ),
        ("nvfp4", put(f"{LAYER}.weight", torch.ones(512, dtype=torch.uint8)), rf"{LAYER}.weight: expected a matrix"),
        ("mxfp8", scaled("weight_scale", 255), rf"{LAYER}.weight has a block whose scale is NaN"),
        ("mxfp8", scaled("weight", torch.nan), rf"{LAYER}.weight holds NaN"),
        ("convrot_w4a4", scaled("weight_scale", -1), rf"{LAYER}.weight_scale holds -1; expected positive"),
    ],
)
def test_what_cannot_be_right_is_named(
    folder_of: Callable[[str], Path], tmp_path: Path, name: str, change: Callable[[Tensors], None], said: str
) -> None:
    folder = folder_of("flux1")
    tensors = load_file(folder / WEIGHTS)
    stored, _ = quantised(tensors, WRITERS[name], lambda each: each == f"{LAYER}.weight")
    change(stored)
    save_file(stored, tmp_path / "a.safetensors")
    with pytest.raises(ModelLoadError, match=said):
        load(folder, str(tmp_path / "a.safetensors"))


def test_marks_in_the_header_and_beside_the_weight_agree(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder, tensors = folder_of("flux1"), load_file(folder_of("flux1") / WEIGHTS)
    stored, meant = quantised(tensors, WRITERS["nvfp4"], lambda each: each == f"{LAYER}.weight")
    for settings, said in (({"format": "nvfp4"}, None), ({"format": "mxfp8"}, rf"contradicts .*{LAYER}")):
        header = {"_quantization_metadata": json.dumps({"layers": {LAYER: settings}})}
        save_file(stored, tmp_path / "a.safetensors", metadata=header)
        with contextlib.nullcontext() if said is None else pytest.raises(ModelLoadError, match=said):
            load(folder, str(tmp_path / "a.safetensors"))
    del stored[f"{LAYER}.comfy_quant"]
    save_file(
        stored,
        tmp_path / "b.safetensors",
        metadata={"_quantization_metadata": json.dumps({"layers": {LAYER: {"format": "nvfp4"}}})},
    )
    pipeline = load(folder, str(tmp_path / "b.safetensors"))
    numbers = held_numbers(pipeline)["double_blocks.0.joint_attention.qkv.weight"][:32]
    torch.testing.assert_close(numbers, meant[f"{LAYER}.weight"], rtol=1e-5, atol=1e-7)


def test_sizes_that_lie_are_refused_before_memory_is_taken(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    """A head that says more bytes, or other shapes, than the file has."""
    tensors = load_file(folder_of("flux1") / WEIGHTS)
    stored, _ = quantised(tensors, WRITERS["nvfp4"], lambda each: each == f"{LAYER}.weight")
    save_file(stored, tmp_path / "a.safetensors")
    content = (tmp_path / "a.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    head = json.loads(content[8 : 8 + length])
    # The product of the last one would take hours.
    for shape in ([1 << 40, 16], [64, 16], [32, -16], [1 << 62] * 200_000):
        head[f"{LAYER}.weight"]["shape"] = shape
        text = json.dumps(head).encode()
        (tmp_path / "b.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
        with pytest.raises(ModelLoadError, match=f"damaged or not a whole|{re.escape(LAYER)}"):
            load(folder_of("flux1"), str(tmp_path / "b.safetensors"))


# ComfyUI's names of what transformers has in the whole model.
COMFY_NAMES = {"model.language_model.": "model.", "model.visual.": "visual.", "model.vision_tower.": ""}


def as_comfy_names(tensors: Tensors) -> Tensors:
    for theirs, ours in COMFY_NAMES.items():
        tensors = {name.replace(theirs, ours): tensor for name, tensor in tensors.items()}
    return tensors


def test_awqs_factors_of_inputs_are_multiplied_in(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    """qwen3vl_32b nvfp4_awq: an input times the factors, which is a weight whose columns are multiplied."""
    folder = folder_of("qwen_image_21")
    tensors = as_comfy_names(load_file(next((folder / "text_encoder").glob("*.safetensors"))))
    stored, meant = quantised(tensors, WRITERS["nvfp4"], lambda each: ".mlp." in each and "visual" not in each)
    layers = [each.removesuffix(".weight") for each in tensors if each.endswith("down_proj.weight")]
    random = torch.Generator().manual_seed(1)
    for layer in layers:
        factors = (torch.rand(tensors[f"{layer}.weight"].shape[1], generator=random) + 0.5).bfloat16()
        stored[f"{layer}.pre_quant_scale"] = factors
        stored[f"{layer}.input_scale"] = torch.tensor(0.5)
        meant[f"{layer}.weight"] *= factors.float()
    path = tmp_path / "stored.safetensors"

    def states(content: Tensors) -> torch.Tensor:
        save_file(content, path)
        embeddings: torch.Tensor = load(folder, text_encoder_path=str(path)).text_encoder.encode(["a star"]).embeddings
        return embeddings

    found = states(stored)
    torch.testing.assert_close(found, states(meant), rtol=1e-4, atol=1e-5)
    place = f"{layers[0]}.pre_quant_scale"
    assert not torch.allclose(found, states({name: each for name, each in stored.items() if name != place}), atol=1e-4)
    for changed, told in (
        ({place: torch.ones(3)}, r"pre_quant_scale is F32 \[3\]; expected .* \[48\] beside"),
        ({place: stored[place].float().fill_(float("nan"))}, r"pre_quant_scale holds nan; expected positive numbers"),
        ({place: torch.zeros(48)}, r"pre_quant_scale holds 0; expected positive numbers"),
        ({"model.norm.pre_quant_scale": torch.ones(32)}, r"is for a quantised weight, and model.norm.weight is stored"),
        ({"nothing.pre_quant_scale": torch.ones(32)}, r"is for a quantised weight, and nothing.weight is missing"),
        ({f"{layers[0]}.bias": torch.ones(32)}, r"1 tensors beside weights that are read have no place in the model"),
    ):
        with pytest.raises(ModelLoadError, match=told):
            states(stored | changed)


def test_text_encoders_are_dequantised_as_they_are_read(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    """qwen_2.5_vl int8 ConvRot, gemma_3 fp4_mixed: transformers' modules, and UMT5, a module of ours."""
    for family, component, name in (
        ("qwen_image", "text_encoder", "nvfp4"),
        ("qwen_image", "text_encoder", "int8 ConvRot 16"),
        ("wan", "text_encoder", "int8 ConvRot 16"),
        ("ltx2", "text_encoder", "nvfp4"),
        ("flux2", "text_encoder", "int8 ConvRot 16"),
        ("flux1", "text_encoder", "int8 ConvRot 16"),
        ("z_image", "text_encoder", "mxfp8"),
    ):
        folder = folder_of(family)
        tensors = load_file(next((folder / component).glob("*.safetensors")))

        def takes(each: str, tensors: Tensors = tensors) -> bool:
            return (
                tensors[each].dim() == 2
                and tensors[each].shape[1] % 16 == 0
                and ("attn" in each or "Attention.q" in each)
            )

        stored, meant = quantised(tensors, WRITERS[name], takes)
        save_file(stored, tmp_path / "stored.safetensors")
        save_file(meant, tmp_path / "meant.safetensors")
        found, expected = (
            load(folder, text_encoder_path=str(tmp_path / f"{each}.safetensors")) for each in ("stored", "meant")
        )
        first, second = (each.text_encoder.encode(["a red star"]).embeddings for each in (found, expected))
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-5)
        assert "dequantised at load: " in found.text_encoder.implementation
        assert "dequantised" not in expected.text_encoder.implementation


def test_ltx2s_connectors_are_dequantised_as_they_are_read(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    """They lie in files of transformers and text encoders, which are in these formats."""
    folder = folder_of("ltx2")
    tensors = load_file(next((folder / "connectors").glob("*.safetensors")))

    def takes(name: str) -> bool:
        return tensors[name].dim() == 2 and name.endswith("weight") and tensors[name].shape[1] % 16 == 0

    def states(content: Tensors) -> torch.Tensor:
        save_file(content, tmp_path / "a.safetensors")
        encoder = load(folder, connectors_path=str(tmp_path / "a.safetensors")).text_encoder
        embeddings: torch.Tensor = encoder.encode(["a red star"]).embeddings
        return embeddings

    for name in ("int8 ConvRot 16", "nvfp4"):
        stored, meant = quantised(tensors, WRITERS[name], takes)
        torch.testing.assert_close(states(stored), states(meant), rtol=1e-4, atol=1e-5)
    scale = next(each for each in stored if each.endswith("weight_scale_2"))
    with pytest.raises(ModelLoadError, match=rf"{re.escape(scale)} holds nan; expected positive numbers"):
        states({**stored, scale: torch.tensor(torch.nan)})
