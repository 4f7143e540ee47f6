"""CUDA graphs on a GPU: replays to the bit of eager passes, over steps, prompts, seeds, guidance, backends, LoRAs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from diffusion_runtime import AttentionConfig, GenerationRequest, Pipeline, load_pipeline
from diffusion_runtime.denoising.cuda_graphs.capture import CudaCapture
from diffusion_runtime.denoising.cuda_graphs.forward_graphs import NEW_REQUEST

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

SIZES: dict[str, Any] = {"height": 128, "width": 128, "num_frames": 9, "num_inference_steps": 8}
REQUESTS = (
    GenerationRequest("a red circle moving left", seed=1, **SIZES),
    GenerationRequest("a blue square moving up", seed=2, **SIZES),
    GenerationRequest("a red circle moving left", seed=3, guidance_mode="two_pass", **SIZES),
    GenerationRequest("a green star", seed=4, guidance_scale=1.0, **SIZES),
)


def load(mode: str, model_path: str = "shapes", **values: Any) -> Pipeline:
    pipeline = load_pipeline(model_path, device="cuda", cuda_graphs=mode, **values)
    assert isinstance(pipeline, Pipeline)
    return pipeline


def check(graphed: Pipeline, eager: Pipeline, request: GenerationRequest) -> Any:
    """What was replayed; frames and counts are those of the eager pipeline."""
    found, expected = graphed(request), eager(request)
    assert (found.frames == expected.frames).all()
    assert found.attention_report.rows == expected.attention_report.rows
    assert found.attention_report.products == expected.attention_report.products
    assert expected.attention_report.graphs is None
    return found.attention_report.graphs


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_replays_equal_eager_passes_of_the_embedded_model(dtype: str) -> None:
    graphed, eager = load("on", dtype=dtype), load("off", dtype=dtype)
    for request, num_replayed in zip(REQUESTS, (6, 7, 12, 7), strict=True):
        report = check(graphed, eager, request)
        assert report.num_replayed == num_replayed, report
        again = check(graphed, eager, dataclasses.replace(request, prompt="a yellow triangle", seed=9))
        assert set(again.eager) == {NEW_REQUEST}, again
    assert again.num_graphs == 3
    assert again.pool_bytes > 0


def test_the_probe_finds_the_embedded_model_launch_bound() -> None:
    graphed, eager = load("auto"), load("off")
    first, second = check(graphed, eager, REQUESTS[0]), check(graphed, eager, REQUESTS[1])
    assert first.num_replayed == 5, first
    assert second.num_replayed == 7, second


@pytest.mark.parametrize(
    ("spec", "is_replayed"),
    [
        ("torch_sdpa", True),
        ("cudnn_attn", True),
        ({"backend": "video_sparse_attn", "extra": {"sparsity": 0.5, "dense_first_steps": 3}}, True),
        (
            {
                "backend": "sliding_tile_attn",
                "extra": {"window": [1, 1, 1], "tile_size": [2, 4, 4], "skip_time_steps": 3},
            },
            True,
        ),
        ({"backend": "vmoba_attn", "extra": {"spatial_chunk_size": [4, 4], "st_chunk_size": [2, 4, 4]}}, True),
        ({"backend": "sparse_video_gen_2_attn", "extra": {"svg2_num_q_centroids": 8}}, False),
    ],
    ids=str,
)
def test_backends_are_replayed_or_say_why_not(spec: Any, is_replayed: bool) -> None:
    attention = AttentionConfig.parse({"per_role": {"self": spec}})
    graphed, eager = load("auto", attention=attention), load("off", attention=attention)
    graphed.parts.graphs.is_probed = False  # type: ignore[union-attr]
    for request in REQUESTS[:2]:
        report = check(graphed, eager, request)
    assert (report.num_replayed > 0) == is_replayed, report
    assert not any("capture failed" in reason for reason in report.eager), report


def test_quantised_layers_are_replayed_and_counted() -> None:
    graphed, eager = load("on", quantization="fp8"), load("off", quantization="fp8")
    for request in REQUESTS[:2]:
        report = check(graphed, eager, request)
    assert set(report.eager) == {NEW_REQUEST}, report


def test_loras_are_switched_under_graphs() -> None:
    graphed, eager = load("on", "emoji"), load("off", "emoji")
    check(graphed, eager, REQUESTS[0])
    for files in (["emoji-fast"], []):
        graphed.set_loras(files)
        eager.set_loras(files)
        report = check(graphed, eager, REQUESTS[1])
        assert report.num_replayed >= 6, report


def test_a_captured_pass_waits_for_nothing_and_allocates_nothing() -> None:
    graphed = load("on")
    for _ in range(2):
        graphed(REQUESTS[0])
    (form, *_) = graphed.parts.graphs._forms.values()  # type: ignore[union-attr]
    assert form.graph is not None
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        form.graph._replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_a_pass_that_waits_for_the_device_is_refused_and_the_device_survives() -> None:
    capture, x = CudaCapture(torch.device("cuda")), torch.ones(4, device="cuda")
    capture.warm_up(lambda: x * float(x.sum()))
    with pytest.raises(RuntimeError):
        capture.capture(lambda: x * float(x.sum()))
    torch.cuda.synchronize()
    replay = capture.capture(lambda: x * 2)
    x.fill_(3.0)
    assert replay().tolist() == [6.0] * 4
    assert capture.pool_bytes() > 0
