"""`measured` on a GPU: what it finds is right, and a CUDA graph may be captured around it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from attention_calls import attention_call

from diffusion_runtime.attention import TokenLayout, attention, measured
from diffusion_runtime.attention.machine_cache import cache_folder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("DIFFUSION_RUNTIME_CACHE", str(tmp_path))
    measured.forget()
    yield
    measured.forget()


@pytest.fixture
def qkv() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, 1024, 4, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3)]


def run(qkv: list[torch.Tensor], layout: TokenLayout | None = None) -> tuple[torch.Tensor, str]:
    call = attention_call(*qkv, measured.MeasuredOptions(), layout=layout)
    result = measured.MeasuredBackend().run(call)
    return result.out, result.implementation


@pytest.mark.parametrize("layout", [None, TokenLayout.text(1024, (700,))], ids=["whole", "padded"])
def test_it_is_right_and_remembers(layout: TokenLayout | None, qkv: list[torch.Tensor]) -> None:
    expected = attention(*qkv, backend="reference", layout=layout).double()
    out, implementation = run(qkv, layout)
    assert float((out.double() - expected).norm() / expected.norm()) < 1e-2
    assert implementation.endswith("(measured)")
    assert len(list(cache_folder().rglob("*.json"))) == 1
    measured.forget()
    assert run(qkv, layout)[1] == implementation


@pytest.mark.parametrize("is_measured_before", [True, False])
def test_a_graph_is_captured_around_it(is_measured_before: bool, qkv: list[torch.Tensor]) -> None:
    expected = attention(*qkv, backend="reference").double()
    # What compiles or allocates handles at its first call has had it.
    attention(*qkv)
    if is_measured_before:
        run(qkv)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, implementation = run(qkv)
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert float((out.double() - expected).norm() / expected.norm()) < 1e-2
    assert implementation.endswith("(measured)" if is_measured_before else "(not measured)")
