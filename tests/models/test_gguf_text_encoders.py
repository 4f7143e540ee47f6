"""Text encoders in GGUF, by llama.cpp's names: the hidden states of the transformers models that they were made of."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import struct
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from gguf_encoders import architecture_name, language_tensors, permuted, vision_tensors, write_encoder
from gguf_files import head, text
from PIL import Image
from safetensors.torch import load_file, save_file
from tables import table
from tiny_ltx2 import write_tiny_ltx2
from tiny_qwen_image import write_tiny_qwen_image
from tiny_qwen_image_21 import write_tiny_qwen_image_21

from diffusion_runtime import RuntimeConfig
from diffusion_runtime.core.model_folder import ModelFolder
from diffusion_runtime.errors import ConfigError, ModelLoadError
from diffusion_runtime.loading import inspect_pipeline, prepare
from diffusion_runtime.loading.native_model import PreparedModel
from diffusion_runtime.loading.text_encoders import TextEncoderLoader
from diffusion_runtime.models.encoder_file import describe_encoder_file, tokenizer_in
from diffusion_runtime.models.part_files import PartFile, with_parts
from diffusion_runtime.models.registry import family_for_folder
from diffusion_runtime.text_encoders.interface import TextEncoder
from diffusion_runtime.weights.gguf_encoder import GgufEncoderFile
from diffusion_runtime.weights.stored_tensors import stored_rows

FolderOf = Callable[[str], Path]
Tensors = dict[str, torch.Tensor]
PROMPTS = ["a red circle", "a star"]


def weights_of(folder: Path) -> Tensors:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def language_of(state: Tensors) -> Tensors:
    """The tensors of the language model, by the names of one without a vision half."""
    marks = ("visual.", "vision_tower.", "multi_modal_projector.", "embed_audio.", "embed_vision.", "vision_embedder.")
    own = {name: tensor for name, tensor in state.items() if not any(mark in name for mark in marks)}
    if any(".SelfAttention." in name for name in own):
        return own
    bare = {name.replace("language_model.", "").removeprefix("model."): tensor for name, tensor in own.items()}
    return {name.removeprefix("model."): tensor for name, tensor in bare.items() if not name.endswith("lm_head.weight")}


def rounded(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """The numbers that a type makes of a matrix, where its rows are whole blocks."""
    block = GGMLQuantizationType[kind]
    if tensor.dim() < 2 or (tensor.shape[-1] % 32 and kind not in ("BF16", "F16")):
        return tensor
    return torch.from_numpy(dequantize(quantize(tensor.float().numpy(), block), block).copy()).reshape(tensor.shape)


def written(
    folder: Path, path: Path, arch: MODEL_ARCH, kind: str = "F32", more: Callable[[GGUFWriter], None] = lambda _: None
) -> Path:
    """A text encoder's folder as one GGUF file."""
    values = json.loads((folder / "config.json").read_text())
    config = SimpleNamespace(**{**values, **(values.get("text_config") or {})})
    tensors = language_tensors(arch, language_of(weights_of(folder)), config)
    write_encoder(path, architecture_name(arch), tensors, config, lambda _: kind, more)
    return path


def written_pictures(folder: Path, path: Path, projector: str) -> Path:
    """The vision half of a text encoder's folder."""
    state = {name.removeprefix("model."): tensor for name, tensor in weights_of(folder).items() if "visual." in name}
    vision = json.loads((folder / "config.json").read_text())["vision_config"]
    deep = tuple(vision.get("deepstack_visual_indexes") or ())
    write_encoder(
        path,
        "clip",
        vision_tensors(state, deep),
        more=lambda writer: writer.add_string("clip.projector_type", projector),
    )
    return path


def encoder_of(folder: Path, component: str, path: Path | None, pictures: Path | None = None) -> TextEncoder:
    """The text encoders of a folder, one of them out of a file."""
    opened = ModelFolder(folder)
    if path is not None:
        given = PartFile(str(path), f"{component}_path", component, None if pictures is None else str(pictures))
        opened = with_parts(opened, [given], None, ())
    model, cpu = family_for_folder(opened).describe(opened), torch.device("cpu")
    return TextEncoderLoader(model, cpu, torch.float32, None, model.text_changes()).read(cpu)


def states(encoder: TextEncoder) -> list[torch.Tensor]:
    found = encoder.encode(PROMPTS)
    return [
        found.embeddings,
        *([] if found.pooled is None else [found.pooled]),
        *(each.embeddings for each in found.further),
    ]


@pytest.fixture(scope="module")
def ltx25(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_ltx2(tmp_path_factory.mktemp("ltx25") / "model", is_ltx25=True)


def divisors(turning: int, *still: float) -> Callable[[GGUFWriter], None]:
    """What Gemma 4's frequencies are divided by."""
    values = numpy.array([1.0] * turning + list(still), dtype=numpy.float32)
    return lambda writer: writer.add_tensor("rope_freqs.weight", values)


def written_gemma4(folder: Path, path: Path, more: Callable[[GGUFWriter], None], *, head_dim: int = 8) -> Path:
    """head_dim: of the layers that see a window, as the file says."""

    def sizes(writer: GGUFWriter) -> None:
        writer.add_uint32("gemma4.attention.key_length", 16)
        writer.add_uint32("gemma4.attention.key_length_swa", head_dim)
        more(writer)

    tensors = language_tensors(MODEL_ARCH.GEMMA4, language_of(weights_of(folder)), None)
    write_encoder(path, "gemma4", tensors, more=sizes)
    return path


def test_gemma4_in_a_file_of_its_language_model(ltx25: Path, tmp_path: Path) -> None:
    """Layers of two kinds, with heads of their own width, a scalar each, and frequencies that a tensor describes."""
    expected = states(encoder_of(ltx25, "text_encoder", None))
    folder, turns = ltx25 / "text_encoder", divisors(2, *[1e30] * 6)
    path = written_gemma4(folder, tmp_path / "plain.gguf", turns)
    assert all(map(torch.equal, states(encoder_of(ltx25, "text_encoder", path)), expected))
    assert describe_encoder_file(path).model_types == ("gemma4_unified", "gemma4_unified_text")
    for more in (divisors(8), divisors(1, *[1e30] * 7), divisors(2, *[8.0] * 6)):
        other = written_gemma4(folder, tmp_path / "other.gguf", more)
        with pytest.raises(ModelLoadError, match="1 tensors would change the result and are not read: rope_freqs"):
            encoder_of(ltx25, "text_encoder", other)
    wrong = written_gemma4(folder, tmp_path / "wrong.gguf", turns, head_dim=4)
    with pytest.raises(ModelLoadError, match=r"1 settings differ .*: head_dim is 4, here 8"):
        encoder_of(ltx25, "text_encoder", wrong)


# UMT5 (with a relative bias in every layer), T5, Qwen2.5-VL, Qwen3-VL, Qwen3, LLaMA, Mistral 3, Gemma 3.
@table(
    "family, component, arch",
    [
        ("wan", "text_encoder", MODEL_ARCH.T5ENCODER),
        ("flux1", "text_encoder_2", MODEL_ARCH.T5ENCODER),
        ("qwen_image", "text_encoder", MODEL_ARCH.QWEN2VL),
        ("qwen_image_21", "text_encoder", MODEL_ARCH.QWEN3VL),
        ("z_image", "text_encoder", MODEL_ARCH.QWEN3),
        ("hunyuan_video", "text_encoder", MODEL_ARCH.LLAMA),
        ("flux2", "text_encoder", MODEL_ARCH.MISTRAL3),
        ("ltx2", "text_encoder", MODEL_ARCH.GEMMA3),
    ],
)
def test_the_states_of_the_model_that_a_file_was_made_of(
    family: str, component: str, arch: MODEL_ARCH, tiny_folder_of: FolderOf, tmp_path: Path
) -> None:
    """Bit for bit, of float32, bfloat16, and of what 8-bit blocks make of the weights."""
    folder = tiny_folder_of(family)
    expected = states(encoder_of(folder, component, None))
    path = written(folder / component, tmp_path / "plain.gguf", arch)
    assert all(map(torch.equal, states(encoder_of(folder, component, path)), expected))
    described = describe_encoder_file(path)
    values = json.loads((folder / component / "config.json").read_text())
    assert values["model_type"] in described.model_types
    assert described.num_layers == (values.get("text_config") or values).get(
        "num_hidden_layers", values.get("num_layers")
    )
    # Hidden states of narrower ones have no whole block in a row; one model for each kind of reader.
    if family not in ("wan", "qwen_image", "ltx2"):
        return
    meant = {
        name: rounded(tensor, "Q8_0") if "visual" not in name and "vision" not in name else tensor
        for name, tensor in weights_of(folder / component).items()
    }
    save_file({name: each.contiguous() for name, each in meant.items()}, tmp_path / "meant.safetensors")
    encoder = encoder_of(folder, component, written(folder / component, tmp_path / "8.gguf", arch, "Q8_0"))
    found, wanted = states(encoder), states(encoder_of(folder, component, tmp_path / "meant.safetensors"))
    assert all(map(torch.equal, found, wanted))
    assert not torch.equal(found[0], expected[0])
    assert re.search(r"text encoder: GGUF Q8_0, dequantised at load: [\d.]+ MB$", encoder.implementation)


@table(
    "arch, kind",
    [(MODEL_ARCH.LLAMA, "Q8_0"), (MODEL_ARCH.LLAMA, "Q4_K"), (MODEL_ARCH.GEMMA3, "BF16"), (MODEL_ARCH.GEMMA3, "Q4_K")],
)
def test_rows_of_blocks_are_in_the_order_of_transformers(arch: MODEL_ARCH, kind: str, tmp_path: Path) -> None:
    """Of q and k with several heads per group; all of a weight, and some of its rows."""
    config = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1, hidden_size=256)
    random = torch.Generator().manual_seed(1)
    heads = {"q": (64, 4), "k": (32, 2), "v": (32, 0)}
    state = {f"layers.0.self_attn.{name}_proj.weight": torch.randn(rows, 256) for name, (rows, _) in heads.items()}
    state |= {"embed_tokens.weight": torch.randn(40, 256, generator=random), "norm.weight": torch.randn(256)}
    path = tmp_path / "a.gguf"
    meant = write_encoder(path, architecture_name(arch), language_tensors(arch, state, config), config, lambda _: kind)
    with closing(GgufEncoderFile(path, 64)) as file:
        rows = {name: several[0] for name, several in stored_rows([file]).items()}
        for name, (_, number) in heads.items():
            own = rows[f"model.layers.0.self_attn.{name}_proj.weight"]
            found, wanted = own.numbers(torch.float32), meant[f"blk.0.attn_{name}.weight"]
            is_permuted = number and arch is MODEL_ARCH.LLAMA
            assert torch.equal((permuted(found, number) if is_permuted else found).float(), wanted), name
            assert torch.equal(own.some(8, 24).numbers(torch.float32), found[8:24]), name
        added = 1 if arch is MODEL_ARCH.GEMMA3 else 0
        assert torch.equal(rows["model.norm.weight"].numbers(torch.float32) + added, meant["output_norm.weight"])
        # Rows that Gemma's embeddings lack, as no text has their tokens.
        embeddings = rows["model.embed_tokens.weight"].numbers(torch.float32)
        assert embeddings.shape == ((64, 256) if arch is MODEL_ARCH.GEMMA3 else (40, 256))
        assert torch.equal(embeddings[:40].float(), meant["token_embd.weight"])
        assert not embeddings[40:].any()


@table(
    "family, arch, projector",
    [("qwen_image", MODEL_ARCH.QWEN2VL, "qwen2.5vl_merger"), ("qwen_image_21", MODEL_ARCH.QWEN3VL, "qwen3vl_merger")],
)
def test_pictures_are_read_by_a_vision_half_in_a_file_of_its_own(
    family: str, arch: MODEL_ARCH, projector: str, tmp_path: Path
) -> None:
    """Beside the file, or given; without it the model is refused before the weights load."""
    folder = tmp_path / family
    if family == "qwen_image":
        write_tiny_qwen_image(folder, edits="QwenImageEditPlusPipeline")
    else:
        write_tiny_qwen_image_21(folder, sees=True)
    Image.fromarray(numpy.random.default_rng(1).integers(0, 255, (64, 64, 3), dtype=numpy.uint8)).save(
        tmp_path / "a.png"
    )
    files, own = tmp_path / f"{family}-files", folder / "text_encoder"
    files.mkdir()
    text = written(own, files / "text.gguf", arch)
    pictures = written_pictures(own, files / "mmproj-model-f16.gguf", projector)
    assert describe_encoder_file(pictures).has_vision
    encoders = [encoder_of(folder, "text_encoder", *each) for each in ((None,), (text,), (text, pictures))]
    expected, *found = (each.of_pictures([str(tmp_path / "a.png")]).encode(["a star"]).embeddings for each in encoders)
    assert all(torch.equal(each, expected) for each in found)
    written_pictures(own, files / "other-mmproj.gguf", projector)
    config = RuntimeConfig(str(folder), device="cpu", text_encoder_path=str(text))
    with pytest.raises(
        ConfigError, match=r"add --mmproj-path FILE.gguf \(beside it: mmproj-model-f16.gguf, other-mmproj"
    ):
        inspect_pipeline(config)
    inspect_pipeline(dataclasses.replace(config, mmproj_path=str(pictures)))
    with pytest.raises(ConfigError, match="mmproj_path: the half that reads pictures of a text encoder in GGUF; add"):
        inspect_pipeline(dataclasses.replace(config, text_encoder_path=None, mmproj_path=str(pictures)))


def qwen_metadata(folder: Path) -> Callable[[GGUFWriter], None]:
    """The vocabulary of a tokenizer's folder as llama.cpp has it."""
    learned = json.loads((folder / "tokenizer.json").read_text())
    special = {token["content"]: token["id"] for token in learned["added_tokens"]}
    ids = {**learned["model"]["vocab"], **special}
    tokens = sorted(ids, key=ids.__getitem__)

    def write(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_list(tokens)
        writer.add_token_types([3 if token in special else 1 for token in tokens])
        writer.add_token_merges([" ".join(pair) for pair in learned["model"]["merges"]])
        writer.add_pad_token_id(ids["<|endoftext|>"])

    return write


def test_a_tokenizer_is_the_folders_own_else_the_files_else_the_hub_caches(
    tiny_folder_of: FolderOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_folder_of("z_image")
    own, place = folder / "text_encoder", tmp_path / "model"
    expected = states(encoder_of(folder, "text_encoder", None))
    shutil.copytree(folder, place)
    settings = (place / "tokenizer" / "tokenizer_config.json").read_text()
    for path in (place / "tokenizer").iterdir():
        if path.name != "tokenizer_config.json":
            path.unlink()
    with_words = written(own, tmp_path / "words.gguf", MODEL_ARCH.QWEN3, more=qwen_metadata(folder / "tokenizer"))
    assert describe_encoder_file(with_words).tokenizer == "tokenizer.ggml.tokens"
    assert all(map(torch.equal, states(encoder_of(place, "text_encoder", with_words)), expected))
    assert (place / "tokenizer" / "tokenizer_config.json").read_text() == settings
    bare = written(own, tmp_path / "bare.gguf", MODEL_ARCH.QWEN3)
    with pytest.raises(ModelLoadError, match=r"tokenizer.* is missing; .* Its tokenizer is that of Qwen/Qwen3-4B"):
        encoder_of(place, "text_encoder", bare)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    snapshot = tmp_path / "cache" / "models--Qwen--Qwen3-4B" / "snapshots" / ("0" * 40)
    shutil.copytree(folder / "tokenizer", snapshot)
    assert all(map(torch.equal, states(encoder_of(place, "text_encoder", bare)), expected))


@table(
    "changed, told",
    [
        ({"blk.0.attn_output.bias": (32,)}, "1 tensors beside weights that are read have no place in the model"),
        ({"rope_freqs.weight": (8,)}, "1 tensors would change the result and are not read: rope_freqs.weight"),
        ({"blk.3.attn_q.weight": (32, 32)}, r"holds 4 layers, expected at most 3"),
        ({"token_embd.weight": (7, 32)}, r"with embeddings \[7, 32\], expected"),
        ({"qwen3.attention.head_count": 8}, "1 settings differ from the model's own: num_attention_heads is 8, here 4"),
        ({"qwen3.rope.freq_base": 5e5}, "1 settings differ from the model's own: rope_theta is 500000.0, here"),
        ({"general.architecture": "qwen2vl"}, "'general.architecture': 'qwen2vl', expected one of model_type 'qwen3'"),
        ({"general.architecture": "flux"}, "expected that of a text encoder .* got 'flux'"),
        ({"clip.projector_type": "mlp"}, "projector_type': expected 'qwen2.5vl_merger' or 'qwen3vl_merger', got 'mlp'"),
    ],
)
def test_what_would_change_the_result_is_refused(
    changed: dict[str, Any], told: str, tiny_folder_of: FolderOf, tmp_path: Path
) -> None:
    folder = tiny_folder_of("z_image") / "text_encoder"
    values = json.loads((folder / "config.json").read_text())
    tensors = dict(language_tensors(MODEL_ARCH.QWEN3, language_of(weights_of(folder)), SimpleNamespace(**values)))
    tensors |= {key: torch.ones(shape) for key, shape in changed.items() if isinstance(shape, tuple)}
    architecture = changed.get("general.architecture", "clip" if "clip.projector_type" in changed else "qwen3")
    path = tmp_path / "a.gguf"

    def more(writer: GGUFWriter) -> None:
        for key, value in changed.items():
            if not isinstance(value, tuple) and key != "general.architecture":
                add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
                add(key, value)

    config = None if "qwen3.attention.head_count" in changed else SimpleNamespace(**values)
    write_encoder(path, architecture, iter(tensors.items()), config, more=more)
    with pytest.raises(ModelLoadError, match=told) as caught:
        encoder_of(tiny_folder_of("z_image"), "text_encoder", path)
    assert str(path) in str(caught.value)


def test_memory_is_planned_for_what_is_dequantised(tiny_folder_of: FolderOf, tmp_path: Path) -> None:
    folder = tiny_folder_of("qwen_image")
    path = written(folder / "text_encoder", tmp_path / "8.gguf", MODEL_ARCH.QWEN2VL, "Q8_0")
    sizes = []
    for given in (None, str(path)):
        prepared = prepare(RuntimeConfig(str(folder), device="cpu", text_encoder_path=given))
        assert isinstance(prepared, PreparedModel)
        plan = prepared.planned_for(()).description.memory
        assert plan is not None
        sizes.append((plan.demand.text.total, plan.demand.text.blocks))
    assert sizes[0] == sizes[1]
    assert path.stat().st_size < sizes[0][0]


def test_heads_that_lie_are_named_before_memory_is_taken(tiny_folder_of: FolderOf, tmp_path: Path) -> None:
    """A vocabulary of 10 ** 9 tokens, two values of one key, and 100 MB of JSON in a tensor."""
    path, key = tmp_path / "a.gguf", "tokenizer.ggml.tokens"
    for values, told in (
        (text(key) + struct.pack("<IIQ", 9, 8, 10**9), f"{key} would hold 1000000000 items"),
        ((text(key) + struct.pack("<II", 4, 1)) * 2, f"key {key} is there twice"),
        (text(key) + struct.pack("<I", 99), f"the value of {key} has type 99"),
    ):
        path.write_bytes(head(num_tensors=0, num_values=1 + told.endswith("twice"), values=values))
        for read in (describe_encoder_file, lambda each: tokenizer_in(each, "", "qwen3")):
            with pytest.raises(ModelLoadError, match=told):
                read(path)
    size = 100_000_000
    content = json.dumps({"tekken_model": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with (tmp_path / "a.safetensors").open("wb") as file:
        file.write(len(content).to_bytes(8, "little") + content)
        file.truncate(8 + len(content) + size)
    with pytest.raises(
        ModelLoadError, match=r"tensor tekken_model: expected up to 67108864 bytes, got U8 \[100000000\]"
    ):
        tokenizer_in(tmp_path / "a.safetensors", "", "mistral3")
