"""CUDA graphs of a decoder on a GPU: the bits of eager runs, with and without fused kernels, exact and fast."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import diffusion_runtime
from diffusion_runtime import GenerationRequest, Pipeline, load_pipeline
from diffusion_runtime.decoders import decoder_graphs
from diffusion_runtime.decoders.decoder_graphs import DecoderGraphs
from diffusion_runtime.decoders.interface import LatentDecoder
from diffusion_runtime.denoising.cuda_graphs.capture import CudaCapture
from diffusion_runtime.models.wan.codec import load_decoder

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

SHAPES = Path(diffusion_runtime.__file__).parent / "assets" / "shapes"


def latents_of(seed: int, num_frames: int, size: tuple[int, int] = (16, 20)) -> torch.Tensor:
    return torch.randn(1, 16, num_frames, *size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("mode", ["exact", "eager", "fast", "tiles"])
def test_replayed_frames_have_the_bits_of_eager_ones(
    mode: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a GPU that others use a pass takes longer than its launches.
    monkeypatch.setattr(decoder_graphs, "refusal_after", lambda _: None)
    device = torch.device("cuda")
    plain: LatentDecoder = load_decoder(SHAPES, device, dtype)
    if mode == "eager":
        plain._fused = []  # type: ignore[attr-defined]
    plain = plain.fast() if mode == "fast" else plain.in_tiles(mode == "tiles")
    size = (36, 20) if mode == "tiles" else (16, 20)
    graphs = DecoderGraphs(CudaCapture(device))
    graphed = plain.with_graphs(graphs)
    for seed, num_frames in enumerate((4, 4, 4, 5, 1, 6)):
        latents = latents_of(seed, num_frames, size)
        graphs.start()
        assert torch.equal(graphed.decode(latents), plain.decode(latents))
    report = graphs.report()
    assert report.num_replayed == report.num_forwards >= 6, report
    assert report.pool_bytes > 0
    print(mode, dtype, plain.implementation, report)


def test_a_pipeline_makes_the_frames_of_one_without_graphs() -> None:
    pipelines = [load_pipeline("shapes", device="cuda", cuda_graphs=mode) for mode in ("auto", "off")]
    for seed in range(4):
        request = GenerationRequest(
            "a red circle moving left", seed=seed, height=128, width=128, num_frames=13, num_inference_steps=4
        )
        graphed, eager = (pipeline(request) for pipeline in pipelines)
        assert (graphed.frames == eager.frames).all()
    assert isinstance(pipelines[0], Pipeline)
    report = graphed.attention_report.decoder_graphs
    assert report is not None
    assert (report.num_replayed, report.eager) == (4, {}), report
    assert eager.attention_report.decoder_graphs is None
