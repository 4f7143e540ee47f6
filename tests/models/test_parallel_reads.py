"""Weight files read by threads: the same numbers by every way, files that end or vanish, and what is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tables import table

from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.memory.transfers import Transfers
from diffusion_runtime.weights import parallel_reads
from diffusion_runtime.weights.checkpoint import Checkpoint
from diffusion_runtime.weights.parallel_reads import ParallelReads, StoredBytes
from diffusion_runtime.weights.tensor_files import SafetensorsFile
from diffusion_runtime.weights.weight_loading import load_weights, own_pieces

CPU = torch.device("cpu")
NAME = "diffusion_pytorch_model.safetensors"


class StandIn(Transfers):
    """A device that copies when somebody waits: whoever fills a buffer again before that copies other numbers."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.staged = 0
        self._one = threading.Lock()

    def mark(self) -> Any:
        return "mark"

    def copy(self, copies: Any, after: Any) -> Any:
        assert after == "mark"
        return [lambda pair=pair: pair[0].copy_(pair[1]) for pair in copies]

    def wait(self, copied: Any) -> None:
        self.finish(copied)

    def finish(self, copied: Any) -> None:
        with self._one:
            for each in copied:
                each()
            copied.clear()

    def staging(self, num_bytes: int) -> torch.Tensor:
        self.staged += num_bytes
        return torch.empty(num_bytes, dtype=torch.uint8)


@pytest.fixture(params=["inline", "threads", "device"])
def reads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ParallelReads:
    if request.param != "inline":
        monkeypatch.setattr(parallel_reads, "CHUNK_BYTES", 64)
        monkeypatch.setattr(parallel_reads, "_INLINE_BYTES", 0)
    return ParallelReads(StandIn() if request.param == "device" else None)


def stored(path: Path, numbers: torch.Tensor, offset: int = 0) -> StoredBytes:
    path.write_bytes(bytes(offset) + numbers.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return StoredBytes(path, os.open(path, os.O_RDONLY), offset, numbers.nbytes, numbers.dtype)


def test_every_way_reads_and_converts_the_same_numbers(tmp_path: Path, reads: ParallelReads) -> None:
    torch.manual_seed(0)
    finishes, pairs = [], []
    for count, shape in enumerate([(3,), (), (0, 4), (700, 9), (64, 2)]):
        for kind in (torch.float32, torch.bfloat16, torch.float16):
            numbers = torch.randn(shape).to(kind)
            source = stored(tmp_path / f"{count}-{kind}", numbers, offset=count)
            for wanted in (torch.float32, torch.bfloat16):
                target = torch.full(shape, 7.0, dtype=wanted)
                finishes.append(reads.into(source, target))
                pairs.append((target, numbers.to(wanted)))
    for finish in finishes:
        finish()
    assert all(torch.equal(found, expected) for found, expected in pairs)
    transfers = reads._transfers
    if isinstance(transfers, StandIn):
        assert 0 < transfers.staged <= 2 * parallel_reads.MAX_THREADS * parallel_reads.CHUNK_BYTES
    reads.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("read-weights")]


def test_a_file_that_ends_or_vanishes_while_it_is_read_is_a_typed_error(tmp_path: Path, reads: ParallelReads) -> None:
    whole = torch.randn(4000)
    source = stored(tmp_path / "cut", whole)
    os.truncate(tmp_path / "cut", 1000)
    with pytest.raises(ModelLoadError, match=r"cut was cut off while it was read; copy or download it again"):
        reads.into(source, torch.empty(4000))()
    # As of a share that is gone: the descriptor is no file's any more.
    os.close(source.descriptor)
    with pytest.raises(ModelLoadError, match=r"cut cannot be read any more: .*is its disk or share still there"):
        reads.into(source, torch.empty(4000))()
    reads.close()


def test_what_is_interrupted_leaves_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_reads, "CHUNK_BYTES", 64)
    monkeypatch.setattr(parallel_reads, "_INLINE_BYTES", 0)
    module = torch.nn.Linear(2000, 40, device="meta")
    state = {"weight": torch.randn(40, 2000), "bias": torch.randn(40)}
    save_file(state, tmp_path / NAME)
    begun, targets = threading.Event(), []
    read = StoredBytes.read

    def slow(self: StoredBytes, start: int, target: torch.Tensor) -> None:
        begun.set()
        read(self, start, target)

    def empty(shape: torch.Size, *, dtype: torch.dtype) -> torch.Tensor:
        targets.append(torch.zeros(shape, dtype=dtype))
        if len(targets) == 2:
            begun.wait(10)
            raise KeyboardInterrupt
        return targets[-1]

    monkeypatch.setattr(StoredBytes, "read", slow)
    with pytest.raises(KeyboardInterrupt), Checkpoint(tmp_path) as checkpoint:
        load_weights(module, checkpoint, own_pieces(module), CPU, torch.float32, make_empty=empty)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("read-weights")]
    with Checkpoint(tmp_path) as checkpoint:
        load_weights(module, checkpoint, own_pieces(module), CPU, torch.float32)
    assert torch.equal(module.weight, state["weight"])


def test_a_folder_that_is_cut_while_it_is_loaded_ends_with_an_error_and_not_with_a_signal(tmp_path: Path) -> None:
    """Files that are mapped end the process there (SIGBUS)."""
    module = torch.nn.Linear(2000, 400, device="meta")
    save_file({"weight": torch.randn(400, 2000), "bias": torch.randn(400)}, tmp_path / NAME)
    with Checkpoint(tmp_path) as checkpoint:
        os.truncate(tmp_path / NAME, 200_000)
        with pytest.raises(ModelLoadError, match="was cut off while it was read"):
            load_weights(module, checkpoint, own_pieces(module), CPU, torch.float32)


@pytest.mark.gpu
def test_a_gpu_gets_the_numbers_of_the_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    state = {
        "weight": torch.randn(3000, 2000).bfloat16(),
        "bias": torch.randn(3000),
        "running": torch.arange(10),
    }
    save_file(state, tmp_path / NAME)
    with Checkpoint(tmp_path) as checkpoint:
        for dtype in (torch.float32, torch.bfloat16):
            for name, expected in state.items():
                kind = dtype if expected.is_floating_point() else expected.dtype
                target = torch.empty(expected.shape, dtype=kind, device="cuda")
                checkpoint.begin_copy(name, target)()
                assert torch.equal(target.cpu(), expected.to(kind)), (name, dtype)


@pytest.mark.gpu
def test_one_checkpoint_fills_a_gpu_and_the_cpu_in_turn(tmp_path: Path) -> None:
    weight = torch.randn(3000, 2000).bfloat16()
    save_file({"weight": weight}, tmp_path / NAME)
    with Checkpoint(tmp_path) as checkpoint:
        for device in ("cuda", "cpu", "cuda"):
            target = torch.empty(weight.shape, dtype=torch.float32, device=device)
            checkpoint.begin_copy("weight", target)()
            assert torch.equal(target.cpu(), weight.float()), device


def head_file(path: Path, head: dict[str, Any], num_bytes: int) -> Path:
    text = json.dumps(head).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + num_bytes)
    return path


def entry(kind: Any, shape: Any, *places: Any) -> dict[str, Any]:
    return {"dtype": kind, "shape": shape, "data_offsets": list(places)}


def test_a_file_may_be_larger_than_the_memory(tmp_path: Path) -> None:
    size = 2**40
    head = {"large": entry("U8", [size], 16, 16 + size), "small": entry("F32", [4], 0, 16), "__metadata__": {"a": "b"}}
    with contextlib.closing(SafetensorsFile(head_file(tmp_path / "a.safetensors", head, size + 16))) as file:
        assert list(file.heads) == ["large", "small"]
        assert file.metadata == {"a": "b"}
        assert torch.equal(file.read("small"), torch.zeros(4))
        assert torch.equal(file.read("large", slice(size - 3, size)), torch.zeros(3, dtype=torch.uint8))


@table(
    "head",
    [
        {"a": entry("F32", [4], 0, 12)},
        {"a": entry("F32", [4], 0, 16), "b": entry("F32", [1], 8, 12)},
        {"a": entry("F32", [3], 0, 12), "b": entry("U8", [2], 14, 16)},
        {"a": entry("F32", [3], 0, 12)},
        {"a": entry("F32", [4], 4, 20)},
        {"a": entry("F99", [4], 0, 16)},
        {"a": entry(["F32"], [4], 0, 16)},
        {"a": entry("F32", [-2, -2], 0, 16)},
        {"a": entry("F32", [4.0], 0, 16)},
        {"a": entry("F32", "4", 0, 16)},
        {"a": entry("F32", [4], 0)},
        {"a": entry("F32", [4], 0, None)},
        {"a": {"dtype": "F32", "shape": [4]}},
        {"a": []},
        {"a": entry("F32", [4], 0, 16), "__metadata__": {"a": 1}},
        {"a": entry("F32", [4], 0, 16), "__metadata__": "text"},
    ],
)
def test_a_head_that_lies_is_damaged(head: dict[str, Any], tmp_path: Path) -> None:
    """Each is what safetensors refuses as well."""
    path = head_file(tmp_path / "a.safetensors", head, 16)
    with pytest.raises(SafetensorError), safe_open(path, framework="pt"):
        pass
    with pytest.raises(ModelLoadError, match=r"a.safetensors is damaged or not a (whole )?safetensors file"):
        SafetensorsFile(path)
