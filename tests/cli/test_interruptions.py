"""Ctrl-C twice, at the last moment and too late: one line, no traceback, and what was finished is said."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cli_support import process_environment, tiny_arguments

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="forks, and POSIX signals")
PROGRAM = Path(__file__).with_name("interrupted_program.py")
PUBLISHED = ["a-star-seed0.json", "a-star-seed0.npy"]


def test_interrupted_at_every_awkward_moment(tiny_wan_folder: Path, tmp_path: Path) -> None:
    arguments = ("generate", "a star", *tiny_arguments(tiny_wan_folder), "--format", "npy")
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(tmp_path), *arguments],
        env=process_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr

    def check(case: str, code: int, said: str, files: list[str]) -> None:
        err = (tmp_path / f"{case}.err").read_text()
        out = (tmp_path / f"{case}.out").read_text()
        assert int((tmp_path / f"{case}.code").read_text()) == code, err
        assert "Traceback" not in err
        lines = err.splitlines()
        errors = [index for index, line in enumerate(lines) if line.startswith("error: ")]
        assert len(errors) == bool(said), err
        path = str(tmp_path / case / PUBLISHED[1])
        assert out == (f"{path}\n" if files else "")
        if said:
            assert lines[errors[0]] == f"error: {said}"
        if said and files:
            assert lines[errors[0] + 1] == f"  {path}"
        assert sorted(each.name for each in (tmp_path / case).glob("*")) == files

    twice = "interrupted twice: ended at once, files that were not finished are gone"
    check("twice_while_writing", 130, twice, [])
    check("after_publishing", 130, "interrupted: 1 of 1 finished", PUBLISHED)
    check("at_the_summary", 130, "interrupted: 1 of 1 finished", PUBLISHED)
    check("while_it_exits", 0, "", PUBLISHED)
