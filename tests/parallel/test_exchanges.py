"""Attention over a sequence that real processes share, against one process alone: Ulysses, ring, USP in both orders."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from parallel.exchange_cases import HEAD_DIM, SMALL, WORLDS
from warm_python import run_worker

from benchmarks.communication_volume import ForwardShape, communication_volume

ROOT = Path(__file__).parents[2]
NAMES = [(world, name) for world, cases in WORLDS.items() for name in cases]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """What every process of every world measured; a hang ends in an error."""
    return run_worlds(tmp_path_factory.mktemp("worlds"))


def run_worlds(folder: Path, num_gpus: int = 0) -> dict[int, list[dict[str, Any]]]:
    worker = ROOT / "tests/parallel/exchange_worker.py"
    if num_gpus:
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        done = subprocess.run(
            [sys.executable, str(worker), str(folder), str(num_gpus)],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
    else:
        run_worker(worker, folder, num_gpus)
    return {
        world: [json.loads((folder / f"result-{world}-{rank}.json").read_text()) for rank in range(world)]
        for world in WORLDS
        if num_gpus in (0, *range(world, 99))
    }


@pytest.mark.parametrize(("world", "name"), NAMES, ids=[f"{world}: {name}" for world, name in NAMES])
def test_processes_together_equal_one_alone(results: dict[int, list[dict[str, Any]]], world: int, name: str) -> None:
    for of_rank in results[world]:
        measured = of_rank["measured"][name]
        case = WORLDS[world][name]
        is_ring = case.ring > 1
        # Text is on every process. In a ring each computes it beside queries of its own; where these are not equally
        # many everywhere, a matrix product may round otherwise.
        is_even = case.layout is None or case.layout.num_grid_tokens % world == 0
        assert measured["text_apart"] <= (0.0 if is_even or not is_ring else 1e-6)
        if "error_alone" in measured:
            # A ring's parts are rounded to bfloat16 before they are merged in float32 and rounded again.
            assert 0.0 < measured["error"] <= (1.3 if is_ring else 1.001) * measured["error_alone"]
        else:
            assert measured["error"] < 1e-5


@pytest.mark.parametrize(("world", "name"), NAMES, ids=[f"{world}: {name}" for world, name in NAMES])
def test_bytes_sent_are_those_of_the_formulas(results: dict[int, list[dict[str, Any]]], world: int, name: str) -> None:
    case = WORLDS[world][name]
    if case.ring > 1 and (case.ulysses_layer or case.backend not in ("torch_sdpa", "reference")):
        ulysses, ring = case.ulysses * case.ring, 1
    else:
        ulysses, ring = case.ulysses, case.ring
    # What looks at all keys gets all heads of a process at once.
    groups = case.num_head_groups if case.backend == "torch_sdpa" else 1
    layout = SMALL if case.layout is None else case.layout
    shape = ForwardShape(
        num_grid_tokens=layout.num_grid_tokens,
        num_layers=case.steps,
        num_heads=case.num_heads,
        head_dim=HEAD_DIM,
        num_kv_heads=case.num_kv_heads,
        num_text_tokens=layout.num_text_tokens,
        batch=case.batch,
        bytes_per_number=case.dtype.itemsize,
        has_gate=case.gate,
    )
    volume = communication_volume(shape, ulysses=ulysses, ring=ring, num_head_groups=groups)
    sent = [of_rank["measured"][name]["sent_bytes"] for of_rank in results[world]]
    assert volume.all_to_all + volume.ring > 0 or layout.num_tokens == 0
    if ring > 1 and ulysses > 1 and case.num_heads % ulysses:
        # The process with the most heads need not be the one that hands on the longest blocks.
        assert 0.8 * (volume.all_to_all + volume.ring) <= max(sent) <= volume.all_to_all + volume.ring
    else:
        assert max(sent) == volume.all_to_all + volume.ring


def test_a_report_says_how_the_sequence_was_shared(results: dict[int, list[dict[str, Any]]]) -> None:
    measured = results[4][0]["measured"]
    assert "self: torch_sdpa over a shared sequence: ulysses 2 x ring 2" in measured["usp, text before"]["report"]
    sparse = measured["usp, VSA"]["report"]
    assert "it looks at every key, so ulysses 4 instead of ulysses 2 x ring 2" in sparse
    assert "self: video_sparse_attn over a shared sequence: ulysses 4" in sparse
    assert " x 1, layers 1" in measured["ring"]["report"]


def test_steps_that_add_noise_follow_their_formula_on_every_process(results: dict[int, list[dict[str, Any]]]) -> None:
    """The noise is the sample's own: each process draws the same, on one process as on four."""
    for of_world in results.values():
        errors = [
            found["from_formula"]
            for of_rank in of_world
            for name, found in of_rank["measured"].items()
            if name.endswith(", dmd")
        ]
        assert errors
        assert max(errors) < 1e-6


def test_transformers_together_equal_one_alone(results: dict[int, list[dict[str, Any]]]) -> None:
    num_models, names = 0, set[str]()
    for of_world in results.values():
        for of_rank in of_world:
            of_models = {name: found for name, found in of_rank["measured"].items() if name.startswith("model")}
            num_models += len(of_models)
            assert all(found["error"] < 1e-5 for found in of_models.values()), of_models
            names |= set(of_models)
    assert num_models > 80
    # Two and four processes keep the keys of a causal model's earlier chunks by heads.
    assert {f"model, {(degree, 1, False)}, causal, {by}" for degree in (2, 4) for by in ("absolute", "window")} <= names


def test_axes_and_slices_of_a_mesh(results: dict[int, list[dict[str, Any]]]) -> None:
    """Neighbours by rank along the inner axis; slices go by (ring, ulysses) in both orders."""
    found = [of_rank["meshes"] for of_rank in results[4]]
    assert found[1]["ulysses inside"] == {
        "ulysses": [[0, 1], 1],
        "ring": [[1, 3], 0],
        "sequence": [[0, 1, 2, 3], 1],
        "branch": [[1], 0],
    }
    assert found[1]["ring inside"] == {
        "ulysses": [[1, 3], 0],
        "ring": [[0, 1], 1],
        "sequence": [[0, 2, 1, 3], 2],
        "branch": [[1], 0],
    }
    assert found[3]["branches"] == {
        "ulysses": [[2, 3], 1],
        "ring": [[3], 0],
        "sequence": [[2, 3], 1],
        "branch": [[1, 3], 1],
    }
    for of_rank in found:
        assert of_rank["device ulysses inside"] == of_rank["ulysses inside"]
        assert of_rank["device ring inside"] == of_rank["ring inside"]


def test_degrees_must_make_up_the_processes(results: dict[int, list[dict[str, Any]]]) -> None:
    for world, of_world in results.items():
        for of_rank in of_world:
            assert f"= {world + 1} processes, {world} are running" in of_rank["meshes"]["error"]
