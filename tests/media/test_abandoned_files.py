"""What killed processes leave half written goes with the next file in the folder; what living ones write stays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cli_support import process_environment
from sample_media import make_media

from diffusion_runtime.media import publish
from diffusion_runtime.session.outputs import Outputs

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="kept by POSIX locks")
# Begins a file, says so, and goes on living until its input ends.
WRITER = """
import sys
from pathlib import Path
from diffusion_runtime.media.publish import temporary_file
with temporary_file(Path(sys.argv[1])) as path:
    print(path.name, flush=True)
    sys.stdin.read()
"""


def partial_files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.name.endswith(".partial")}


def test_files_of_processes_that_are_gone_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, environment = subprocess.PIPE, process_environment()
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], env=environment, stdin=pipe, stdout=pipe, text=True
    )
    try:
        assert writer.stdout is not None
        name = writer.stdout.readline().strip()
        # Whoever got the number of a process that is gone has not got its files; another host's locks cannot be seen.
        foreign, other_program = ".1-0badcafe-0.partial", ".a.partial"
        for each in (foreign, other_program):
            (tmp_path / each).touch()
        with publish.temporary_file(tmp_path) as mine:
            make_media(num_frames=1).save(tmp_path / "x.npy")
            Outputs.parse(f"{tmp_path}/", None).prepare()
            assert partial_files(tmp_path) == {name, mine.name, foreign, other_program}
    finally:
        writer.kill()
        writer.communicate()
    assert name in partial_files(tmp_path)
    Outputs.parse(f"{tmp_path}/", None).prepare()
    assert partial_files(tmp_path) == {foreign, other_program}
    (tmp_path / name).touch()
    make_media(num_frames=1).save(tmp_path / "y.npy")
    assert partial_files(tmp_path) == {foreign, other_program}
