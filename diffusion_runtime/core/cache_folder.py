"""The folder in which this machine keeps what it measured, compiled and checked, for later processes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

ENVIRONMENT_VARIABLE = "DIFFUSION_RUNTIME_CACHE"


def cache_root() -> Path:
    """DIFFUSION_RUNTIME_CACHE, else diffusion-runtime in the user's cache folder, which is XDG_CACHE_HOME or
    ~/.cache."""
    moved = os.environ.get(ENVIRONMENT_VARIABLE)
    if moved:
        return Path(moved).expanduser()
    home = os.environ.get("XDG_CACHE_HOME", "")
    # The specification asks to ignore a relative one.
    user_cache = Path(home) if os.path.isabs(home) else Path("~/.cache").expanduser()
    return user_cache / "diffusion-runtime"


@contextlib.contextmanager
def complete_file(path: Path, text: str) -> Iterator[Path]:
    """Context manager: a file with `text` next to `path` under its own name; removed afterwards, unless renamed."""
    complete = path.with_name(f".{path.stem[:64]}.{os.getpid()}.{os.urandom(4).hex()}.partial")
    try:
        with open(complete, "x", encoding="utf-8") as file:
            file.write(text)
        yield complete
    finally:
        with contextlib.suppress(OSError):
            complete.unlink(missing_ok=True)
