"""Retention: how long results are kept, and how much of them."""

from __future__ import annotations

from diffusion_runtime.serving.files import ResultFiles
from diffusion_runtime.serving.jobs import Job, Jobs
from diffusion_runtime.serving.settings import Limits


class Retention:
    """Removes jobs that are over, with their files."""

    def __init__(self, jobs: Jobs, files: ResultFiles, limits: Limits) -> None:
        self._jobs = jobs
        self._files = files
        self._limits = limits

    def remove_expired(self, now: float) -> None:
        for job in self._jobs.expired(now - self._limits.keep):
            self._remove(job)

    def make_room(self) -> None:
        """Remove the oldest results until the storage is within its limit."""
        while self._jobs.num_bytes() > self._limits.max_storage:
            job = self._jobs.oldest_ended()
            if job is None:
                return
            self._remove(job)

    def _remove(self, job: Job) -> None:
        self._jobs.delete(job.id)
        self._files.remove(job.id)
