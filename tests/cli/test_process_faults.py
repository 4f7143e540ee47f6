"""A fault on one of several processes ends all of them, with one error that says whose it was."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from several_processes import GENERATE, end, files_in, finish, start, wait_for

from diffusion_runtime.media.clips import inspect_clip

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="looks for processes in /proc")

# Seconds after which a stopped process and a silent one are given up, where the test does not wait for the real ones.
SOON = {"STOPPED_SECONDS": 2.0, "SILENT_SECONDS": 3.0}
FAULTS = {
    "killed while it writes": ([{"rank": 0, "stage": "write", "fault": "kill"}], "(process PID) was killed by SIGKILL"),
    "raises while Python starts": (
        [{"rank": 1, "stage": "start", "fault": "raise"}],
        "ended with exit code 1; its stderr ends with:",
    ),
    "hangs in a step": (
        [{"rank": 0, "stage": "denoise", "step": 1, "fault": "hang"}],
        "hangs: it has been at faulty_program.py:",
    ),
    "hangs while it loads": (
        [{"rank": 0, "stage": "load", "fault": "hang"}],
        "hangs: it has been at faulty_program.py:",
    ),
    "stopped before they meet": ([{"rank": 1, "stage": "join", "fault": "stop"}], "(process PID) has been stopped for"),
    # A call that keeps the interpreter is no fault, however long it is silent.
    "busy, and then stopped": (
        [
            {"rank": 1, "stage": "denoise", "step": 1, "fault": "busy"},
            {"rank": 1, "stage": "decode", "step": 0, "fault": "stop"},
        ],
        "has been stopped for",
    ),
    "terminated often": (
        [{"rank": 0, "stage": "denoise", "step": 1, "fault": "terminate often"}],
        "(process PID) was ended by SIGTERM, which another program sent",
    ),
    "interrupted alone": ([{"rank": 1, "stage": "load", "fault": "interrupt"}], "this process alone was interrupted"),
}


# How a silence is judged is tested with a clock of the test's own in tests/parallel/test_signs_of_life.py.
ALSO_SLOW = (
    *("hangs while it loads", "stopped before they meet", "busy, and then stopped"),
    *("terminated often", "interrupted alone"),
)


@pytest.mark.parametrize(
    ("faults", "said"),
    [pytest.param(*FAULTS[name], id=name, marks=[pytest.mark.slow] if name in ALSO_SLOW else []) for name in FAULTS],
)
def test_a_fault_ends_all_processes_with_one_error(faults: list[dict[str, Any]], said: str, tmp_path: Path) -> None:
    flags = ("--num-gpus", 2, "--set", "runtime.parallel.timeout=8", "--json")
    # Before they meet, a process is known by the environment that its interpreter was started with.
    warm = faults[0]["stage"] != "join"
    result = finish(start(tmp_path, *GENERATE, *flags, plan={"faults": faults, "seconds": SOON}, warm=warm))
    assert result.code == (130 if faults[0]["fault"] == "interrupt" else 1), result.err
    errors = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, result.err
    assert errors[0].startswith(f"error: rank {faults[0]['rank']}")
    for part in said.split("PID"):
        assert part in errors[0]
    message = result.json["error"]
    assert message.splitlines()[0] == errors[0].removeprefix("error: ")
    # What a process said last stands in the error, and only there.
    assert ("RuntimeError: a fault of the test" in message) == (faults[0]["fault"] == "raise")
    assert result.err.count("Traceback") == message.count("Traceback")
    # Latents of a clip that was denoised are kept, with the command that goes on.
    kept = ["outputs"] if faults[-1]["stage"] == "decode" else []
    assert files_in(tmp_path) == ["faulty_program.py", "happened", *kept, "plan.json"]
    assert [path.suffixes for path in (tmp_path / "outputs").glob("*")] == [[".latents", ".safetensors"]] * len(kept)
    assert ("goes on from its latents" in result.err) == bool(kept)


def test_a_killed_process_of_a_stream_leaves_a_clip_that_the_error_names(tmp_path: Path) -> None:
    """The one that writes it, which can say nothing more."""
    flags = ("--model-path", "shapes-causal", "--device", "cpu", "--height", 64, "--width", 64, "--num-frames", 61)
    plan = {"faults": [{"rank": 0, "stage": "chunk", "step": 5, "fault": "kill"}]}
    command = ("generate", "a red circle", *flags, "--num-gpus", 2, "--stream", "x.mp4", "--json")
    result = finish(start(tmp_path, *command, plan=plan))
    assert result.code == 1, result.err
    num_frames = inspect_clip(str(tmp_path / "x.mp4"), "video_path", 100).num_frames
    assert num_frames > 0
    message = result.json["error"]
    assert message.startswith("rank 0 (process ")
    assert message.endswith(f"; the {num_frames} frames made so far are in x.mp4")
    assert result.err.count("error: ") == result.err.count("x.mp4") == 1, result.err


def test_a_rank_that_hears_no_interruption_is_killed_soon(tmp_path: Path) -> None:
    """As one is that waits inside of CUDA. torch's launcher would wait for 30 s, and the test fails before."""
    deaf = {"faults": [{"rank": 1, "stage": "load", "fault": "deaf"}]}
    running = start(tmp_path / "deaf", *GENERATE, "--num-gpus", 2, plan=deaf)
    try:
        wait_for(tmp_path / "deaf" / "happened", running)
        running.process.send_signal(signal.SIGINT)
        result = running.finish(timeout=25)
        assert result.code == 130
        # Two lines where a rank was about to report the first signal when the second one came.
        assert result.err.count("error: ") == result.err.count("error: interrupted") in (1, 2), result.err
        assert running.remaining() == []
    finally:
        end(running)


@pytest.mark.parametrize("what", ["killed", pytest.param("interrupted twice", marks=pytest.mark.slow)])
def test_a_launcher_that_is_killed_or_interrupted_twice_leaves_nobody(what: str, tmp_path: Path) -> None:
    """While one process loads, and the other waits for it."""
    deaf = {"faults": [{"rank": 1, "stage": "load", "fault": "deaf"}]}
    running = start(tmp_path, *GENERATE, "--num-gpus", 2, plan=deaf)
    try:
        wait_for(tmp_path / "happened", running)
        if what == "killed":
            running.process.kill()
        else:
            running.process.send_signal(signal.SIGINT)
            # The first one has reached the processes, and one of them does not care.
            wait_for(tmp_path / "heard", running)
            running.process.send_signal(signal.SIGINT)
            result = running.finish()
            assert result.code == 130
            assert "Traceback" not in result.err
            # Two lines where a rank was about to report the first signal when the second one came.
            assert result.err.count("error: ") == result.err.count("error: interrupted") in (1, 2), result.err
        assert running.remaining() == []
    finally:
        end(running)
