"""Decoding in bands of rows, one a process, equals decoding the whole."""

from __future__ import annotations

from pathlib import Path

from cli_support import process_environment
from tiny_models import write_tiny_wan
from warm_python import start_python

WORKER = Path(__file__).with_name("spatial_parallel_worker.py")
NUM_PROCESSES = 3


def test_bands_have_no_seams(tmp_path: Path) -> None:
    """All three kinds of Wan's decoder, with bands of 2, 2 and 3 rows: one has neighbours on both sides."""
    folders = [str(write_tiny_wan(tmp_path / kind, vae=kind)) for kind in ("patched", "plain", "residual")]
    processes = [
        start_python(WORKER, rank, NUM_PROCESSES, tmp_path / "store", *folders, cwd=tmp_path, env=process_environment())
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
