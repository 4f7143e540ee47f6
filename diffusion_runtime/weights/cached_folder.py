"""Folders in the hub's cache, `models--OWNER--NAME/snapshots/COMMIT`: whose they are, and what completes one."""

from __future__ import annotations

import re
from pathlib import Path

from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.untrusted.files import read_file

COMMIT = re.compile(r"[0-9a-f]{40}")
_MAX_REF_BYTES = 4096
_SNAPSHOTS = "snapshots"
_REPOSITORY = re.compile(r"models--([\w.-]+?)--([\w.-]+)")


def commit_of(folder: Path) -> str | None:
    """The commit of a folder in the hub's cache; None for any other folder."""
    return folder.name if folder.parent.name == _SNAPSHOTS and COMMIT.fullmatch(folder.name) else None


def way_to_complete(path: Path) -> str:
    """What to do about a model folder in which `path`, of a component or a file, is missing or is not whole: its
    download in the hub's cache, else a copy."""
    for folder in (path, *path.parents):
        repository = _REPOSITORY.fullmatch(folder.parent.parent.name)
        if (commit := commit_of(folder)) is not None and repository is not None:
            main = folder.parent.parent / "refs" / "main"
            found = read_file(main, max_bytes=_MAX_REF_BYTES, error=ModelLoadError) if main.is_file() else b""
            revision = "" if found.strip() == commit.encode() else f" --revision {commit}"
            return f"`diffusion-runtime models download {repository[1]}/{repository[2]}{revision}` downloads the rest"
    return "copy or download the whole model folder"
