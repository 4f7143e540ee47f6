"""One generation on several processes, through the real command line: the same result, and faults that end all."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy
import pytest
from cli_support import Command
from several_processes import GENERATE, files_in, finish, run, start, wait_for

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="looks for processes in /proc")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what one process makes of seed 1: latents.npy, and frames in outputs/."""
    folder = tmp_path_factory.mktemp("alone")
    result = run(folder, *GENERATE, "--seed", 1, plan={"latents": str(folder / "latents.npy")})
    assert result.code == 0, result.err
    return folder


def check_latents(folder: Path, alone: Path) -> None:
    latents, expected = numpy.load(folder / "latents.npy"), numpy.load(alone / "latents.npy")
    error = float(numpy.linalg.norm(latents - expected) / numpy.linalg.norm(expected))
    assert error <= 1e-5, error


def check_frames(folder: Path, alone: Path) -> None:
    name = "outputs/a-red-circle-moving-left-seed1.npy"
    difference = numpy.load(folder / name).astype(int) - numpy.load(alone / name)
    assert abs(difference).max() <= 1


def recipe_of(folder: Path) -> dict[str, Any]:
    sidecar = json.loads((folder / "outputs" / "a-red-circle-moving-left-seed1.json").read_text())
    recipe: dict[str, Any] = sidecar["recipe"]
    return recipe


@pytest.mark.parametrize(
    ("flags", "degrees"),
    [
        (("--ring-degree", 2, "--cfg-parallel"), (2, 1, 2, 1)),
        # Of the exchanges themselves every order and degree is in tests/parallel/test_exchanges.py.
        pytest.param(
            ("--ulysses-degree", 2, "--ring-degree", 2, "--set", "runtime.parallel.order=ring_inside_ulysses"),
            (1, 2, 2, 1),
            marks=pytest.mark.slow,
        ),
        (("--tensor-parallel-size", 2, "--num-gpus", 2), (1, 1, 1, 2)),
    ],
    ids=["cfg x ring", "ulysses x ring", "tensor"],
)
def test_the_same_video_as_on_one_process(
    flags: tuple[object, ...], degrees: tuple[int, int, int, int], alone: Path, tmp_path: Path
) -> None:
    plan = {"latents": str(tmp_path / "latents.npy")}
    result = run(tmp_path, *GENERATE, "--seed", 1, *flags, plan=plan)
    assert result.code == 0, result.err
    assert result.out == "outputs/a-red-circle-moving-left-seed1.npy\n"
    assert result.err.count("wrote outputs/") == 1
    branches, ulysses, ring, tensor = degrees
    num_processes = branches * ulysses * ring * tensor
    assert f"{num_processes} processes: guidance branches {branches} x ulysses {ulysses} x ring {ring}" in result.said
    recorded = recipe_of(tmp_path)["parallel"]
    assert (recorded["branches"], recorded["ulysses"], recorded["ring"], recorded["tensor"]) == degrees
    assert (f"ring {ring} x tensor parallel {tensor} (" in result.said) == (tensor > 1)
    assert (f"self: {4 // tensor} of 4 heads on each process (tensor parallel {tensor})" in result.said) == (tensor > 1)
    assert recorded["num_processes"] == num_processes
    check_latents(tmp_path, alone)
    check_frames(tmp_path, alone)


def test_torchrun_and_a_process_that_is_killed(alone: Path, tmp_path: Path) -> None:
    """Each process has a guidance branch, and one dies when the first has decoded."""
    fault = {"rank": 1, "stage": "decode", "step": 1, "fault": "kill"}
    plan = {"latents": str(tmp_path / "latents.npy"), "faults": [fault]}
    running = start(tmp_path, *GENERATE, "--seed", 1, plan=plan, num_torchrun=2)
    result = finish(running)
    assert result.code == 1
    assert "2 processes: guidance branches 2 x ulysses 1 x ring 1" in result.said
    # Nobody agreed that it succeeded, so nothing is written; the latents were heard before.
    check_latents(tmp_path, alone)
    assert [line for line in result.err.splitlines() if line.startswith("error: ")] == [
        line for line in result.err.splitlines() if line.startswith("error: rank 1 (process ")
    ]
    assert "error: rank 1 (process" in result.err
    # What the denoising left is kept, with the command that goes on.
    kept = "a-red-circle-moving-left-seed1.latents.safetensors"
    assert files_in(tmp_path / "outputs") == [kept]
    assert f"finish outputs/{kept}" in result.said


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_an_interrupted_run_keeps_what_is_finished(
    number: int, alone: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the rest is made later, by any number of processes."""
    running = start(tmp_path, *GENERATE, "--seed", "1-40", "--num-gpus", 2)
    assert running.process.stdout is not None
    first = running.process.stdout.readline().strip()
    assert first == "outputs/a-red-circle-moving-left-seed1.npy"
    running.process.send_signal(number)
    result = finish(running)
    assert result.code == 130, result.err
    written = [first, *result.out.split()]
    assert result.err.count("error: ") == 1
    # A rank that does not end within the launcher's few seconds, on a busy machine, cannot count its files.
    counted = f"error: interrupted: {len(written)} of 40 finished" in result.err
    assert counted or "error: interrupted: files that were finished are in outputs" in result.err
    assert files_in(tmp_path / "outputs") == sorted(
        Path(name).name for path in written for name in (path, path.replace(".npy", ".json"))
    )
    check_frames(tmp_path, alone)
    monkeypatch.chdir(tmp_path)
    resumed = command(*GENERATE, "--seed", f"1-{len(written) + 1}", "--resume")
    assert resumed.code == 0, resumed.err
    assert resumed.out == f"outputs/a-red-circle-moving-left-seed{len(written) + 1}.npy\n"
    assert [line for line in resumed.err.splitlines() if line.startswith("done already: ")] == [
        f"done already: {path}" for path in written
    ]


@pytest.mark.slow
def test_two_processes_resume_what_one_has_begun(alone: Path, tmp_path: Path) -> None:
    """One JSON object for both, and what was there before stays."""
    shutil.copytree(alone / "outputs", tmp_path / "outputs")
    name = "a-red-circle-moving-left-seed"
    kept = (tmp_path / "outputs" / f"{name}1.npy").stat().st_mtime_ns
    repeat = ("--from", tmp_path / "outputs" / f"{name}1.npy", "--device", "cpu", "--format", "npy", "--seed", "1-2")
    flags = ("--ulysses-degree", 2, "--no-cfg-parallel", "--resume", "--json")
    running = start(tmp_path, "generate", *repeat, *flags)
    result = finish(running)
    assert result.code == 0, result.err
    assert [(item["path"], item.get("done_already", False)) for item in result.json["items"]] == [
        (f"outputs/{name}1.npy", True),
        (f"outputs/{name}2.npy", False),
    ]
    assert (tmp_path / "outputs" / f"{name}1.npy").stat().st_mtime_ns == kept
    assert result.err.count("done already: ") == 1
    assert files_in(tmp_path / "outputs") == [f"{name}{seed}.{kind}" for seed in (1, 2) for kind in ("json", "npy")]


@pytest.mark.slow
def test_a_fault_after_the_last_item_is_all_that_is_said(tmp_path: Path, tiny_flags: tuple[str, ...]) -> None:
    """One JSON object: the error, and not the results as well."""
    fault = {"rank": 1, "stage": "end", "fault": "raise"}
    arguments = ("generate", "a star", *tiny_flags, "--device", "cpu", "--num-gpus", 2, "--format", "npy", "--json")
    result = finish(start(tmp_path, *arguments, plan={"faults": [fault]}))
    assert result.code == 1
    assert result.json["error"].startswith("rank 1: unexpected RuntimeError: a fault of the test")
    assert files_in(tmp_path / "outputs") == ["a-star-seed0.json", "a-star-seed0.npy"]


@pytest.mark.slow
def test_what_is_wrong_on_every_process_is_said_once(tmp_path: Path) -> None:
    flags = ("--ulysses-degree", 3, "--json")
    result = finish(start(tmp_path, *GENERATE, *flags, num_torchrun=2))
    assert result.code == 1  # torchrun's own; the processes end with 2
    assert result.err.count("ulysses_degree 3 does not give 2 processes") == 1
    assert "exitcode  : 2" in result.err
    assert result.json["kind"] == "ConfigError"


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "what"), [("import", "terminate"), ("join", "terminate late")])
def test_a_rank_that_is_ended_before_it_meets_the_others_was_not_interrupted(
    tmp_path: Path, stage: str, what: str
) -> None:
    """torchrun ends it because another one has failed: it says so, if it has seen that, or nothing."""
    fault = {"rank": 0, "stage": stage, "fault": what}
    result = finish(start(tmp_path, *GENERATE, "--json", plan={"faults": [fault]}, num_torchrun=2))
    assert result.code == 1
    assert not result.out or result.json["error"].startswith("rank 0 (process ")
    assert "interrupted" not in result.out + result.err


def test_an_interruption_while_ranks_import_is_reported_once(tmp_path: Path) -> None:
    faults = [{"rank": rank, "stage": "import", "fault": "hang"} for rank in range(2)]
    running = start(tmp_path, *GENERATE, "--num-gpus", 2, "--json", plan={"faults": faults})
    wait_for(tmp_path / "happened", running)
    running.process.send_signal(signal.SIGINT)
    result = finish(running)
    assert result.code == 130, result.err
    assert result.err.count("error: ") == result.err.count("error: interrupted: ") == 1
    assert (result.json["kind"], result.json["exit_code"]) == ("Interrupted", 130)


def test_a_request_that_cannot_be_made_ends_processes_that_are_starting(tmp_path: Path) -> None:
    """The launcher checks beside them: its error is that of one process, and none of those that hang is left."""
    faults = [{"rank": rank, "stage": "start", "fault": "hang"} for rank in range(2)]
    flags = ("--num-gpus", 2, "--height", 63, "--json")
    running = start(tmp_path, *GENERATE, *flags, plan={"faults": faults}, warm=False)
    result = running.finish()
    assert result.code == 2, result.err
    assert result.err.count("error: ") == result.err.count("error: height: expected a multiple of 16, got 63") == 1
    assert (result.json["kind"], result.json["exit_code"]) == ("RequestError", 2)
    assert running.remaining() == []
    assert "outputs" not in {path.name for path in tmp_path.iterdir()}
