"""CUDA graphs of a causal decoder: the frames of eager runs, over clips, lengths and sizes, and what is said of them.

On the CPU, where recorded operators stand for a graph (tests/recorded_capture.py).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from recorded_capture import RecordedCapture

import diffusion_runtime
from diffusion_runtime import GenerationRequest, Pipeline, load_pipeline
from diffusion_runtime.decoders import decoder_graphs
from diffusion_runtime.decoders.causal_video_decoder import CausalVideoDecoder
from diffusion_runtime.decoders.decoder_graphs import AT_ONCE, BUSY, LIBRARY, DecoderGraphs
from diffusion_runtime.decoders.interface import LatentDecoder
from diffusion_runtime.decoders.tiny_decoder import TinyDecoder
from diffusion_runtime.denoising.cuda_graphs.forward_graphs import CAPTURED, FIRST, TIMED
from diffusion_runtime.models.wan.codec import AUTOENCODER, load_decoder
from diffusion_runtime.report.attention_report import GraphReplays

SHAPES = Path(diffusion_runtime.__file__).parent / "assets" / "shapes"
CPU = torch.device("cpu")
# Latents of 8 x 8 pixels each: of one tile, and of two.
SMALL, TILES = (2, 3), (33, 2)


def latents_of(seed: int, num_frames: int, size: tuple[int, int] = SMALL) -> torch.Tensor:
    return torch.randn(1, 16, num_frames, *size, generator=torch.Generator().manual_seed(seed))


class Decoding:
    """The embedded model's decoder, without and with graphs."""

    def __init__(
        self, capture: RecordedCapture | None = None, *, is_fast: bool = False, in_tiles: str = "auto"
    ) -> None:
        self.capture = capture or RecordedCapture()
        self.graphs = DecoderGraphs(self.capture)
        plain: LatentDecoder = load_decoder(SHAPES, CPU, torch.float32)
        plain = plain.fast() if is_fast else plain
        self.plain = plain.in_tiles(in_tiles)
        self.graphed = self.plain.with_graphs(self.graphs)

    def check(self, latents: torch.Tensor) -> GraphReplays:
        """What was replayed; frames are those without graphs."""
        self.graphs.start()
        assert torch.equal(self.graphed.decode(latents), self.plain.decode(latents))
        return self.graphs.report()


@pytest.mark.parametrize("is_fast", [False, True])
def test_latent_frames_are_replayed_over_clips_of_every_length(is_fast: bool) -> None:
    decoding = Decoding(is_fast=is_fast)
    first = decoding.check(latents_of(0, 5))
    assert (first.num_forwards, first.num_replayed, first.num_graphs) == (5, 1, 1)
    assert first.eager == {FIRST: 2, TIMED: 1, CAPTURED: 1}
    assert first.pool_bytes > 1000
    assert decoding.check(latents_of(1, 3)).eager == {TIMED: 1}
    assert decoding.check(latents_of(2, 4)).eager == {CAPTURED: 1}
    # Lengths differ, an image among them, and what lay in the histories before does not matter.
    for seed, num_frames in ((3, 6), (4, 1), (5, 2)):
        report = decoding.check(latents_of(seed, num_frames))
        assert (report.num_replayed, report.num_graphs, report.eager) == (num_frames, 2, {})
    assert str(report).startswith("cuda graphs: 2 of 2 forward passes of the decoder replayed from a CUDA graph (2 gra")
    # Another size has graphs of its own.
    assert decoding.check(latents_of(6, 2, (3, 3))).eager == {FIRST: 2}


def test_images_are_replayed_and_a_video_after_them_begins_with_an_empty_history() -> None:
    decoding = Decoding()
    for seed, num_replayed in ((0, 0), (1, 0), (2, 0), (3, 1)):
        assert decoding.check(latents_of(seed, 1)).num_replayed == num_replayed
    for seed in (4, 5):
        decoding.check(latents_of(seed, 3))
    assert decoding.check(latents_of(6, 3)).num_replayed == 3


def test_tiles_are_clips_of_their_own() -> None:
    decoding = Decoding(in_tiles="on")
    for seed in range(3):
        decoding.check(latents_of(seed, 2, TILES))
    report = decoding.check(latents_of(3, 2, TILES))
    # Two tiles of different heights, with two graphs each.
    assert (report.num_replayed, report.num_graphs) == (4, 4), report


def test_replayed_frames_come_in_larger_chunks_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    decoding = Decoding()
    for seed in range(3):
        decoding.check(latents_of(seed, 4))
    clip = latents_of(3, 4)

    def sizes() -> list[int]:
        return [chunk.shape[1] for chunk in decoding.graphed.stream(clip).chunks]

    assert sizes() == [13]
    # Two later latent frames, 8 frames of 16 x 24 pixels in three colours.
    monkeypatch.setattr(decoder_graphs, "MERGED_BYTES", 8 * 3 * 16 * 24 * 4)
    assert sizes() == [9, 4]
    assert [chunk.shape[1] for chunk in decoding.plain.stream(clip).chunks] == [1, 4, 4, 4]


def test_what_the_device_bounds_runs_eagerly_and_keeps_no_memory() -> None:
    decoding = Decoding(RecordedCapture(host_share=0.5))
    for seed in range(3):
        report = decoding.check(latents_of(seed, 4))
    assert report.eager == {"not launch-bound (the host takes 5.0 of 10.0 ms)": 4}
    assert (report.num_graphs, report.pool_bytes) == (0, 0)
    (size,) = decoding.graphs._sizes.values()
    assert size.num_bytes == 0
    assert "capture" not in decoding.capture.calls


def test_a_capture_that_fails_is_said_and_the_frames_are_right() -> None:
    decoding = Decoding(RecordedCapture(failure=RuntimeError("operation not permitted")))
    reason = "the capture failed: operation not permitted"
    assert decoding.check(latents_of(0, 5)).eager == {FIRST: 2, TIMED: 1, reason: 2}
    assert decoding.check(latents_of(1, 3)).eager == {TIMED: 1, reason: 2}


@torch.inference_mode()
def test_two_clips_at_once_do_not_share_a_history(monkeypatch: pytest.MonkeyPatch) -> None:
    decoding = Decoding()
    for seed in range(3):
        decoding.check(latents_of(seed, 4))
    decoding.graphs.start()
    monkeypatch.setattr(decoder_graphs, "MERGED_BYTES", 1)
    clips = [latents_of(3, 3), latents_of(4, 3)]
    streams = [decoding.graphed.stream(clip).chunks for clip in clips]
    found = [list(chunks) for chunks in zip(*streams, strict=True)]
    for index, clip in enumerate(clips):
        assert torch.equal(torch.cat([chunks[index] for chunks in found], dim=1), decoding.plain.decode(clip))
    report = decoding.graphs.report()
    assert (report.num_replayed, report.eager) == (3, {BUSY: 3})
    # A clip that is given up half way leaves the graphs to the next.
    next(iter(decoding.graphed.stream(clips[0]).chunks))
    assert decoding.check(clips[1]).num_replayed == 3


def test_weights_that_moved_are_captured_anew() -> None:
    decoding = Decoding()
    for seed in range(3):
        decoding.check(latents_of(seed, 4))
    weight = decoding.plain._autoencoder.decoder.conv_out.weight  # type: ignore[attr-defined]
    weight.data = 2 * weight.data
    assert decoding.check(latents_of(3, 4)).eager[FIRST] == 2


def test_other_decoders_say_that_they_run_eagerly() -> None:
    graphs = DecoderGraphs(RecordedCapture())
    module = AUTOENCODER.load(SHAPES, CPU, torch.float32)
    CausalVideoDecoder(module, lambda latents: latents).with_graphs(graphs).decode(latents_of(0, 2))
    assert graphs.report().eager == {LIBRARY: 2}
    graphs.start()
    assert graphs.report().eager == {AT_ONCE: 1}
    assert TinyDecoder.with_graphs is LatentDecoder.with_graphs


def test_a_pipeline_decodes_with_graphs_and_reports_them() -> None:
    loaded = load_pipeline("shapes", device="cpu")
    assert isinstance(loaded, Pipeline)
    graphs = DecoderGraphs(RecordedCapture())
    expected = loaded.decoder
    request = GenerationRequest("a red circle", height=32, width=32, num_frames=9, num_inference_steps=1)
    plain = loaded(request)
    assert plain.attention_report.decoder_graphs is None
    loaded.parts = dataclasses.replace(loaded.parts, decoder=expected.with_graphs(graphs), decoder_graphs=graphs)
    for _ in range(4):
        media = loaded(request)
        assert (media.frames == plain.frames).all()
    assert media.attention_report.to_dict()["decoder_graphs"]["num_replayed"] == 3
    assert "cuda graphs: 3 of 3 forward passes of the decoder replayed" in str(media.attention_report)
