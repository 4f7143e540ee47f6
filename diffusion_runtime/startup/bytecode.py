"""Compiled bytecode of torch and what it imports, kept in the cache folder where Python keeps none beside it."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from diffusion_runtime.core.cache_folder import cache_root

_FOLDER = "bytecode"
_PREFIX_VARIABLE = "PYTHONPYCACHEPREFIX"
_NO_BYTECODE_VARIABLE = "PYTHONDONTWRITEBYTECODE"


def keep_bytecode(package: str = "torch") -> None:
    """Let this process and those that it starts keep bytecode in the cache folder, where `package` has none and Python
    would write none: its folder is read-only, or PYTHONDONTWRITEBYTECODE is set, as images for containers do.

    Without it every command compiles some thousand source files anew. Nothing is changed where PYTHONPYCACHEPREFIX or
    `python -X pycache_prefix` names a folder, under `python -B`, and where another user could write to the cache.
    """
    spec = importlib.util.find_spec(package)
    if sys.pycache_prefix is not None or spec is None or spec.cached is None or os.path.exists(spec.cached):
        return
    if sys.dont_write_bytecode and _NO_BYTECODE_VARIABLE not in os.environ:
        return
    if not sys.dont_write_bytecode and os.access(os.path.dirname(spec.origin or ""), os.W_OK):
        # The first import writes it where Python looks for it.
        return
    folder = cache_root() / _FOLDER
    if not _is_private(folder):
        return
    sys.pycache_prefix = str(folder)
    sys.dont_write_bytecode = False
    os.environ[_PREFIX_VARIABLE] = str(folder)
    os.environ.pop(_NO_BYTECODE_VARIABLE, None)


def _is_private(folder: Path) -> bool:
    """Whether the folder is there, or could be made, and this user alone writes to it: bytecode is code."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError:
        return False
    return not hasattr(os, "getuid") or (status.st_uid == os.getuid() and not status.st_mode & 0o022)
