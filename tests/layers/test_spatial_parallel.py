"""Decoding in bands of rows, one a process, equals decoding the whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from cli_support import process_environment
from tiny_models import write_tiny_wan

WORKER = Path(__file__).with_name("spatial_parallel_worker.py")
NUM_PROCESSES = 3


def test_bands_have_no_seams(tmp_path: Path) -> None:
    """All three kinds of Wan's decoder, with bands of 2, 2 and 3 rows: one has neighbours on both sides."""
    folders = [str(write_tiny_wan(tmp_path / kind, vae=kind)) for kind in ("patched", "plain", "residual")]
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(NUM_PROCESSES), str(tmp_path / "store"), *folders],
            env=process_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(NUM_PROCESSES)
    ]
    results = [process.communicate(timeout=600) for process in processes]
    assert [process.returncode for process in processes] == [0] * NUM_PROCESSES, results
    lines = [list(map(float, line.split())) for line in results[0][0].splitlines()]
    assert len(lines) == len(folders)
    for banded, rounding, alone in lines:
        # Convolutions of other sizes sum in another order: how far apart they come out depends on the processor.
        assert banded < 10 * rounding
        assert alone > 1e-3
