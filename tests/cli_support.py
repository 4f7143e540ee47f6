"""Command lines as users run them, for the tests of the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warm_python import run_python

REPOSITORY = Path(__file__).parents[1]


@dataclass(frozen=True)
class Result:
    """What a command left: exit code, standard output, standard error."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """Standard output as the one JSON object it must be."""
        value = json.loads(self.out)
        assert isinstance(value, dict)
        return value

    @property
    def said(self) -> str:
        """Standard error on one line, however it was wrapped."""
        return " ".join(self.err.split())


Command = Callable[..., Result]


def process_environment(**changes: str) -> dict[str, str]:
    """One thread: where cores are shared, threads that wait for each other make a tiny model slow."""
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "COLUMNS": "80", **changes}


def command_process(
    *arguments: object, cwd: Path, input_text: str = "", warm: bool = True, **environment: str
) -> Result:
    """Run `python -m diffusion_runtime` in a process of its own. warm: it is forked from a warm interpreter."""
    words = ("-m", "diffusion_runtime", *map(str, arguments))
    if warm:
        done = run_python(*words, cwd=cwd, env=process_environment(**environment), input_text=input_text)
        return Result(done.returncode, done.stdout, done.stderr)
    finished = subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env=process_environment(**environment),
        input=input_text,
        capture_output=True,
        text=True,
        timeout=600,
    )
    return Result(finished.returncode, finished.stdout, finished.stderr)


def tiny_arguments(folder: Path) -> tuple[str, ...]:
    sizes = ("--height", "32", "--width", "32", "--num-frames", "5", "--num-inference-steps", "2")
    return ("--model-path", str(folder), *sizes)
