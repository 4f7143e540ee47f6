"""Ctrl-C twice, at the last moment and too late: one line, no traceback, and what was finished is said."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_support import Command, process_environment, tiny_arguments

from diffusion_runtime.media import GeneratedMedia

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="forks, and POSIX signals")
PROGRAM = Path(__file__).with_name("interrupted_program.py")
PUBLISHED = ["a-star-seed0.json", "a-star-seed0.npy"]


def test_what_an_interrupted_verb_has_finished_is_said(
    command: Command, tiny_wan_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = tiny_arguments(tiny_wan_folder)
    save = GeneratedMedia.save
    saved: list[Path] = []

    def last_save(media: GeneratedMedia, *given: Any, **options: Any) -> Path:
        if len(saved) == 3:
            raise KeyboardInterrupt
        saved.append(save(media, *given, **options))
        return saved[-1]

    settings = ("--setting", "dense:", "--setting", "fewer: --num-inference-steps 1")
    with monkeypatch.context() as patched:
        patched.setattr(GeneratedMedia, "save", last_save)
        result = command("compare", "a star", *size, "--seed", "1,2", *settings, "-o", tmp_path / "clips")
    assert result.code == 130
    assert "error: interrupted: clips that are made: dense 2 of 2, fewer 1 of 2 (saved in" in result.said
    assert "The same command begins anew" in result.said
    assert len(list((tmp_path / "clips").rglob("*.mp4"))) == 3

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("diffusion_runtime.explanation.explanation.explain", interrupt)
    monkeypatch.setattr("diffusion_runtime.cli.bench._measure", interrupt)
    for arguments in (("explain", *size), ("bench", "attention", "--device", "cpu")):
        result = command(*arguments)
        assert (result.code, "interrupted: nothing was finished" in result.said) == (130, True), arguments


def test_interrupted_before_a_verb_runs(tmp_path: Path) -> None:
    """While the command's modules are imported, and while the parser reads flags: both end with one line."""
    importing, parsing = tmp_path / "importing.py", tmp_path / "parsing.py"
    interrupt = "os.kill(os.getpid(), signal.SIGINT)"
    importing.write_text(
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == 'diffusion_runtime.cli.app': {interrupt}\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from diffusion_runtime.__main__ import main\n"
        "main()\n"
    )
    parsing.write_text(f"import os, signal\n{interrupt}\n")
    for program in ([str(importing)], ["-m", "diffusion_runtime", "generate", "x", "--import", str(parsing)]):
        done = subprocess.run([sys.executable, *program], env=process_environment(), capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (130, "error: interrupted: nothing was finished\n"), program


def test_a_signal_while_the_interpreter_ends_changes_no_exit_code(tmp_path: Path) -> None:
    """Python puts its handlers away before it frees modules; what that meets is sent by a finalizer here."""
    program = tmp_path / "ending.py"
    program.write_text(
        "import os, signal, sys\n"
        "class Late:\n"
        "    def __init__(self):\n"
        "        self.kill, self.number, self.process = os.kill, int(sys.argv.pop()), os.getpid()\n"
        "    def __del__(self):\n"
        "        self.kill(self.process, self.number)\n"
        "sys.late = Late()\n"
        "from diffusion_runtime.cli.app import main\n"
        "main()\n"
    )
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        done = subprocess.run(
            [sys.executable, str(program), "models", str(int(number))], env=process_environment(), capture_output=True
        )
        assert done.returncode == 0, (number, done.stderr)


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
