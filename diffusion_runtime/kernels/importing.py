"""Packages that are installed and may be broken all the same: what importing them raises, tried once a process."""

from __future__ import annotations

import functools
import importlib
import warnings


@functools.cache
def import_failure(module: str, *functions: str) -> str | None:
    """What importing `module` raises, in one line, or which of `functions` it lacks; None when all is there.

    Some packages swallow what their own kernels raise at import, so a module that imports is not yet one that computes.
    Tried once a process.
    """
    import torch

    try:
        # Choices settle where transformers are built, on the meta device; what a package makes is no part of it.
        # A deprecation inside a package is no failure of it, wherever warnings are errors.
        with torch.device("cpu"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = importlib.import_module(module)
    except Exception as error:  # whatever a stranger's package raises when it is imported
        return raised_line(error)
    missing = [name for name in functions if not hasattr(found, name)]
    return f"module {module!r} has no {missing[0]!r}" if missing else None


def raised_line(error: BaseException) -> str:
    """`OSError: libbroken.so: cannot open shared object file`."""
    line = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {line}" if line else type(error).__name__
