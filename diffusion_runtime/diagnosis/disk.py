"""Disk check: whether results can be written to the output folder, and the free space there."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from diffusion_runtime.diagnosis.problems import Problem

# A minute of video is tens of megabytes; below this a batch may end on a full disk.
ENOUGH_BYTES = 2**30


@dataclass(frozen=True)
class DiskCheck:
    """folder: where results go; free: bytes available to this user; error: why nothing can be written there, else
    empty."""

    folder: str
    free: int
    error: str = ""

    def to_dict(self) -> dict[str, str | int]:
        return {"folder": self.folder, "free": self.free, "error": self.error}


def check_disk(folder: Path) -> DiskCheck:
    """Check `folder`, or the nearest existing folder above it; nothing is written."""
    folder = folder.absolute()
    existing = next(place for place in [folder, *folder.parents] if place.exists())
    error = ""
    if not existing.is_dir():
        error = f"{existing} is a file"
    elif not os.access(existing, os.W_OK | os.X_OK):
        error = f"no right to write in {existing}"
    return DiskCheck(str(folder), shutil.disk_usage(existing).free, error)


def disk_problems(check: DiskCheck) -> list[Problem]:
    if check.error:
        what = f"results cannot be written to {check.folder}: {check.error}"
        return [Problem(what, "diffusion-runtime generate --output-path FOLDER")]
    if check.free < ENOUGH_BYTES:
        what = f"{check.free / 2**20:.0f} MiB are free where results go ({check.folder})"
        return [Problem(what, "free some space there, or: diffusion-runtime generate --output-path FOLDER")]
    return []
