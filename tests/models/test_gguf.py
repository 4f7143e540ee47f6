"""GGUF files of transformers: blocks stay as they are stored, LoRA files are merged, hostile heads are refused."""

from __future__ import annotations

import itertools
import struct
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from gguf_files import head, tensor, text, write_gguf
from lora_kinds import of_every_kind
from offloaded_pipelines import StrictTransfers, load_offloaded, planned
from original_names import flux1_as_authors
from safetensors.torch import load_file, save_file
from tables import table
from tiny_families import WRITERS, small_request

from diffusion_runtime import Pipeline, RuntimeConfig, load_pipeline
from diffusion_runtime.config import LoraConfig
from diffusion_runtime.errors import ConfigError, ModelLoadError
from diffusion_runtime.kernels.fp8_rows.reference import quantize_rows
from diffusion_runtime.kernels.gguf_blocks import KINDS, dequantize_blocks
from diffusion_runtime.layers.eight_bit_linear import ProductCounter
from diffusion_runtime.layers.fp8_linear import Fp8Linear
from diffusion_runtime.layers.stored_linear import PackedRows, StoredLinear
from diffusion_runtime.loading import prepare
from diffusion_runtime.loading.native_model import PreparedModel
from diffusion_runtime.memory.weight_unit import blocks_of, num_bytes_of, streamed_bytes
from diffusion_runtime.untrusted import gguf_header
from diffusion_runtime.untrusted.gguf_header import TYPES, read_gguf_header
from diffusion_runtime.weights.stored_formats.gguf import GgufBlocks
from diffusion_runtime.weights.stored_formats.plain_numbers import PlainNumbers

WEIGHTS = Path("transformer") / "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def flux1(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return WRITERS["flux1"](tmp_path_factory.mktemp("flux1") / "model")


def gguf_layers(pipeline: Pipeline) -> dict[str, StoredLinear]:
    return {name: layer for name, layer in pipeline.transformer.named_modules() if isinstance(layer, StoredLinear)}


def held_numbers(pipeline: Pipeline) -> dict[str, torch.Tensor]:
    numbers = {f"{name}.weight": layer.numbers(torch.float32) for name, layer in gguf_layers(pipeline).items()}
    return {**pipeline.transformer.state_dict(), **numbers}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("family", ["flux1", "ltx2", "seedvr2"])
def test_blocks_stay_as_they_are_stored(family: str, flux1: Path, tmp_path: Path) -> None:
    """By the authors' names with fused projections, and by diffusers' with q, k and v of several kinds; in LTX-2 rows
    move; in SeedVR2 the authors' names are the only ones."""
    folder = flux1 if family == "flux1" else WRITERS[family](tmp_path / "model")
    tensors = load_file(folder / WEIGHTS)
    named = flux1_as_authors(tensors) if family == "flux1" else tensors
    kinds = itertools.cycle(["Q8_0", "Q4_0", "Q5_1", "Q4_1", "Q5_0"])
    meant = write_gguf(tmp_path / "a.gguf", named, lambda _: next(kinds))
    save_file(meant, tmp_path / "meant.safetensors")
    quantized = load_pipeline(str(folder), device="cpu", transformer_path=str(tmp_path / "a.gguf"))
    plain = load_pipeline(str(folder), device="cpu", transformer_path=str(tmp_path / "meant.safetensors"))
    layers = gguf_layers(quantized)
    assert any("qkv" in name for name in layers)
    assert_same(held_numbers(quantized), plain.transformer.state_dict())
    for layer in layers.values():
        assert layer.weight.nbytes < 0.3 * 4 * layer.in_features * layer.out_features
    request = small_request(quantized)
    media = quantized(request)
    # The plain layers run in oneDNN, which sums in another order.
    apart = torch.as_tensor(media.frames).int() - torch.as_tensor(plain(request).frames).int()
    assert int(apart.abs().max()) <= 1
    assert all("weights dequantised per call: GGUF Q" in row.implementation for row in media.attention_report.products)
    assert any("linear layers have GGUF blocks" in note for note in media.attention_report.notes)


def test_loras_are_merged_and_can_be_switched(flux1: Path, tmp_path: Path) -> None:
    """Rows that a LoRA changes are held in the model's dtype, and as blocks again without it."""
    tensors = load_file(flux1 / WEIGHTS)
    meant = write_gguf(tmp_path / "a.gguf", tensors, lambda _: "Q4_0")
    q, k, v = (f"transformer_blocks.0.attn.to_{part}" for part in "qkv")
    out = "transformer_blocks.0.attn.to_out.0"
    lora, added = of_every_kind((k, v, out), 32)
    save_file(lora, tmp_path / "style.safetensors")
    given = {"device": "cpu", "transformer_path": str(tmp_path / "a.gguf")}
    fresh = load_pipeline(str(flux1), lora=[str(tmp_path / "style.safetensors")], **given)
    switched = load_pipeline(str(flux1), **given)
    before = {name: value.clone() for name, value in switched.transformer.state_dict().items()}
    switched.set_loras([str(tmp_path / "style.safetensors")])
    assert_same(dict(switched.transformer.state_dict()), dict(fresh.transformer.state_dict()))
    layer = gguf_layers(switched)["double_blocks.0.joint_attention.qkv"]
    assert layer.formats == "GGUF Q4_0 and F32"
    expected = [meant[f"{name}.weight"] + added.get(name, 0) for name in (q, k, v)]
    assert torch.allclose(layer.numbers(torch.float32), torch.cat(expected), rtol=1e-6, atol=1e-6)
    layer = gguf_layers(switched)["double_blocks.0.joint_attention.out"]
    expected = [meant[f"{out}.weight"] + added[out]]
    assert torch.allclose(layer.numbers(torch.float32), torch.cat(expected), rtol=1e-6, atol=1e-6)
    switched.set_loras([])
    assert_same(dict(switched.transformer.state_dict()), before)


def test_fp8_by_flag_quantises_the_numbers_of_blocks(flux1: Path, tmp_path: Path) -> None:
    meant = write_gguf(tmp_path / "a.gguf", load_file(flux1 / WEIGHTS), lambda _: "Q8_0")
    path = str(tmp_path / "a.gguf")
    pipeline = load_pipeline(str(flux1), device="cpu", transformer_path=path, quantization="fp8-all")
    layers = {name: each for name, each in pipeline.transformer.named_modules() if isinstance(each, Fp8Linear)}
    layer = layers["single_blocks.0.out"]
    expected = quantize_rows(meant["single_transformer_blocks.0.proj_out.weight"])
    assert torch.equal(layer.weight.float(), expected.values.float())
    assert torch.equal(layer.weight_scale, expected.scales)
    assert gguf_layers(pipeline)


@table("kind", KINDS)
@table("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_multiplies_with_its_numbers_and_counts(kind: str, dtype: torch.dtype) -> None:
    """Of every kind, and rows of another behind them."""
    _, block, num_bytes = next(each for each in TYPES.values() if each[0] == kind)
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(0, 60, (6, 256 // block * num_bytes), generator=generator, dtype=torch.uint8)
    more = torch.randn(2, 256, generator=generator).bfloat16().view(torch.uint8)
    counted: list[str] = []
    counter = ProductCounter()
    counter.start(counted.append)
    layer = StoredLinear(256, 8, bias=True, counter=counter).to(dtype)
    plain = PackedRows(PlainNumbers(torch.bfloat16), (more.view(torch.bfloat16),))
    layer.hold([PackedRows(GgufBlocks(kind), (data,)), plain], torch.device("cpu"))
    x = torch.randn(2, 3, 256, generator=generator).to(dtype)
    weight = torch.cat([dequantize_blocks(data, kind), dequantize_blocks(more, "BF16")]).to(dtype)
    with torch.no_grad():
        assert torch.equal(layer(x), torch.nn.functional.linear(x, weight, layer.bias))
    assert counted == [f"weights dequantised per call: GGUF {kind} and BF16"]


def changing_lora(folder: Path) -> str:
    """A LoRA of one projection, in a file."""
    changed = "transformer.transformer_blocks.0.attn.to_k"
    tensors = {f"{changed}.lora_A.weight": torch.ones(2, 32) / 32, f"{changed}.lora_B.weight": torch.ones(32, 2) / 32}
    save_file(tensors, folder / "offloaded.safetensors")
    return str(folder / "offloaded.safetensors")


@pytest.mark.parametrize("offload", ["model", "layers", "files"])
def test_blocks_are_offloaded_whole_or_streamed(offload: str, flux1: Path, tmp_path: Path) -> None:
    """From the machine's memory, or from their files, with rows that a LoRA gives other bytes."""
    kinds = itertools.cycle(["Q8_0", "Q4_0", "Q5_1"])
    tensors = load_file(flux1 / WEIGHTS)
    write_gguf(tmp_path / "a.gguf", tensors, lambda _: next(kinds))
    given: dict[str, Any] = {
        "transformer_path": str(tmp_path / "a.gguf"),
        "lora": (LoraConfig(changing_lora(tmp_path)),),
    }
    resident = {"transformer": 1} if offload != "model" else {}
    whole = prepare(RuntimeConfig(str(flux1), device="cpu", **given)).load()
    request = small_request(whole, 2)
    if offload == "files":
        prepared = prepare(RuntimeConfig(str(flux1), device="cpu", **given))
        assert isinstance(prepared, PreparedModel)
        pipeline = planned(prepared, "layers", resident, waits_in_files=True).load()
    else:
        transfers = StrictTransfers()
        pipeline = load_offloaded(str(flux1), offload, resident, transfers, **given)
        assert pipeline.parts.offloading is not None
        for part in pipeline.parts.offloading.parts:
            transfers.hide(part.arena.bytes)
    assert gguf_layers(pipeline)
    assert numpy.array_equal(pipeline(request).frames, whole(request).frames)
    assert pipeline.parts.offloading is not None
    assert any(part.stream is not None for part in pipeline.parts.offloading.parts) == (offload != "model")
    with pytest.raises(ConfigError, match=r"give the LoRA files when the model is loaded, or .* --offload none"):
        pipeline.set_loras([])
    assert numpy.array_equal(pipeline(request).frames, whole(request).frames)
    pipeline.close()


@table("lora", [False, True])
@table("quantization", ["none", "fp8"])
def test_the_bytes_that_are_planned_are_those_that_are_loaded(
    quantization: str, lora: bool, flux1: Path, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "a.gguf", load_file(flux1 / WEIGHTS), lambda _: "Q4_0")
    values: dict[str, Any] = {
        "quantization": quantization,
        "lora": (LoraConfig(changing_lora(tmp_path)),) if lora else (),
    }
    config = RuntimeConfig(str(flux1), device="cpu", transformer_path=str(tmp_path / "a.gguf"), **values)
    prepared = prepare(config)
    memory = prepared.planned_for(()).description.memory
    assert memory is not None
    (part,) = memory.demand.transformers
    loaded: Any = prepared.load()
    loaded = loaded.transformer
    assert part.total == num_bytes_of(loaded)
    assert part.blocks == tuple(streamed_bytes(block)[0] for block in blocks_of(loaded))


HUGE = 2**62


@table(
    ("content", "said"),
    [
        (b"", "is cut off in its head"),
        (b"GGUF", "is cut off in its head"),
        (b"GGML" + bytes(100), "does not start with GGUF"),
        (head(version=1), "expected GGUF of version 2 or 3, got 1"),
        (head(version=3 << 24), "the other byte order"),
        (head(num_tensors=HUGE), f"would hold {HUGE} tensors"),
        (head(num_tensors=gguf_header.MAX_TENSORS + 1), f"values, more than {gguf_header.MAX_TENSORS} and"),
        (head(num_values=HUGE), f"1 tensors and {HUGE} values"),
        (head(num_values=1, values=text("k", HUGE)), f"a text in its head would be {HUGE} bytes"),
        (head(num_values=1, values=text("k") + struct.pack("<I", 77)), "has type 77"),
        (head(num_values=1, values=text("k") + struct.pack("<IIQ", 9, 4, HUGE)), f"would hold {HUGE} items of type 4"),
        (head(num_values=1, values=text("k") + struct.pack("<IIQ", 9, 9, 1)), "would hold 1 items of type 9"),
        (head(num_values=1, values=text("k") + struct.pack("<IIQ", 9, 4, 1000)), "is cut off in its head"),
        (
            head(num_tensors=2, tensors=tensor() + tensor("b", offset=32)) + bytes(500),
            "tensor b would begin 32 bytes behind the head, in tensor a",
        ),
        (
            head(tensors=tensor(offset=33)) + bytes(500),
            "tensor a would begin 33 bytes behind the head, no multiple of 32",
        ),
        (
            head(num_values=1, values=text("general.alignment") + struct.pack("<II", 4, 0), tensors=tensor()),
            "general.alignment is 0",
        ),
        (head(tensors=tensor(sizes=(2,) * 9)), "has 9 dimensions"),
        (head(tensors=tensor(sizes=())), "has 0 dimensions"),
        (head(tensors=tensor(sizes=(0, 3))), r"has sizes \[0, 3\]"),
        (head(tensors=tensor(sizes=(HUGE, HUGE))), "bytes at .* and the file has"),
        (head(tensors=tensor(offset=HUGE)), "and the file has"),
        (head(tensors=tensor(sizes=(33, 1)) + bytes(200)), r"Q8_0 \[1, 33\]"),
        (head(tensors=tensor(kind=34)), "stored as TQ1_0; this runtime reads F32, F16, Q4_0, .*Q6_K, .*IQ1_M, BF16"),
        (head(tensors=tensor(kind=4)), "stored as type 4"),
        (head(num_tensors=2, tensors=tensor() * 2), "is there twice"),
    ],
)
def test_hostile_heads_are_refused(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "a.gguf").write_bytes(content)
    with pytest.raises(ModelLoadError, match=said) as caught:
        read_gguf_header(tmp_path / "a.gguf")
    assert "a.gguf" in str(caught.value)


def test_the_texts_of_a_head_are_bounded_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_header, "_MAX_HEAD_TEXT_BYTES", 1000)

    def with_texts(number: int) -> Path:
        values = b"".join(text(f"{n:10}") + struct.pack("<I", 8) + text("a" * 90) for n in range(number))
        (tmp_path / "a.gguf").write_bytes(head(num_tensors=0, num_values=number, values=values))
        return tmp_path / "a.gguf"

    assert len(read_gguf_header(with_texts(10)).metadata) == 10
    with pytest.raises(ModelLoadError, match="the texts of its head would be more than 1000 bytes"):
        read_gguf_header(with_texts(11))


def test_a_shape_beside_the_head_holds_all_numbers_or_is_not_used(flux1: Path, tmp_path: Path) -> None:
    """Rows of 16 numbers in blocks of 32: as many bytes, and half of the numbers."""
    name = "x_embedder.weight"
    writer = GGUFWriter(str(tmp_path / "a.gguf"), "flux")
    for each, values in load_file(flux1 / WEIGHTS).items():
        if each == name:
            data = quantize(torch.ones(values.shape[0], 32).numpy(), GGMLQuantizationType.Q8_0)
            writer.add_tensor(each, data, raw_dtype=GGMLQuantizationType.Q8_0)
            writer.add_array(f"comfy.gguf.orig_shape.{name}", list(values.shape))
            assert values.shape == (32, 16)
        else:
            writer.add_tensor(each, values.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match=r"x_embedder.weight is \[32, 32\], expected \[32, 16\]"):
        load_pipeline(str(flux1), device="cpu", transformer_path=str(tmp_path / "a.gguf"))


def test_a_scale_that_is_no_number_is_named(flux1: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", load_file(flux1 / WEIGHTS), lambda _: "Q8_0")
    entry = read_gguf_header(tmp_path / "a.gguf").tensors["single_transformer_blocks.0.proj_out.weight"]
    content = bytearray((tmp_path / "a.gguf").read_bytes())
    content[entry.offset : entry.offset + 2] = b"\x00\x7e"
    (tmp_path / "a.gguf").write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"a.gguf: tensor single_transformer_blocks.0.proj_out.weight holds NaN"):
        load_pipeline(str(flux1), device="cpu", transformer_path=str(tmp_path / "a.gguf"))


@pytest.mark.gpu
@table("kind", KINDS)
def test_a_gpu_makes_the_same_numbers(kind: str) -> None:
    _, block, num_bytes = next(each for each in TYPES.values() if each[0] == kind)
    size = (64, 512 // block * num_bytes)
    data = torch.randint(0, 256, size, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    found = dequantize_blocks(data.cuda(), kind).cpu()
    torch.testing.assert_close(found, dequantize_blocks(data, kind), rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.gpu
def test_a_file_generates_on_a_gpu(flux1: Path, tmp_path: Path) -> None:
    meant = write_gguf(tmp_path / "a.gguf", load_file(flux1 / WEIGHTS), lambda _: "Q8_0")
    save_file(meant, tmp_path / "meant.safetensors")
    frames = []
    for name in ("a.gguf", "meant.safetensors"):
        pipeline = load_pipeline(str(flux1), device="cuda", dtype="bfloat16", transformer_path=str(tmp_path / name))
        frames.append(torch.as_tensor(pipeline(small_request(pipeline)).frames).float())
    assert float((frames[0] - frames[1]).abs().mean()) < 4.0
