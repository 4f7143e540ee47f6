"""Triton kernels on a CPU: `interpret` runs a script of tests under Triton's interpreter, in a process of its own, as
TRITON_INTERPRET is read when triton is imported. The process is forked from the warm interpreter, which has torch, and
imports Triton anew.

TRITON_INTERPRET=1 PYTHONPATH=.:tests python tests/triton_interpreter.py SCRIPT
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from warm_python import run_python

ROOT = Path(__file__).parents[1]

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton has no build for this platform"
)


def interpret(script: Path | str, *, flags: Sequence[str] = ()) -> str:
    """What a script prints. script: its path, or its text. flags: of the Python interpreter."""
    named = [str(script)] if isinstance(script, Path) else ["-c", script]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    if flags:
        command = [sys.executable, *flags, __file__, *named]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    else:
        done = run_python(__file__, *named, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def forget_triton() -> None:
    """What was imported without TRITON_INTERPRET, such as by torch's compiler; the binary part is the same."""
    for name in list(sys.modules):
        if name.split(".")[0] == "triton" and not name.startswith("triton._C"):
            del sys.modules[name]


def patch_languages_once() -> None:
    """At each call of a device function the interpreter looks through triton.language again for what it has replaced in
    it: 0.4 of the time of the block-sparse kernel. Here that is done once per launch, which restores it at its end."""
    from triton import language
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    patched: set[frozenset[str]] = set()
    languages_of: dict[Any, frozenset[str]] = {}

    def languages(function: Any) -> frozenset[str]:
        if function not in languages_of:
            modules = (value for value in function.__globals__.values() if isinstance(value, ModuleType))
            languages_of[function] = frozenset(
                module.__name__ for module in modules if module in (language, language.core)
            )
        return languages_of[function]

    def patch_once(function: Any) -> Any:
        if languages(function) in patched:
            return None
        patched.add(languages(function))
        return patch(function)

    launch = interpreter.GridExecutor.__call__

    def launch_anew(self: Any, *arguments: Any, **named: Any) -> Any:
        patched.clear()
        return launch(self, *arguments, **named)

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launch_anew


def main() -> None:
    forget_triton()
    patch_languages_once()
    del sys.argv[0]
    if sys.argv[0] == "-c":
        exec(compile(sys.argv[1], "<script>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
