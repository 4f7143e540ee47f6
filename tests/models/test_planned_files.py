"""Plans of published models with files of other formats, of which only the heads are there."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf_files
import pytest

from diffusion_runtime.cli.app import run
from diffusion_runtime.core.model_folder import ModelFolder
from diffusion_runtime.models.memory_demand import StepDemand
from diffusion_runtime.models.model_sources import find_configs
from diffusion_runtime.models.registry import family_for_folder
from diffusion_runtime.untrusted.gguf_header import TYPES, num_bytes_of

Shapes = Mapping[str, tuple[int, ...]]


@pytest.fixture(autouse=True)
def nothing_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("diffusion_runtime.models.memory_demand.step_demand", lambda *_: StepDemand(10**9, 0))
    monkeypatch.setattr("diffusion_runtime.models.memory_demand.decoding_bytes", lambda *_, **__: 10**9)


def transformer_shapes(model: str) -> Shapes:
    folder = ModelFolder(find_configs(model).path)
    shapes = family_for_folder(folder).describe(folder).weights.expected("transformer").shapes
    # Files of models that were not trained with Video Sparse Attention have no gates.
    return {name: shape for name, shape in shapes.items() if "gate_compress" not in name}


def write_gguf_head(path: Path, shapes: Shapes, kind: str) -> int:
    """Matrices in `kind`, the rest in float32; returns the bytes of all."""
    numbers = {name: number for number, (name, _, _) in TYPES.items()}
    tensors, offset = b"", 0
    for name, shape in shapes.items():
        stored = kind if len(shape) == 2 and shape[1] % 256 == 0 else "F32"
        tensors += gguf_files.tensor(name, tuple(reversed(shape)), numbers[stored], offset)
        offset += -(-num_bytes_of(stored, math.prod(shape)) // 32) * 32
    start = gguf_files.head(num_tensors=len(shapes), tensors=tensors)
    path.write_bytes(start + bytes(-len(start) % 32))
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + offset)
    return offset


def write_fp8_head(path: Path, shapes: Shapes) -> int:
    """Matrices in 8-bit floats without scales, the rest in bfloat16; returns the bytes of all."""
    head, offset = {}, 0
    for name, shape in shapes.items():
        kind, itemsize = ("F8_E4M3", 1) if len(shape) == 2 else ("BF16", 2)
        end = offset + math.prod(shape) * itemsize
        head[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(head).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + offset)
    return offset


def plan_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    command = ["generate", "x", "--device", "cpu", "--dtype", "bfloat16", "--dry-run", "--json", *words]
    assert run(command) == 0
    plan: dict[str, Any] = json.loads(capsys.readouterr().out)
    return plan


def weights_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, int]:
    weights: dict[str, int] = plan_of(words, capsys)["memory"]["weights"]
    return weights


def test_flux_in_q4_k_takes_the_bytes_of_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "flux1-dev-Q4_K_S.gguf"
    size = write_gguf_head(path, transformer_shapes("flux.1-dev"), "Q4_K")
    plan = plan_of(["--model-path", "flux.1-dev", "--transformer-path", str(path)], capsys)
    weights = plan["memory"]["weights"]
    assert size == pytest.approx(6.7e9, rel=0.02)
    # What stands outside of the blocks becomes bfloat16.
    assert size <= weights["transformer"] <= 1.02 * size
    command = ["generate", "x", "--model-path", "flux.1-dev", "--transformer-path", str(path), "--plan-for", "4090"]
    assert run([*command, "--dry-run", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["memory"]["offload"] == "none"
    assert planned["memory"]["weights"] == weights
    # CLIP, T5 and the decoder.
    assert plan["download_gb"] == pytest.approx(9.9, abs=0.1)


def test_wan_in_fp8_takes_the_bytes_of_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of two experts one each; of a model whose file of one expert alone is given, that one."""
    path = tmp_path / "wan2.2_t2v_high_noise_14B_fp8.safetensors"
    size = write_fp8_head(path, transformer_shapes("wan2.2-t2v-a14b"))
    assert size == pytest.approx(14.3e9, rel=0.02)
    both = ["--transformer-path", str(path), "--transformer-2-path", str(path)]
    plan = plan_of(["--model-path", "wan2.2-t2v-a14b", *both], capsys)
    weights = plan["memory"]["weights"]
    assert plan["download_gb"] == pytest.approx(2 * (5.68 + 0.127))
    assert weights["transformer"] == weights["transformer_2"] == pytest.approx(size, rel=0.03)
    weights = weights_of(["--model-path", "wan2.2-t2v-a14b", *both[:2]], capsys)
    assert weights["transformer_2"] == pytest.approx(2 * size, rel=0.01)


def write_marked_head(path: Path, shapes: Shapes, settings: Mapping[str, Any], beside: Any) -> int:
    """Matrices of blocks in a format that a header marks, the rest in bfloat16; returns the bytes of all. beside: of a
    weight's shape, what is stored of it, (kind, bytes per number, shape) by suffix."""
    head: dict[str, Any] = {}
    layers, offset = {}, 0
    for name, shape in shapes.items():
        is_stored = len(shape) == 2 and name.startswith("blocks.") and name.endswith(".weight")
        layer = name.removesuffix(".weight")
        tensors = {name: ("BF16", 2, shape)}
        if is_stored:
            layers[layer] = settings
            tensors = {f"{layer}.{suffix}": each for suffix, each in beside(shape).items()}
        for each, (kind, itemsize, stored) in tensors.items():
            end = offset + math.prod(stored) * itemsize
            head[each] = {"dtype": kind, "shape": list(stored), "data_offsets": [offset, end]}
            offset = end
    head["__metadata__"] = {"_quantization_metadata": json.dumps({"layers": layers})}
    text = json.dumps(head).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + offset)
    return offset


def test_wan_14b_in_int8_and_4_bits_takes_the_bytes_of_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes = transformer_shapes("wan2.1-14b")
    formats = {
        "int8_tensorwise": lambda shape: {"weight": ("I8", 1, shape), "weight_scale": ("F32", 4, (shape[0], 1))},
        "nvfp4": lambda shape: {
            "weight": ("U8", 1, (shape[0], shape[1] // 2)),
            "weight_scale": ("F8_E4M3", 1, (-(-shape[0] // 128) * 128, shape[1] // 16)),
            "weight_scale_2": ("F32", 4, ()),
        },
    }
    for name, beside in formats.items():
        path = tmp_path / f"wan2.1_t2v_14B_{name}.safetensors"
        size = write_marked_head(path, shapes, {"format": name, "convrot": name.startswith("int8")}, beside)
        weights = weights_of(["--model-path", "wan2.1-14b", "--transformer-path", str(path)], capsys)
        # What stays in float32 of Wan is bfloat16 in the file.
        assert weights["transformer"] == pytest.approx(size, rel=0.02), name
