"""Reading weights: one file, shards and variants; and every way in which files can be missing or damaged."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.weights.checkpoint import Checkpoint, Piece
from diffusion_runtime.weights.weight_loading import load_weights, own_pieces

STEM = "diffusion_pytorch_model"
CPU = torch.device("cpu")
LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 12345\n"


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(value.shape).to(value.dtype) for name, value in network().state_dict().items()}


def write_sharded(folder: Path, stem: str = STEM, variant: str = "", num_shards: int = 3) -> list[Path]:
    """The tensors over several files with an index; returns the shards."""
    weight_map, paths = {}, []
    names = list(tensors())
    for number in range(num_shards):
        path = folder / f"{stem}-{number + 1:05d}-of-{num_shards:05d}{variant}.safetensors"
        part = {name: tensors()[name] for name in names[number::num_shards]}
        save_file(part, path)
        weight_map |= dict.fromkeys(part, path.name)
        paths.append(path)
    (folder / f"{stem}.safetensors.index{variant}.json").write_text(json.dumps({"weight_map": weight_map}))
    return paths


def load(folder: Path, dtype: torch.dtype = torch.float32, stem: str = STEM) -> nn.Module:
    with torch.device("meta"):
        module = network()
    with Checkpoint(folder, stem) as checkpoint:
        load_weights(module, checkpoint, own_pieces(module), CPU, dtype)
    return module


def failure(folder: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load(folder)
    return str(caught.value)


# --- what can be read -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stem", [STEM, "model"])
@pytest.mark.parametrize("variant", ["", ".fp16"])
@pytest.mark.parametrize("sharded", [False, True])
def test_one_file_shards_and_variants_are_read(tmp_path: Path, stem: str, variant: str, sharded: bool) -> None:
    if sharded:
        write_sharded(tmp_path, stem, variant)
    else:
        save_file(tensors(), tmp_path / f"{stem}{variant}.safetensors")
    module = load(tmp_path, stem=stem)
    for name, value in module.state_dict().items():
        assert torch.equal(value, tensors()[name])
        assert value.dtype == tensors()[name].dtype
    assert not module.training
    assert not any(parameter.requires_grad for parameter in module.parameters())


def test_the_plain_file_comes_before_its_variants_and_bf16_before_fp16(tmp_path: Path) -> None:
    for variant, value in (("", 1.0), (".fp16", 2.0), (".bf16", 3.0), (".aa", 4.0)):
        save_file({"x": torch.tensor([value])}, tmp_path / f"{STEM}{variant}.safetensors")

    def value() -> float:
        with Checkpoint(tmp_path) as checkpoint:
            target = torch.zeros(1)
            checkpoint.copy_into("x", target)
        return float(target)

    assert value() == 1.0
    (tmp_path / f"{STEM}.safetensors").unlink()
    assert value() == 3.0
    (tmp_path / f"{STEM}.bf16.safetensors").unlink()
    assert value() == 2.0
    (tmp_path / f"{STEM}.fp16.safetensors").unlink()
    assert value() == 4.0


def test_dtypes_are_converted_except_where_they_must_not_be(tmp_path: Path) -> None:
    stored = {name: value.bfloat16() if value.is_floating_point() else value for name, value in tensors().items()}
    save_file(stored, tmp_path / f"{STEM}.safetensors")
    with torch.device("meta"):
        module = network()
    with Checkpoint(tmp_path) as checkpoint:
        load_weights(
            module, checkpoint, own_pieces(module), CPU, torch.float16, stays_float32=lambda name: name == "2.bias"
        )
    dtypes = {name: value.dtype for name, value in module.state_dict().items()}
    assert dtypes.pop("2.bias") == torch.float32
    assert dtypes.pop("1.num_batches_tracked") == torch.int64
    assert set(dtypes.values()) == {torch.float16}
    torch.testing.assert_close(module.state_dict()["2.bias"], tensors()["2.bias"].bfloat16().float())


def test_several_tensors_fill_one_parameter_in_order(tmp_path: Path) -> None:
    parts = {"q": torch.randn(2, 3), "k": torch.randn(1, 3), "kernel": torch.randn(1, 3, 1, 1)}
    save_file(parts, tmp_path / f"{STEM}.safetensors")
    with torch.device("meta"):
        module = nn.Linear(3, 4, bias=False)
    pieces = {"weight": (Piece("q", (2, 3)), Piece("k", (1, 3)), Piece("kernel", (1, 3, 1, 1)))}
    with Checkpoint(tmp_path) as checkpoint:
        load_weights(module, checkpoint, pieces, CPU, torch.float32)
    assert torch.equal(module.weight, torch.cat([parts["q"], parts["k"], parts["kernel"].flatten(1)]))


def test_weights_outlive_their_file(tmp_path: Path) -> None:
    path = tmp_path / f"{STEM}.safetensors"
    save_file(tensors(), path)
    module = load(tmp_path)
    path.write_bytes(b"\0" * path.stat().st_size)
    assert torch.equal(module.state_dict()["0.weight"], tensors()["0.weight"])


def test_no_second_copy_is_held_while_reading(tmp_path: Path) -> None:
    """128 MB of float32 become 64 MB of bfloat16: beside them there is only the tensor being read."""
    large = {f"{index}.weight": torch.zeros(1024, 1024) for index in range(32)}
    save_file(large, tmp_path / f"{STEM}.safetensors")
    script = f"""
import resource, torch
from pathlib import Path
from torch import nn
from diffusion_runtime.weights.checkpoint import Checkpoint
from diffusion_runtime.weights.weight_loading import load_weights, own_pieces
import safetensors
with torch.device("meta"):
    module = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(32))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with Checkpoint(Path({str(tmp_path)!r})) as checkpoint:
    load_weights(module, checkpoint, own_pieces(module), torch.device("cpu"), torch.bfloat16)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 64 + 40


# --- files that are missing -------------------------------------------------------------------------------------------


def test_a_missing_and_an_empty_folder(tmp_path: Path) -> None:
    assert "is missing; copy or download the whole model folder" in failure(tmp_path / "transformer")
    said = failure(tmp_path)
    assert f"expected {STEM}.safetensors" in said
    assert "the folder is empty" in said


def test_a_folder_without_weights_lists_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert "found config.json" in failure(tmp_path)


@pytest.mark.parametrize("name", [f"{STEM}.bin", "model.pt", "wan.pth", "wan.ckpt"])
def test_pickles_are_never_read(tmp_path: Path, name: str) -> None:
    torch.save(tensors(), tmp_path / name)
    said = failure(tmp_path)
    assert name in said
    assert "never read" in said
    assert "safe_serialization=True" in said


def test_every_missing_shard_is_named(tmp_path: Path) -> None:
    shards = write_sharded(tmp_path)
    shards[0].unlink()
    shards[2].unlink()
    said = failure(tmp_path)
    assert "2 of 3 shards are missing" in said
    assert shards[0].name in said
    assert shards[2].name in said
    assert shards[1].name not in said


def test_shards_without_their_index(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    (tmp_path / f"{STEM}.safetensors.index.json").unlink()
    assert "their index is not" in failure(tmp_path)


@pytest.mark.parametrize("content", [{}, {"weight_map": []}, {"weight_map": {}}, {"metadata": {"total_size": 3}}])
def test_an_index_without_its_map(tmp_path: Path, content: object) -> None:
    write_sharded(tmp_path)
    (tmp_path / f"{STEM}.safetensors.index.json").write_text(json.dumps(content))
    assert "key 'weight_map'" in failure(tmp_path)


def test_an_index_may_not_point_outside_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "transformer"
    folder.mkdir()
    save_file(tensors(), tmp_path / "outside.safetensors")
    index = {"weight_map": dict.fromkeys(tensors(), "../outside.safetensors")}
    (folder / f"{STEM}.safetensors.index.json").write_text(json.dumps(index))
    assert "expected files of this folder, got ../outside.safetensors" in failure(folder)


# --- files that are damaged -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [0, 5, 8, 100, 0.5, -1])
def test_a_file_that_was_cut_off(tmp_path: Path, kept: float) -> None:
    path = tmp_path / f"{STEM}.safetensors"
    save_file(
        {name: value.repeat_interleave(50, 0) if value.dim() else value for name, value in tensors().items()}, path
    )
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept) if 0 < kept < 1 else int(kept)])
    said = failure(tmp_path)
    assert path.name in said
    assert "copy or download it again" in said


@pytest.mark.parametrize("content", [b"\xff" * 400, b"\0" * 400, b"<html>404 not found</html>" * 10, b"PK\3\4" * 100])
def test_a_file_that_is_something_else(tmp_path: Path, content: bytes) -> None:
    (tmp_path / f"{STEM}.safetensors").write_bytes(content)
    assert "copy or download it again" in failure(tmp_path)


def test_a_header_that_was_overwritten(tmp_path: Path) -> None:
    path = tmp_path / f"{STEM}.safetensors"
    save_file(tensors(), path)
    content = bytearray(path.read_bytes())
    content[20:60] = b"?" * 40
    path.write_bytes(content)
    assert "damaged" in failure(tmp_path)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_git_lfs_pointer(tmp_path: Path, sharded: bool) -> None:
    path = write_sharded(tmp_path)[1] if sharded else tmp_path / f"{STEM}.safetensors"
    path.write_text(LFS_POINTER)
    said = failure(tmp_path)
    assert path.name in said
    assert "git lfs pull" in said


def test_a_folder_where_the_file_should_be(tmp_path: Path) -> None:
    (tmp_path / f"{STEM}.safetensors").mkdir()
    assert "this is a folder" in failure(tmp_path)


# --- tensors that do not fit ------------------------------------------------------------------------------------------


def test_missing_unexpected_and_reshaped_tensors_are_named_with_their_number(tmp_path: Path) -> None:
    stored = tensors()
    del stored["0.bias"]
    stored["0.weight"] = torch.randn(4, 5)
    stored |= {f"adapter.{number:02d}": torch.zeros(1) for number in range(14)}
    save_file(stored, tmp_path / f"{STEM}.safetensors")
    said = failure(tmp_path)
    assert "1 of 9 tensors are missing: 0.bias" in said
    assert "14 tensors are unexpected: adapter.00, " in said
    assert "adapter.09 and 4 more" in said
    assert "adapter.10" not in said
    assert "0.weight is [4, 5], expected [4, 3]" in said


def test_an_index_that_promises_a_tensor_no_shard_has(tmp_path: Path) -> None:
    path = write_sharded(tmp_path)[0]
    save_file({name: value for name, value in load_file(path).items() if name != "0.weight"}, path)
    assert "1 of 9 tensors are missing: 0.weight" in failure(tmp_path)


def test_a_failure_leaves_the_module_without_half_its_weights(tmp_path: Path) -> None:
    shutil.copy(write_sharded(tmp_path)[0], tmp_path / f"{STEM}.safetensors")
    for shard in tmp_path.glob(f"{STEM}*.json"):
        shard.unlink()
    with torch.device("meta"):
        module = network()
    with Checkpoint(tmp_path) as checkpoint, pytest.raises(ModelLoadError):
        load_weights(module, checkpoint, own_pieces(module), CPU, torch.float32)
    assert all(value.is_meta for value in module.state_dict().values())
