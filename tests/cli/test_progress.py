"""Progress: a few plain lines without a terminal, a redrawn one with it."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from types import SimpleNamespace

import pytest
from cli_support import process_environment

from diffusion_runtime.cli.progress import PLAIN_LINES_PER_STAGE, step_text
from diffusion_runtime.cli.terminal import Terminal
from diffusion_runtime.core.progress import Progress
from diffusion_runtime.tuning.clip_progress import counted_clips


@pytest.mark.parametrize(
    ("progress", "expected"),
    [
        (Progress("denoise", 0, 12, 0.0), "step 0/12"),
        (Progress("denoise", 3, 12, 1.05), "step 3/12, 0.35 s per step, about 3 s left"),
        (Progress("denoise", 12, 12, 4.2), "step 12/12, 0.35 s per step"),
        (Progress("denoise", 1, 50, 10.0), "step 1/50, 10.00 s per step, about 8 min 10 s left"),
        (Progress("denoise", 1, 50, 100.0), "step 1/50, 100.00 s per step, about 1 h 21 min left"),
        (Progress("clips", 3, 16, 1.5), "3/16, 0.50 s each, about 6 s left"),
        (Progress("clips", 1, 4, 0.0004, num_kept=1), "1/4"),
        (Progress("clips", 2, 4, 1.5, num_kept=1), "2/4, 1.50 s each, about 3 s left"),
        (Progress("decode", 1, 1, 2.0), ""),
    ],
)
def test_a_step_says_how_long_it_takes(progress: Progress, expected: str) -> None:
    assert step_text(progress) == expected


def test_kept_clips_do_not_count_for_the_time_of_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock of its own: made, kept, made."""
    times = iter([10.0, 12.0, 12.0001, 14.0])
    monkeypatch.setattr("diffusion_runtime.tuning.clip_progress.time", SimpleNamespace(perf_counter=times.__next__))
    with counted_clips(Terminal(), "as given", 4) as done:
        for _ in range(3):
            done()
    assert capsys.readouterr().err.splitlines() == [
        "as given: 4 clips",
        "  clips: 1/4, 2.00 s each, about 6 s left",
        "  clips: 2/4, 2.00 s each, about 4 s left",
        "  clips: 3/4, 2.00 s each, about 2 s left",
    ]


@pytest.mark.parametrize("num_steps", [1, 4, 8, 9, 50, 1000])
def test_plain_progress_is_a_few_lines(num_steps: int, capsys: pytest.CaptureFixture[str]) -> None:
    with Terminal().progress("a star, seed 0") as view:
        for step in range(num_steps + 1):
            view.update(Progress("denoise", step, num_steps, 0.1 * step))
        view.update(Progress("decode", 0, 1, 0.0))
        view.update(Progress("decode", 1, 1, 1.25))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "a star, seed 0"
    assert lines[-1] == "  decode: 1.25 s"
    assert min(num_steps, 2) <= len(lines) - 2 <= PLAIN_LINES_PER_STAGE + 1
    if num_steps > 1:
        assert lines[-2] == f"  denoise: step {num_steps}/{num_steps}, 0.10 s per step"


def test_quiet_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Terminal(quiet=True).progress("a star") as view:
        view.update(Progress("decode", 1, 1, 1.0))
    assert capsys.readouterr().err == ""


LIVE = """
import time
from diffusion_runtime.cli.terminal import Terminal
from types import SimpleNamespace
terminal = Terminal()
with terminal.progress("[1/2] a [red]star[/red]") as view:
    for step in range(4):
        view.update(SimpleNamespace(stage="denoise", step=step, num_steps=3, seconds=0.5 * step, num_kept=0))
        time.sleep(0.15)
terminal.say("wrote it")
"""


def on_a_terminal(program: str) -> str:
    """Run a program in a real pseudo-terminal of 80 columns: on another kind of file rich draws nothing."""
    ours, theirs = pty.openpty()
    environment = process_environment(TERM="xterm", COLUMNS="80")
    with subprocess.Popen([sys.executable, "-c", program], stderr=theirs, env=environment) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                part = os.read(ours, 4096)
            except OSError:  # Linux says so when the other end is closed
                break
            if not part:
                break
            shown += part
        assert process.wait() == 0
    os.close(ours)
    return shown.decode()


def test_a_terminal_gets_a_line_that_is_redrawn_and_goes_away() -> None:
    text = on_a_terminal(LIVE)
    assert "[1/2] a [red]star[/red]" in text
    assert "denoise" in text
    assert "step 2/3, 0.50 s per step, about 1 s left" in text
    assert "\u2501" in text
    # Erased, then the line that stays.
    assert "\x1b[2K" in text.partition("wrote it")[0][-20:]
    assert text.endswith("wrote it\r\n")


REPORT = """
from diffusion_runtime.cli.generation import _report_end
from diffusion_runtime.cli.terminal import Terminal
from diffusion_runtime.session.batch import BatchResult, Outcome
report = {
    "libraries": [
        {"component": "text_encoder", "library": "torch",
         "implementation": "sdpa, text encoder: int8, dequantised at load: 5 MB", "chosen": ""}
    ],
    "notes": ["8-bit weights are in /" + 90 * "x" + " and are dequantised at load, as its own config.json asks"],
}
outcome = Outcome(None, attention_report=report, timings={}, peak_memory={"machine": 395_000_000})
stages = {name: 1.25 for name in ("import", "prepare", "read", "load", "text", "denoise", "decode", "write", "total")}
_report_end(BatchResult((outcome,), 1), stages, Terminal())
"""


def test_the_report_fits_a_terminal_and_stays_in_whole_lines_elsewhere() -> None:
    """A path that is longer than the terminal stays in one piece."""
    lines = on_a_terminal(REPORT).replace("\r\n", "\n").splitlines()
    # Below the table, which has codes of colours.
    lines = lines[next(index for index, line in enumerate(lines) if line.startswith("text_encoder")) :]
    assert [line for line in lines if len(line) > 80] == [f"  /{90 * 'x'}"]
    text = "\n".join(lines)
    assert "int8, dequantised at load:\n  5 MB), not chosen here" in text
    assert "1 file: load 1.25 s (import" in text
    piped = subprocess.run(
        [sys.executable, "-c", REPORT], capture_output=True, text=True, env=process_environment(), check=True
    )
    assert "(sdpa, text encoder: int8, dequantised at load: 5 MB), not chosen here\n" in piped.stderr
