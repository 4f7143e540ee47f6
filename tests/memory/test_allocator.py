"""Segments that grow: when torch's allocator is told, and that a tensor then has what is free in pieces."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from diffusion_runtime.benchmark import random_pipeline
from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.memory.device_memory import use_expandable_segments

MIB = 2**20
CUDA = torch.device("cuda")
# A segment of 2 GiB, split into 32 tensors of which every second one is given back; then a tensor larger than any hole,
# where 3 GiB are allowed and 1 GiB is alive.
FRAGMENTED = f"""
import sys, torch
from diffusion_runtime.memory.device_memory import use_expandable_segments
device = torch.device("cuda:0")
if sys.argv[1] == "grown":
    assert use_expandable_segments(device)
total = torch.cuda.get_device_properties(device).total_memory
torch.cuda.set_per_process_memory_fraction({3072 * MIB} / total, device)
make = lambda mib: torch.empty(mib * {MIB}, dtype=torch.uint8, device=device)
whole = make(2048)
del whole
pieces = [make(64) for _ in range(32)]
del pieces[::2]
try:
    make(1536)
except torch.OutOfMemoryError:
    print("does not fit")
else:
    print("fits")
"""


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}, "max_split_size_mb:512,expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, None),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}, None),
    ],
)
def test_what_the_allocator_is_told(
    variables: dict[str, str], told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", said.append, raising=False)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(sys, "platform", "linux")
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert use_expandable_segments(CUDA) is (told is not None)
    assert said == ([] if told is None else [told])
    assert not use_expandable_segments(torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize(("segments", "outcome"), [("grown", "fits"), ("fixed", "does not fit")])
def test_a_large_tensor_has_what_is_free_in_pieces(segments: str, outcome: str) -> None:
    command = [sys.executable, "-c", FRAGMENTED, segments]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert run.stdout.strip() == outcome, run.stderr


def test_random_weights_are_allocated_as_those_of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a benchmark waits for memory that a generation has."""

    class Told(Exception):
        pass

    def tell(device: torch.device) -> bool:
        raise Told(device.type)

    monkeypatch.setattr(random_pipeline, "use_expandable_segments", tell)
    config = RuntimeConfig(device="cpu", dtype="float32")
    with pytest.raises(Told, match="cpu"):
        random_pipeline.random_pipeline("wan2.1-1.3b", config, lambda stage: pytest.fail(f"{stage} came before"))
