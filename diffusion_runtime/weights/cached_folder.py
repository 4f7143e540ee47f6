"""Folders in the hub's cache, `models--OWNER--NAME/snapshots/COMMIT`: whose they are, and what completes one."""

from __future__ import annotations

import re
from pathlib import Path

from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.untrusted.files import read_file

COMMIT = re.compile(r"[0-9a-f]{40}")
_MAX_REF_BYTES = 4096
SNAPSHOTS = "snapshots"
_REPOSITORY = re.compile(r"models--([\w.-]+?)--([\w.-]+)")


def commit_of(folder: Path) -> str | None:
    """The commit of a folder in the hub's cache; None for any other folder."""
    return folder.name if folder.parent.name == SNAPSHOTS and COMMIT.fullmatch(folder.name) else None


def hub_id_of(folder: Path) -> str | None:
    """The hub id of a model's folder in the hub's cache, `models--ORG--NAME`; None for any other folder."""
    repository = _REPOSITORY.fullmatch(folder.absolute().name)
    is_cache = repository is not None and any((folder / name).is_dir() for name in (SNAPSHOTS, "blobs"))
    return f"{repository[1]}/{repository[2]}" if repository is not None and is_cache else None


def commits_in(folder: Path) -> list[str]:
    """The commits of a model's folder in the hub's cache whose snapshot is there, the latest first."""
    try:
        found = [path for path in (folder / SNAPSHOTS).iterdir() if path.is_dir() and COMMIT.fullmatch(path.name)]
        return [path.name for path in sorted(found, key=lambda path: (-path.stat().st_mtime, path.name))]
    except OSError:
        return []


def read_ref(folder: Path, name: str) -> str | None:
    """The commit of a branch or a tag in a model's folder in the hub's cache; None where none is known. Raises
    ModelLoadError."""
    path = folder / "refs" / name
    if not path.is_file():
        return None
    return read_file(path, max_bytes=_MAX_REF_BYTES, error=ModelLoadError).decode(errors="replace").strip()


def snapshot_in(folder: Path, revision: str | None = None) -> Path | None:
    """The snapshot to read of a repository's folder in a hub cache, `models--ORG--NAME` or its `snapshots`: that of
    `revision`, a commit or a name in refs, else of refs/main, else the only one; None for any other folder. Raises
    ModelLoadError where none of these is there."""
    folder = folder.parent if folder.name == SNAPSHOTS else folder
    hub_id = hub_id_of(folder)
    if hub_id is None:
        return None
    found = commits_in(folder)
    named = revision or "main"
    commit = named if named in found else read_ref(folder, named)
    if commit not in found:
        commit = found[0] if revision is None and len(found) == 1 else None
    if commit is not None:
        return folder / SNAPSHOTS / commit
    ways = " or ".join(str(folder / SNAPSHOTS / each) for each in found[:3])
    raise ModelLoadError(
        f"{folder} is the cache of {hub_id}, without refs/{named}; "
        + (f"give {ways}" if found else f"it holds no snapshot: `diffusion-runtime models download {hub_id}`")
    )


def way_to_complete(path: Path) -> str:
    """Return how to complete a model folder in which `path`, a component or a file, is missing or incomplete: the
    command that downloads it to the hub's cache, else the advice to copy it again."""
    for folder in (path, *path.parents):
        repository = _REPOSITORY.fullmatch(folder.parent.parent.name)
        if (commit := commit_of(folder)) is not None and repository is not None:
            revision = "" if read_ref(folder.parent.parent, "main") == commit else f" --revision {commit}"
            return f"`diffusion-runtime models download {repository[1]}/{repository[2]}{revision}` downloads the rest"
    return "copy or download the whole model folder"
