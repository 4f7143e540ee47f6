"""A few hundred cases of hostile input; thousands by hand: `python -m tests.fuzz --kind KIND --cases 5000`."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest
from fuzz.command_lines import CommandLines
from fuzz.runner import run_cases

# As many as take a few seconds of one slow core each, files for all cases included.
NUM_CASES = {"command-lines": 90, "configs": 90, "model-folders": 40, "files": 75, "workflows": 90}
# CPU time, of a machine that may be slow; by hand it is 5.
MAX_SECONDS = 30.0


@pytest.mark.skipif(sys.platform == "win32", reason="interval timers")
@pytest.mark.parametrize("kind", NUM_CASES)
def test_hostile_input_ends_in_typed_errors(kind: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        # Pillow, numpy and wave warn of damaged files; what the command says of them is what counts.
        warnings.simplefilter("ignore")
        report = run_cases(kind, 0, range(NUM_CASES[kind]), tmp_path, MAX_SECONDS, is_quick=True)
    assert [f"{failure.index}: {failure.what}: {failure.case}" for failure in report.failures] == []
    assert report.num_cases == NUM_CASES[kind]


def test_a_case_that_fails_is_reported_and_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors that are not typed, endless loops and memory are all found, by the number of the case."""
    import diffusion_runtime.cli.settings

    def untyped(flags: object) -> None:
        raise KeyError("not typed")

    def endless(flags: object) -> None:
        while True:
            pass

    def greedy(flags: object) -> None:
        bytearray(300 * 1024**2)[::4096] = b"x" * (300 * 256)
        raise diffusion_runtime.UsageError("greedy")

    # It is not limited as a case is.
    monkeypatch.setattr(CommandLines, "warm_up", lambda self: None)
    found = {}
    for name, settle in (("untyped", untyped), ("endless", endless), ("greedy", greedy)):
        (tmp_path / name).mkdir()
        with monkeypatch.context() as patch:
            patch.setattr("diffusion_runtime.cli.generation.resolve_settings", settle)
            # Only the endless case is to run out of time: touching 300 MB takes a busy machine longer than 0.2 s.
            seconds = 0.2 if name == "endless" else MAX_SECONDS
            reports = [
                run_cases("command-lines", 1, [5], tmp_path / name, seconds) for _ in range(1 + (name == "untyped"))
            ]
        assert all(len(report.failures) == 1 for report in reports), reports
        assert len({report.failures[0].case for report in reports}) == 1
        found[name] = reports[0].failures[0].what
    assert "untyped" in found["untyped"]
    assert "KeyError" in found["untyped"]
    assert "out of time (SIGPROF)" in found["endless"]
    assert "memory grew by" in found["greedy"]
