"""Every family's forward pass, captured once and replayed for other steps and requests: the numbers of an eager one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from graphed_forwards import run_request, with_other_text
from recorded_capture import RecordedCapture
from tiny_families import WRITERS, given_to

from diffusion_runtime import Pipeline, load_pipeline
from diffusion_runtime.denoising.cuda_graphs.forward_graphs import ForwardGraphs

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("family", WRITERS)
def test_replays_equal_eager_passes(tiny_folder_of: Callable[[str], Path], family: str) -> None:
    pipeline = load_pipeline(str(tiny_folder_of(family)), device="cpu", dtype="float32")
    assert isinstance(pipeline, Pipeline)
    model, (latents, _, inputs) = pipeline.transformer, given_to(pipeline)
    graphs = ForwardGraphs(RecordedCapture())
    for request, num_replayed in ((inputs, 2), (with_other_text(inputs, 0.7), 4)):
        found, report = run_request(model, request, graphs, sample_shape=latents.shape)
        expected, eager = run_request(model, request, None, sample_shape=latents.shape)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
        assert report.rows == eager.rows
        assert report.notes == eager.notes
        assert report.graphs is not None
        if (refusal := model.replay_refusal()) is not None:
            assert (report.graphs.num_forwards, report.graphs.num_replayed) == (5, 0)
            assert refusal in str(report.graphs), report.graphs
            continue
        assert (report.graphs.num_forwards, report.graphs.num_replayed, report.graphs.num_graphs) == (
            5,
            num_replayed,
            1,
        ), report.graphs
