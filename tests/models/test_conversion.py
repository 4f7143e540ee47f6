"""`models convert`: every published layout of pickles becomes the folder it stands for, and a hostile one is refused
without running."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tables import table
from tiny_models import write_tiny_wan

from diffusion_runtime.cli.app import run
from diffusion_runtime.core.model_folder import ModelFolder
from diffusion_runtime.errors import DiffusionRuntimeError
from diffusion_runtime.models.conversion.checkpoints import CHECKPOINTS
from diffusion_runtime.models.conversion.conversion import ConversionReport, convert_lora, convert_model
from diffusion_runtime.models.generation import generation_settings
from diffusion_runtime.weights.lora.reading import read_lora_file

Tensors = dict[str, torch.Tensor]

# diffusers' modules -> those of Wan's authors, written out apart from what the runtime reads.
PARTS = {
    "attn1.": "self_attn.",
    "attn2.": "cross_attn.",
    "to_q": "q",
    "to_k": "k",
    "to_v": "v",
    "to_out.0": "o",
    "norm2": "norm3",
    "ffn.net.0.proj": "ffn.0",
    "ffn.net.2": "ffn.2",
}
TOP = {
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    "proj_out": "head.head",
}


def original(name: str) -> str:
    if not name.startswith("blocks."):
        module, _, leaf = name.rpartition(".")
        return f"{TOP.get(module, module)}.{leaf}" if module else name.replace("scale_shift_table", "head.modulation")
    for part, theirs in PARTS.items():
        name = name.replace(part, theirs)
    return name.replace("scale_shift_table", "modulation")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_wan(tmp_path_factory.mktemp("models") / "wan")


@pytest.fixture(scope="module")
def weights(base: Path) -> Tensors:
    return load_file(base / "transformer" / "diffusion_pytorch_model.safetensors")


def named(weights: Tensors, prefix: str, scale: float = 1.0) -> Tensors:
    return {f"{prefix}{original(name)}": scale * tensor for name, tensor in weights.items()}


def converted(
    content: object, folder: Path, base: Path, name: str = "self-forcing", **options: Any
) -> ConversionReport:
    torch.save(content, folder / "file.pt")
    settings = {"key": None, "dtype": "bfloat16", "copies": False, **options}
    return convert_model(folder / "file.pt", folder / "out", CHECKPOINTS[name], base, **settings)


LAYOUTS: dict[str, tuple[str, str, Callable[[Tensors], object]]] = {
    "CausVid": ("causvid", "generator", lambda weights: {"generator": named(weights, "model.")}),
    "Self-Forcing": (
        "self-forcing",
        "generator_ema",
        lambda weights: {
            "generator": named(weights, "model.", 0.5),
            "generator_ema": named(weights, "model._fsdp_wrapped_module."),
            "critic": named(weights, "model.", 2.0),
            "step": 600,
        },
    ),
    "LongLive": (
        "longlive",
        "generator",
        lambda weights: {
            "generator": {
                name.replace("blocks.0.", "blocks.0._checkpoint_wrapped_module."): tensor
                for name, tensor in named(weights, "model._orig_mod.").items()
            }
        },
    ),
    "tensors at the top": ("self-forcing", "(top)", lambda weights: named(weights, "")),
    "diffusers' names": ("self-forcing", "state_dict", lambda weights: {"state_dict": weights, "config": {"dim": 8}}),
}


@table("layout", LAYOUTS)
def test_every_layout_becomes_the_folder_it_stands_for(
    layout: str, tmp_path: Path, base: Path, weights: Tensors
) -> None:
    name, key, content = LAYOUTS[layout]
    report = converted(content(weights), tmp_path, base, name)
    assert (report.key, report.num_tensors, report.dtype) == (key, len(weights), "bfloat16")
    written = load_file(tmp_path / "out" / "transformer" / "diffusion_pytorch_model.safetensors")
    assert set(written) == set(weights)
    assert all(torch.equal(written[each], weights[each].bfloat16()) for each in weights)
    config = json.loads((tmp_path / "out" / "transformer" / "config.json").read_text())
    assert config["_class_name"] == "CausalWanTransformer3DModel"
    window = {"causvid": (-1, 0), "self-forcing": (-1, 0), "longlive": (12, 3)}[name]
    assert (config["local_attn_size"], config["sink_size"], config["num_frames_per_block"]) == (*window, 3)
    assert config["num_layers"] == json.loads((base / "transformer" / "config.json").read_text())["num_layers"]
    defaults = generation_settings(ModelFolder(tmp_path / "out")).defaults
    steps = {"causvid": ([1.0, 0.757, 0.522], 1.0)}.get(name, ([1.0, 0.75, 0.5, 0.25], 5.0))
    assert (defaults["sigmas_before_shift"], defaults["flow_shift"]) == steps
    assert defaults["sampler"] == "dmd"
    assert (tmp_path / "out" / "vae").resolve() == (base / "vae").resolve()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file.pt", "out"]


def test_parts_are_copied_and_another_key_and_dtype_are_taken_where_asked(
    tmp_path: Path, base: Path, weights: Tensors
) -> None:
    content = {"generator": named(weights, "model.", 0.5), "generator_ema": named(weights, "model.")}
    report = converted(content, tmp_path, base, key="generator", dtype="float32", copies=True)
    assert report.linked == {}
    assert not (tmp_path / "out" / "vae").is_symlink()
    written = load_file(tmp_path / "out" / "transformer" / "diffusion_pytorch_model.safetensors")
    assert all(torch.equal(written[each], 0.5 * weights[each]) for each in weights)
    # A folder of the name of one of its files.
    output = tmp_path / "model_index.json"
    convert_model(
        tmp_path / "file.pt", output, CHECKPOINTS["self-forcing"], base, key=None, dtype="float32", copies=False
    )
    assert (output / "model_index.json").is_file()


def lora_tensors() -> Tensors:
    return {
        f"base_model.model.blocks.{block}.self_attn.{part}.lora_{side}.weight": torch.randn(*size)
        for block in range(2)
        for part in "qkvo"
        for side, size in (("A", (4, 1536)), ("B", (1536, 4)))
    }


def test_a_lora_becomes_one_file_that_is_read_as_wans(tmp_path: Path) -> None:
    torch.save({"generator_lora": lora_tensors(), "critic_lora": lora_tensors()}, tmp_path / "lora.pt")
    report = convert_lora(tmp_path / "lora.pt", tmp_path / "lora.safetensors", key=None, dtype="float32")
    assert (report.key, report.num_tensors) == ("generator_lora", 16)
    lora = read_lora_file(str(tmp_path / "lora.safetensors"))
    assert (len(lora.modules), lora.ranks, lora.unknown) == (8, (4,), ())


class Hostile:
    """Its pickle asks for os.system when it is opened."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


def _packed(path: Path) -> None:
    """The same archive with compressed entries."""
    with zipfile.ZipFile(path) as archive:
        entries = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)


def bad_files(weights: Tensors, folder: Path) -> Iterator[tuple[str, Path]]:
    """(a part of the message, the file)."""
    theirs = named(weights, "model.")
    first = next(iter(theirs))
    # One mapping of 40 names in three others, each of which names it 40 times: 2.56 million tensors.
    shared: dict[str, Any] = {str(index): torch.ones(1) for index in range(40)}
    for _ in range(3):
        shared = {str(index): shared for index in range(40)}
    empty: dict[str, Any] = {}
    for _ in range(4):
        empty = {str(index): empty for index in range(40)}
    shared_storage = torch.ones(100)
    contents: dict[str, object] = {
        "system": {"generator": {**theirs, "x": Hostile(folder / "ran")}},
        "the file is for FLUX": {
            "generator": {f"double_blocks.{index}.img_attn.qkv.weight": torch.ones(6, 2) for index in range(3)}
        },
        f"lacks 1 of {len(weights)}": {"generator": {name: each for name, each in theirs.items() if name != first}},
        "is [3], expected": {"generator": {**theirs, "model.blocks.0.ffn.0.bias": torch.ones(3)}},
        "is a LoRA": {"generator": lora_tensors()},
        "there is no tensor in it": {"step": 3},
        "expected a mapping": [1, 2],
        "say which by --key": {"a": theirs, "b": theirs},
        "torch.int64": {"generator": {**theirs, first: torch.ones(theirs[first].shape, dtype=torch.int64)}},
        "NaN": {"generator": {**theirs, first: torch.full(theirs[first].shape, float("nan"))}},
        "larger than what the file holds": {"generator": {**theirs, "x": torch.zeros(1).expand(10**6, 10**6)}},
        "at most 20000 tensors": {"generator": shared},
        "at most 20000 mappings": {"generator": empty},
        "expected at most 2 times as many": {"generator": {f"{index}": shared_storage for index in range(3)}},
        "two tensors are 1": {1: torch.ones(1), "1": torch.ones(1)},
        "two tensors are": {"generator": {**theirs, f"module.{first}": theirs[first]}},
    }
    for index, (message, content) in enumerate(contents.items()):
        path = folder / f"{index}.pt"
        torch.save(content, path)
        yield message, path
    legacy, packed, cut = (folder / name for name in ("legacy.pt", "packed.pt", "cut.pt"))
    torch.save({"generator": theirs}, legacy, _use_new_zipfile_serialization=False)
    yield "since 1.6", legacy
    torch.save({"generator": theirs}, packed)
    _packed(packed)
    yield "torch packs no tensors", packed
    torch.save({"generator": theirs}, cut)
    cut.write_bytes(cut.read_bytes()[:-200])
    yield "copy or download it again|since 1.6", cut
    marks = folder / "marks.pt"
    with zipfile.ZipFile(marks, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + b"(" * 1_000_000 + b".")
        archive.writestr("archive/version", b"3")
    yield "expected a pickle of at most 266240 bytes beside 1 other entries", marks
    ascii_of = b"h\x01h\x00X\x05\x00\x00\x00ascii\x86R"
    work = {
        # A key of tuples in tuples, which hashing goes through whole.
        "tuples": b"}K\x01q\x000" + b"h\x00h\x00\x86q\x000" * 60 + b"h\x00K\x01s",
        # The same text, encoded again and again; the same list, copied again and again.
        "texts": b"]X\x00\x40\x00\x00" + b"a" * 0x4000 + b"q\x000c_codecs\nencode\nq\x010(" + ascii_of * 8000 + b"e",
        "lists": b"]q\x03X\x01\x00\x00\x00aK\x01\x86q\x020(" + b"h\x02" * 20000 + b"e"
        b"ccollections\nOrderedDict\nq\x050](" + b"h\x05h\x03\x85R" * 20000 + b"e",
        "bytearray": b"cbuiltins\nbytearray\n\x8a\x06\x00\x00\x00\x00\x00\x01\x85R",
    }
    for name, code in work.items():
        with zipfile.ZipFile(folder / f"{name}.pt", "w") as archive:
            archive.writestr("archive/data.pkl", b"\x80\x02" + code + b".")
            archive.writestr("archive/version", b"3")
        yield "bytearray" if name == "bytearray" else "go through more than", folder / f"{name}.pt"
    yield "no such file", folder / "absent.pt"
    yield "expected names of at most 255 bytes", folder / ("x" * 300)


def test_what_is_no_such_checkpoint_is_refused_and_leaves_nothing(tmp_path: Path, base: Path, weights: Tensors) -> None:
    failures = []
    for message, path in bad_files(weights, tmp_path):
        before = sorted(tmp_path.iterdir())
        try:
            convert_model(
                path, tmp_path / "out", CHECKPOINTS["self-forcing"], base, key=None, dtype="bfloat16", copies=False
            )
            failures.append(f"{path.name}: was converted, expected {message}")
        except DiffusionRuntimeError as error:
            if not any(part in str(error) for part in message.split("|")):
                failures.append(f"{path.name}: expected {message!r}, got {error}")
        if sorted(tmp_path.iterdir()) != before:
            failures.append(f"{path.name}: left {sorted(tmp_path.iterdir())}")
    assert not failures, "\n".join(failures)


def test_the_command_says_what_it_read_and_what_to_type(
    tmp_path: Path, base: Path, weights: Tensors, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*arguments: object) -> tuple[int, str, str]:
        code = run([str(each) for each in arguments])
        captured = capsys.readouterr()
        return code, " ".join(captured.out.split()), " ".join(captured.err.split())

    source, out = tmp_path / "sf.pt", tmp_path / "sf"
    torch.save({"generator_ema": named(weights, "model.")}, source)
    convert = ("models", "convert", source, out, "--as", "self-forcing")
    assert "--as without --base" in said(*convert)[2]
    assert f"{tmp_path} has no model_index.json" in said(*convert, "--base", tmp_path)[2]
    code, answer, _ = said(*convert, "--base", base)
    assert code == 0
    assert f"--model-path {out}" in answer
    assert "generator_ema (" in answer
    assert "is there already" in said(*convert, "--base", base)[2]
    for loading in (("--model-path", source), ("--model-path", base, "--transformer-path", source), ("--lora", source)):
        assert "models convert" in said("generate", "x", "--dry-run", *loading)[2], loading
