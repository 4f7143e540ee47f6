"""Kernels that libraries compile at their first use: counted with their seconds, and reported by the generation."""

from __future__ import annotations

import dataclasses
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import TINY_SIZES

from diffusion_runtime import GenerationRequest, load_pipeline
from diffusion_runtime.generation import participants
from diffusion_runtime.kernels import implementation
from diffusion_runtime.kernels.implementation import VARIABLE
from diffusion_runtime.report.attention_report import AttentionRecorder
from diffusion_runtime.startup import first_use


@pytest.fixture
def compilation(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for triton.knobs.compilation, with Triton's own times."""
    knobs = pytest.importorskip("triton.knobs")
    found = types.SimpleNamespace(listener=None, times=knobs.CompileTimes)
    triton = types.SimpleNamespace(knobs=types.SimpleNamespace(compilation=found))
    monkeypatch.setitem(first_use.sys.modules, "triton", triton)
    return found


def event(compilation: Any, seconds: float, *, cache_hit: bool) -> dict[str, Any]:
    """As Triton's compiler calls its listener."""
    micros = int(seconds * 1e6)
    times = compilation.times(ir_initialization=micros // 4, lowering_stages=[("ttir", micros // 2)], store_results=0)
    return {"src": None, "metadata": {}, "metadata_group": {}, "times": times, "cache_hit": cache_hit}


def test_what_triton_compiles_is_counted_and_what_it_finds_on_disk_is_not(compilation: Any) -> None:
    fresh, hit = event(compilation, 4.0, cache_hit=False), event(compilation, 4.0, cache_hit=True)
    heard: list[dict[str, Any]] = []
    compilation.listener = lambda **values: heard.append(values)
    before = first_use.kernels_compiled()
    first_use.watch_triton()
    first_use.watch_triton()
    for each in (fresh, hit):
        compilation.listener(**each)
    after = first_use.kernels_compiled()
    assert after[0] - before[0] == 1
    assert after[1] - before[1] == pytest.approx(3.0)
    # Whoever listened before hears both, once.
    assert heard == [fresh, hit]


def test_a_generation_says_that_its_narrow_layers_compile_nothing(
    tiny_wan_folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever calls it has: passes that are replayed have none."""
    monkeypatch.setattr(implementation, "is_interpreted", False)
    monkeypatch.delenv(VARIABLE, raising=False)
    parts = load_pipeline(str(tiny_wan_folder), device="cpu").parts  # type: ignore[union-attr]

    def said(device: str, **changes: Any) -> bool:
        recorder = AttentionRecorder()
        dataclasses.replace(parts, **changes).participants(torch.device(device)).finish(recorder)
        return any(note.startswith("fused kernels: eager") for note in recorder.report().notes)

    monkeypatch.setattr(participants, "shortage_remark", lambda _: None)
    assert (said("cuda"), said("cpu")) == (True, False)
    monkeypatch.setattr(implementation, "NARROW", 1)
    assert not said("cuda")
    monkeypatch.setattr(implementation, "NARROW", 256)
    monkeypatch.setenv(VARIABLE, "triton")
    assert not said("cuda")


def test_a_generation_reports_what_was_compiled_for_it_and_the_first_one_what_loading_took(
    tiny_wan_folder: Any,
) -> None:
    pipeline = load_pipeline(str(tiny_wan_folder), device="cpu")
    request = GenerationRequest(prompt="a star", **TINY_SIZES, num_inference_steps=2, seed=1)

    def compile_once(*_: object) -> None:
        first_use.count_kernel(1.5)
        handle.remove()

    handle = pipeline.transformer.register_forward_pre_hook(compile_once)  # type: ignore[attr-defined]
    first, second = pipeline(request), pipeline(request)
    assert first.timings["compile"] == pytest.approx(1.5)
    assert "first use: 1 kernels compiled in 1.5 s of this generation" in first.attention_report.notes
    assert first.timings["read"] > 0
    assert list(second.timings) == ["text", "denoise", "decode"]


@pytest.mark.gpu
def test_what_a_step_launches_on_a_gpu_is_compiled_while_weights_are_read(
    tiny_wan_folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A tiny transformer is too narrow for `auto`.
    monkeypatch.setenv(VARIABLE, "triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    pipeline = load_pipeline(str(tiny_wan_folder), device="cuda")
    request = GenerationRequest(prompt="a star", **TINY_SIZES, num_inference_steps=2, seed=1)
    before = first_use.kernels_compiled()[0]
    notes = pipeline(request).attention_report.notes
    ahead = [note for note in notes if note.startswith("first use:") and "while weights were read" in note]
    assert len(ahead) == 1
    assert int(ahead[0].split()[2]) > 2 * (first_use.kernels_compiled()[0] - before)
