"""Kernels compiled while weights are read: what a plan of memory expects is what the first step launches."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from triton_interpreter import needs_triton

from diffusion_runtime.kernels import compile_ahead, launches
from diffusion_runtime.kernels.activations.api import gelu_, silu_mul
from diffusion_runtime.kernels.compile_ahead import compiling_ahead
from diffusion_runtime.kernels.launches import ExpectedLaunch, Launch, LaunchCache, expecting_launches
from diffusion_runtime.kernels.modulated_norm.api import Branch, Norm, add_branch_, modulated_norm
from diffusion_runtime.kernels.qk_norm_rope.api import norm_rope
from diffusion_runtime.memory.live_bytes import peak_bytes
from diffusion_runtime.startup import first_use

DIM = 512


def calls(device: str, implementation: str = "auto") -> None:
    """One call of each kernel of a block, two of one kind."""
    x, rows = torch.ones(1, 4, DIM, device=device), torch.ones(1, DIM, device=device)
    wide, packed = torch.ones(1, 4, 8 * DIM, device=device), torch.ones(1, 4, 3, 4, DIM // 4, device=device)
    rotations = torch.ones(4, DIM // 8, dtype=torch.complex64, device=device)
    for _ in range(2):
        modulated_norm(x, Norm("layer", 1e-6), shift=rows, scale=rows, implementation=implementation)
    weight, own = torch.ones(DIM, device=device), torch.ones(DIM // 4, device=device)
    add_branch_(x, Branch(x.clone(), rows, Norm("rms", 1e-5, weight)), implementation=implementation)
    norm_rope(packed, [own, own], 1e-5, rotations, implementation=implementation)
    silu_mul(*wide.chunk(2, dim=-1), implementation=implementation)
    gelu_(wide[..., 4 * DIM :], implementation=implementation)


@needs_triton
def test_a_plan_expects_what_a_step_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffusion_runtime.kernels.implementation.is_interpreted", False)
    with expecting_launches() as expected:
        calls("meta")
        # A narrow layer compiles nothing.
        modulated_norm(torch.ones(1, 4, 256, device="meta"), Norm("layer", 1e-6))
    calls("meta")
    launched: list[Launch] = []

    def run(_: LaunchCache, key: Any, pointers: Any, prepare: Any) -> None:
        launched.append(prepare())

    # A CPU tensor stands for a GPU's: it has the same shapes and strides.
    monkeypatch.setattr("diffusion_runtime.kernels.implementation.is_interpreted", True)
    monkeypatch.setattr(LaunchCache, "run", run)
    calls("cpu", "triton")
    assert [each.launch for each in expected.values()] == launched[1:]
    assert len(expected) == 5
    assert {dtype for each in expected.values() for dtype in each.dtypes} == {torch.float32}


@needs_triton
def test_expecting_launches_counts_no_memory() -> None:
    device = torch.device("meta")
    plain = peak_bytes(lambda: calls("meta"), device)
    with expecting_launches() as expected:
        assert peak_bytes(lambda: calls("meta"), device) == plain
    assert expected


class Kernel:
    """A stand-in for a Triton function that compiles."""

    def __init__(self, begun: threading.Barrier | None = None, error: Exception | None = None) -> None:
        self.begun, self.error, self.warmed = begun, error, list[tuple[Any, ...]]()

    def warmup(self, *arguments: Any, grid: tuple[int, int, int], num_warps: int, **constants: Any) -> None:
        if self.begun is not None:
            self.begun.wait(20)
        if self.error is not None:
            raise self.error
        self.warmed.append((arguments, grid, num_warps, constants))
        first_use.count_kernel(1.5)


def expected(kernel: Kernel, number: int = 16) -> ExpectedLaunch:
    return ExpectedLaunch(Launch(kernel, (7, 1, 1), (number, 1e-6), {"DIM": 8}, 4), (torch.bfloat16,))


def test_kernels_are_compiled_in_threads_once_per_specialisation_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_ahead, "is_useful_on", lambda _: True)
    # Both are under way at once, with the reading of weights.
    begun = threading.Barrier(3)
    first, second, broken = Kernel(begun), Kernel(begun), Kernel(error=ValueError("ptxas"))
    work = [expected(first), expected(first, 32), expected(second), expected(broken)]
    device = torch.device("cpu")
    monkeypatch.setattr(compile_ahead.os, "cpu_count", lambda: 4)
    with compiling_ahead(work, [lambda: 1 / 0], device) as remarks:
        begun.wait(20)
        assert remarks == []
    assert len(first.warmed) == len(second.warmed) == 1
    assert first.warmed == [((torch.bfloat16, 32, 1e-6), (7, 1, 1), 4, {"DIM": 8})]
    assert remarks[0].startswith("first use: 2 kernels compiled in 3.0 s while weights were read, and 0.")
    # 17 is no multiple of 16.
    lone = Kernel()
    with compiling_ahead([expected(lone), expected(lone, 17)], [], device):
        pass
    assert len(lone.warmed) == 2


def test_a_load_that_fails_drops_what_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_ahead, "is_useful_on", lambda _: True)
    monkeypatch.setattr(compile_ahead, "_MOST_THREADS", 1)
    go, later = threading.Event(), Kernel()
    with (
        pytest.raises(ZeroDivisionError),
        compiling_ahead([expected(later)], [lambda: go.wait(20)], torch.device("cpu")),
    ):
        raise ZeroDivisionError
    go.set()
    for thread in threading.enumerate():
        if thread.name.startswith("compiling-ahead"):
            thread.join(20)
    assert later.warmed == []


def test_a_cpu_expects_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "import_failure", lambda _: pytest.fail("Triton was imported"))
    calls("meta")
    lone = Kernel()
    with compiling_ahead([expected(lone)], [], torch.device("cpu")) as remarks:
        pass
    assert (lone.warmed, remarks) == ([], [])
