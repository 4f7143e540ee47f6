"""A program forked from a warm interpreter behaves as one that an interpreter of its own runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from warm_python import run_python, start_python

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks on Linux alone")

PROGRAM = """
import atexit, json, os, signal, sys, threading
atexit.register(print, "at its end")
threading.Thread(target=lambda: print("in a thread")).start()
here = sys.modules["__main__"]
print(json.dumps([sys.argv, os.getcwd(), sorted(os.environ), os.environ["MINE"], sys.path[0], sys.stdin.read()]))
print([__name__, here.__spec__ is None, here.__dict__ is globals()])
print([name for name in sys.modules if name.startswith("diffusion_runtime")])
print([sys.stdout.encoding, sys.stdout.errors, sys.stdout.line_buffering, sys.stderr.errors, os.isatty(1)])
print([str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE)])
print("said", file=sys.stderr)
"""
ENDS = (
    "",
    "sys.exit(3)",
    "sys.exit('a message')",
    "raise RuntimeError('not caught')",
    "os.kill(os.getpid(), signal.SIGTERM)",
    "os._exit(7)",
    "os.close(1)",
)


def test_it_behaves_as_an_interpreter_of_its_own(tmp_path: Path) -> None:
    # Such as PYTHONUNBUFFERED, which is read when Python starts.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {"PYTHONPATH": str(tmp_path), "MINE": "größe"}
    calls = []
    for number, end in enumerate(ENDS):
        script = tmp_path / f"program_{number}.py"
        script.write_text(f"{PROGRAM}\n{end}\n")
        calls.append((str(script), "--flag", "a b"))
    calls += [("-m", "program_0", "--flag"), ("-c", PROGRAM, "--flag"), ("-m", "no_such_module")]
    differing = {}
    for words in calls:
        own = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=environment, input="typed", capture_output=True, text=True
        )
        warm = run_python(*words, cwd=tmp_path, env=environment, input_text="typed")
        # Where a traceback begins, and who says that there is no such module, is each interpreter's own.
        found, expected = [
            (it.returncode, it.stdout, [line.rpartition(": ")[2] for line in it.stderr.splitlines()[-1:]])
            for it in (warm, own)
        ]
        if found != expected:
            differing[words] = (found, expected)
    assert differing == {}
    assert "in a thread" in run_python(*calls[0], cwd=tmp_path, env=environment).stdout


def test_it_is_interrupted_and_killed_as_any_process(tmp_path: Path) -> None:
    code = "import time; print('ready', flush=True); time.sleep(1000)"
    for number, expected in ((signal.SIGINT, (1, -signal.SIGINT)), (signal.SIGKILL, (-signal.SIGKILL,))):
        with start_python("-c", code, cwd=tmp_path, env=os.environ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            assert process.poll() is None
            process.send_signal(number)
            assert process.wait(600) in expected
