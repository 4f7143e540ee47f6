"""Guidance branches of two processes: where attention is too inaccurate in one, both end with its message."""

from __future__ import annotations

from pathlib import Path

from tiny_ltx_video import write_tiny_ltx_video
from warm_python import run_worker


def test_both_processes_end_with_the_message_of_one_and_go_on_with_the_next_request(
    tmp_path: Path,
) -> None:
    model = write_tiny_ltx_video(tmp_path / "model")
    run_worker(Path(__file__).with_name("inaccurate_branch_worker.py"), model, tmp_path)
    found = [(tmp_path / f"ended-{rank}.txt").read_text().splitlines() for rank in range(2)]
    assert found[0] == found[1]
    cond, uncond, last, asked = found[0]
    for line, branch in ((cond, "cond"), (uncond, "uncond")):
        assert line.startswith(f"{branch}: (('of_one_branch', 'its error is 0.36'),) attention of layer 1 (")
        assert line.endswith(".extra.max_error 0.5")
    assert last == "equal: True"
    # The first step of each request: what is measured there is not measured again.
    assert asked == "asked: 3"
