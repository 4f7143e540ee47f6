"""CUDA graphs of processes that share a model: what they capture together, and what each has against it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from warm_python import run_worker

from diffusion_runtime.denoising.cuda_graphs.forward_graphs import CAPTURED, FIRST, NEW_REQUEST, TIMED
from diffusion_runtime.generation.latent_denoiser import LatentDenoiser
from diffusion_runtime.parallel.groups import planned_mesh

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_what_two_processes_capture_together(tmp_path: Path) -> None:
    run_worker(ROOT / "tests/parallel/graphs_worker.py", tmp_path)
    of_ranks = [json.loads((tmp_path / f"result-{rank}.json").read_text()) for rank in range(2)]
    for measured in of_ranks:
        every = [each for value in measured.values() for each in (value if isinstance(value, list) else [value])]
        assert all(each["equal"] for each in every), measured
        # Both branches on each process, or one.
        for name, num_branches in (("ulysses", 2), ("ring", 2), ("branches", 1), ("tensor", 2)):
            first, second = measured[name]
            assert first["eager"] == dict.fromkeys((FIRST, TIMED, CAPTURED), num_branches)
            assert (first["replayed"], second["replayed"]) == (3 * num_branches, 5 * num_branches)
            assert second["eager"] == {NEW_REQUEST: num_branches}
        assert measured["one launch-bound"]["replayed"] == 6
        assert measured["one moves"]["replayed"] == 6
        assert measured["one moves"]["eager"] == {FIRST: 2, TIMED: 2, CAPTURED: 2}
        assert {measured[name]["replayed"] for name in ("none launch-bound", "one fails", "gloo", "auto")} == {0}
        (said,) = measured["gloo"]["eager"]
        assert said == "several processes exchange tokens by gloo, which no CUDA graph holds; NCCL can"
        assert list(measured["auto"]["eager"]) == ["several processes, whose exchanges --cuda-graphs on captures"]
    assert [list(measured["none launch-bound"]["eager"])[-1] for measured in of_ranks] == [
        "not launch-bound (the host takes 1.0 of 10.0 ms)",
        "not launch-bound (the host takes 2.0 of 10.0 ms)",
    ]
    assert [list(measured["one fails"]["eager"])[-1] for measured in of_ranks] == [
        "rank 1: the capture failed: no more memory",
        "the capture failed: no more memory",
    ]


def test_processes_that_share_weights_decide_together() -> None:
    """Their sums are in a graph as exchanges of tokens are."""
    graphs, mesh, nothing = mock.Mock(), planned_mesh(1, 1, 1, 2), mock.Mock()
    fields: dict[str, Any] = {"model": {}, "device": torch.device("cpu"), "dtype": torch.float32, "graphs": graphs}
    LatentDenoiser(nothing, nothing, nothing, nothing, mesh, recorder=nothing, **fields).forward_of()
    assert graphs.of_generation.call_args.kwargs["group"].size == 2
