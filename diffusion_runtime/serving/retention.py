"""Retention: how long results are kept, and how much of them."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from typing import Any

from diffusion_runtime.serving.files import ResultFiles
from diffusion_runtime.serving.jobs import Job, Jobs
from diffusion_runtime.serving.settings import Limits

# What is left of a disk beside a result, for the table and for files while they are written.
_FREE_BYTES = 64 * 2**20
# Bytes per pixel of a file at most, as a rule: of a PNG, which may hold noise, and of a frame of a video.
_PNG_BYTES, _FRAME_BYTES = 3.0, 0.5


def bytes_of(requests: Iterable[Mapping[str, Any]]) -> int:
    """Return the bytes that the results of resolved requests may take."""
    num_bytes = 0.0
    for each in requests:
        frames = each.get("num_frames") or 1
        pixels = (each.get("height") or 0) * (each.get("width") or 0) * frames
        num_bytes += pixels * (_PNG_BYTES if frames == 1 else _FRAME_BYTES)
    return int(num_bytes)


class Retention:
    """Removes the files of jobs that are over, and later the jobs: in between, their content is `expired`."""

    def __init__(self, jobs: Jobs, files: ResultFiles, limits: Limits) -> None:
        self._jobs = jobs
        self._files = files
        self._limits = limits

    def remove_expired(self, now: float) -> None:
        for job in self._jobs.ended(now - self._limits.keep, with_files=True):
            self._remove_files(job)
        for job in self._jobs.ended(now - 2 * self._limits.keep):
            self._jobs.delete(job.id)
            self._files.remove(job.id)

    def make_room(self) -> None:
        """Remove the oldest results until the storage is within its limit."""
        while self._jobs.num_bytes() > self._limits.max_storage:
            oldest = self._jobs.ended(with_files=True, limit=1)
            if not oldest:
                return
            self._remove_files(oldest[0])

    def refusal(self, num_bytes: int) -> str | None:
        """Return why results of so many bytes could not be kept, None where they can."""
        if num_bytes > self._limits.max_storage:
            return f"the result may take {num_bytes} bytes, and --max-storage is {self._limits.max_storage}"
        free = shutil.disk_usage(self._files.storage).free
        if num_bytes + _FREE_BYTES > free:
            return f"the result may take {num_bytes} bytes, and the disk of the results has {free} left"
        return None

    def _remove_files(self, job: Job) -> None:
        self._files.remove(job.id)
        self._jobs.expire(job.id)
