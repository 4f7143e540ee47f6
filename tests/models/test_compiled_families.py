"""Every family's blocks in torch.compile: one graph per kind of block, without a graph break (fullgraph), and no graph
made anew over layers, steps, branches, prompts and seeds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tiny_families import given_to, small_request

from diffusion_runtime import GenerationRequest, Pipeline, load_pipeline
from diffusion_runtime.attention import AttentionContext, StepInfo
from diffusion_runtime.layers.compiled_blocks import CompiledBlocks

pytestmark = pytest.mark.filterwarnings("ignore")
# Kinds of blocks: streams apart, one stream, a refiner of the text; Z-Image's text is refined without a timestep;
# Anima's text conditioner has blocks of its own; FLUX.3's block runs on the text alone, on the image and on both.
NUM_KINDS = {
    "wan": 1,
    "flux1": 2,
    "flux2": 2,
    "flux3": 3,
    "qwen_image": 1,
    "hunyuan_video": 3,
    "hunyuan_video_15": 2,
    "ltx2": 1,
    "ltx_video": 1,
    "z_image": 2,
    "krea2": 2,
    "anima": 2,
    "moss_image": 2,
}


def load(folder: Path) -> Pipeline:
    pipeline = load_pipeline(str(folder), device="cpu", dtype="float32")
    assert isinstance(pipeline, Pipeline)
    return pipeline


# Those that take 2 s and more, but one of each kind: cross-attention (Wan, LTX-Video), joint blocks with a refiner
# (Z-Image).
ALSO_SLOW = (
    *("flux1", "flux2", "flux3", "qwen_image", "hunyuan_video", "hunyuan_video_15", "ltx2"),
    *("krea2", "anima", "moss_image"),
)


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=[pytest.mark.slow] if each in ALSO_SLOW else []) for each in NUM_KINDS]
)
def test_blocks_compile_whole_and_compute_the_same(tiny_folder_of: Callable[[str], Path], family: str) -> None:
    pipeline = load(tiny_folder_of(family))
    latents, timestep, inputs = given_to(pipeline)

    def predict(*, is_compiled: bool) -> tuple[list[torch.Tensor], list[tuple[str, str, str, int]]]:
        first = AttentionContext(step=StepInfo(0, 2), is_compiled=is_compiled)
        second = dataclasses.replace(first, step=StepInfo(1, 2))
        with torch.inference_mode():
            out = [
                pipeline.transformer(latents, time, inputs, now)
                for time, now in ((timestep, first), (timestep / 2, second))
            ]
        rows = first.recorder.report().rows
        return out, [(row.role, row.layers, row.steps, row.count) for row in rows]

    expected, rows = predict(is_compiled=False)
    blocks = CompiledBlocks("eager")
    blocks.compile(pipeline.transformer)
    found, compiled_rows = predict(is_compiled=True)
    assert blocks.num_graphs == NUM_KINDS[family]
    assert compiled_rows == rows
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    "family", ["wan", *(pytest.param(each, marks=pytest.mark.slow) for each in ("flux1", "qwen_image", "z_image"))]
)
def test_nothing_is_compiled_anew_for_other_prompts_steps_seeds_and_sizes(
    tiny_folder_of: Callable[[str], Path], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With aot_eager, whose tracing is where sizes may become constants."""
    pipeline = load(tiny_folder_of(family))
    requests = [
        dataclasses.replace(
            small_request(pipeline, num_steps), prompt=prompt, seed=seed, width=width, guidance_mode="two_pass"
        )
        for prompt, seed, num_steps, width in (
            ("a red circle", 3, 2, 64),
            ("two blue squares and the words of a prompt with many more tokens " * 3, 4, 3, 64),
            ("a star", 5, 2, 128),
        )
    ]
    expected = [pipeline(request) for request in requests]
    blocks = CompiledBlocks("aot_eager")
    blocks.compile(pipeline.transformer)
    monkeypatch.setattr(pipeline, "parts", dataclasses.replace(pipeline.parts, compiled=blocks))
    found = [pipeline(requests[0])]
    assert 1 <= blocks.num_graphs <= NUM_KINDS[family]
    before = blocks.num_graphs, dict(torch._dynamo.utils.counters["frames"])
    found += [pipeline(request) for request in requests[1:]]
    assert (blocks.num_graphs, dict(torch._dynamo.utils.counters["frames"])) == before
    assert found[1].attention_report.notes[-1] == f"compile: {blocks.num_blocks} blocks, nothing compiled anew"
    assert found[0].timings["compile"] == blocks.seconds
    for ours, theirs in zip(found, expected, strict=True):
        # Frames of 8 bits, rounded.
        assert numpy.abs(ours.frames.astype(int) - theirs.frames.astype(int)).max() <= 1
        assert [row.count for row in ours.attention_report.rows] == [row.count for row in theirs.attention_report.rows]


def test_caches_and_progressive_resolution_run_around_compiled_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = load_pipeline("shapes", device="cpu")
    assert isinstance(pipeline, Pipeline)
    request = GenerationRequest("a red circle", height=128, width=128, num_frames=1, num_inference_steps=10, seed=1)
    cases: tuple[dict[str, Any], ...] = (
        {"step_cache": "easycache:threshold=0.5,warmup=0.2"},
        {"step_cache": "dbcache:F=1,W=1,R=0.9"},
        {"cfg_gate": 0.5},
        {"progressive_resolution": "dct:delta=0.1,A=200,beta=2.4"},
    )
    requests = [dataclasses.replace(request, **values) for values in cases]
    expected = [pipeline(each) for each in requests]
    blocks = CompiledBlocks("eager")
    blocks.compile(pipeline.transformer)
    monkeypatch.setattr(pipeline, "parts", dataclasses.replace(pipeline.parts, compiled=blocks))
    for each, eager in zip(requests, expected, strict=True):
        found = pipeline(each)
        decided = [[(row.computed, row.reused) for row in made.attention_report.steps] for made in (found, eager)]
        assert decided[0] == decided[1], each
        assert numpy.abs(found.frames.astype(int) - eager.frames.astype(int)).max() <= 1, each
    # A batch of both guidance branches and one branch by itself.
    assert blocks.num_graphs <= 2


def test_loras_are_switched_under_compiled_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = load_pipeline("shapes", device="cpu")
    assert isinstance(pipeline, Pipeline)
    blocks = CompiledBlocks("eager")
    blocks.compile(pipeline.transformer)
    monkeypatch.setattr(pipeline, "parts", dataclasses.replace(pipeline.parts, compiled=blocks))
    request = GenerationRequest("a red circle", height=64, width=64, num_frames=1, num_inference_steps=2, seed=1)
    plain = pipeline(request)
    pipeline.set_loras(["shapes-fast"])
    switched = pipeline(request)
    fresh = load_pipeline("shapes", device="cpu", lora=["shapes-fast"])(request)
    assert blocks.num_graphs == 1
    assert numpy.abs(switched.frames.astype(int) - fresh.frames.astype(int)).max() <= 1
    assert (switched.frames != plain.frames).any()


@pytest.mark.slow
def test_quantised_layers_are_operators_of_the_graphs_and_counted(
    tiny_folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """FLUX.1: with a GELU on a part of a product's input."""
    pipeline = load_pipeline(str(tiny_folder_of("flux1")), device="cpu", dtype="float32", quantization="fp8-all")
    assert isinstance(pipeline, Pipeline)
    request = small_request(pipeline)
    expected = pipeline(request)
    blocks = CompiledBlocks("eager")
    blocks.compile(pipeline.transformer)
    monkeypatch.setattr(pipeline, "parts", dataclasses.replace(pipeline.parts, compiled=blocks))
    found = [pipeline(request)]
    # The first and the last block stay as they are, and are kinds of their own.
    num_graphs = blocks.num_graphs
    assert 1 <= num_graphs <= 2 * NUM_KINDS["flux1"]
    found.append(pipeline(dataclasses.replace(request, prompt="two blue squares", seed=4)))
    assert blocks.num_graphs == num_graphs
    (row,) = expected.attention_report.products
    assert row.count > 0
    assert found[0].attention_report.products == found[1].attention_report.products == (row,)
    assert numpy.abs(found[0].frames.astype(int) - expected.frames.astype(int)).max() <= 1
