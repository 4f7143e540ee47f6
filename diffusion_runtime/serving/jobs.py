"""Job table: every accepted job as a row of SQLite (WAL), written before the client hears of it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
import os
import secrets
import sqlite3
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diffusion_runtime.serving.files import ResultFiles, sync
from diffusion_runtime.untrusted.json_text import parse_json

QUEUED, IN_PROGRESS, COMPLETED, FAILED = "queued", "in_progress", "completed", "failed"
VIDEO, IMAGE = "video", "image"
# Seconds that an idempotency key is remembered.
KEY_SECONDS = 24 * 3600.0

_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    kind TEXT NOT NULL,
    status TEXT NOT NULL,
    owner TEXT NOT NULL,
    created REAL NOT NULL,
    started REAL,
    ended REAL,
    attempts INTEGER NOT NULL DEFAULT 0,
    losses INTEGER NOT NULL DEFAULT 0,
    num_bytes INTEGER NOT NULL DEFAULT 0,
    work TEXT NOT NULL,
    result TEXT,
    error TEXT
);
CREATE INDEX IF NOT EXISTS jobs_by_status ON jobs (status, number);
CREATE TABLE IF NOT EXISTS idempotency (
    key TEXT PRIMARY KEY,
    digest TEXT NOT NULL,
    job TEXT NOT NULL,
    created REAL NOT NULL
);
"""
_COLUMNS = "number, id, kind, status, owner, created, started, ended, attempts, losses, num_bytes, work, result, error"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One row. number: its place in the order of acceptance. work: what is to be made, as the engine takes it, and what
    answers repeat of the request. attempts: how often it was begun; losses: how often its engine died meanwhile.
    result, error: what came of it."""

    number: int = 0
    id: str
    kind: str
    status: str = QUEUED
    owner: str = ""
    created: float
    started: float | None = None
    ended: float | None = None
    attempts: int = 0
    losses: int = 0
    num_bytes: int = 0
    work: Mapping[str, Any] = field(default_factory=dict)
    result: Mapping[str, Any] | None = None
    error: Mapping[str, Any] | None = None

    @property
    def is_over(self) -> bool:
        return self.status in (COMPLETED, FAILED)

    @property
    def is_stream(self) -> bool:
        return self.kind == VIDEO and bool(self.work["options"].get("stream"))


def new_id(kind: str) -> str:
    """Return an identifier that nobody can guess."""
    return f"{'video' if kind == VIDEO else 'img'}_{secrets.token_hex(16)}"


def work_of(job: Job, index: int, request: Mapping[str, Any], files: ResultFiles) -> dict[str, Any]:
    """Return what the engine makes one file of a job of."""
    target = files.target(job.id, None if job.kind == VIDEO else index)
    inputs = {str(files.input(job.id, name)): name for name in job.work.get("inputs") or ()}
    return {"job": job.id, "index": index, "request": request, "target": str(target), "names": inputs}


class WrittenLog:
    """The log file of a table, which SQLite keeps while the table is open. Waiting for the disk is apart from writing,
    so that no other answer waits with it."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDONLY)
        self._syncing: asyncio.Task[None] | None = None

    def close(self) -> None:
        os.close(self._file)

    async def kept(self) -> None:
        """Return once everything written before is on the disk. Changes that come while the disk is busy share the next
        wait, of 2.5 ms, and 20 in the worst of a hundred. Raises OSError."""
        # One that is under way may have begun before the change.
        if self._syncing is not None:
            with contextlib.suppress(OSError):
                await asyncio.shield(self._syncing)
        if self._syncing is None or self._syncing.done():
            self._syncing = asyncio.ensure_future(asyncio.to_thread(os.fdatasync, self._file))
        await asyncio.shield(self._syncing)


class Jobs:
    """The table in the file `path`. One process has it open. A change outlives a killed process when its method
    returns, and the power once `log.kept` has returned after it."""

    def __init__(self, path: Path) -> None:
        self._database = sqlite3.connect(path, isolation_level=None)
        self._database.execute("PRAGMA journal_mode=WAL")
        # Commits write to the log and do not wait for the disk, which would hold up every other answer: see WrittenLog.
        self._database.execute("PRAGMA synchronous=NORMAL")
        # A second server on the same folder would run every job a second time.
        self._database.execute("PRAGMA locking_mode=EXCLUSIVE")
        self._database.executescript(_SCHEMA)
        self._database.execute("BEGIN IMMEDIATE")
        self._database.execute("COMMIT")
        self.log = WrittenLog(path.with_name(f"{path.name}-wal"))
        sync(path.parent)

    def close(self) -> None:
        self.log.close()
        self._database.close()

    def add(self, job: Job, idempotency: tuple[str, str] | None = None) -> Job:
        """Add a job and return it with its number. idempotency: key and digest of the request that it is for."""
        with _Transaction(self._database):
            cursor = self._database.execute(
                "INSERT INTO jobs (id, kind, status, owner, created, work) VALUES (?, ?, ?, ?, ?, ?)",
                (job.id, job.kind, QUEUED, job.owner, job.created, json.dumps(job.work)),
            )
            if idempotency is not None:
                values = (*idempotency, job.id, job.created)
                self._database.execute("INSERT OR REPLACE INTO idempotency VALUES (?, ?, ?, ?)", values)
        return dataclasses.replace(job, number=int(cursor.lastrowid or 0))

    def get(self, job_id: str) -> Job | None:
        return self._one("SELECT * FROM jobs WHERE id = ?", job_id)

    def ids(self) -> set[str]:
        """Return the identifiers of all jobs."""
        return {row[0] for row in self._database.execute("SELECT id FROM jobs")}

    def idempotent(self, key: str) -> tuple[str, Job] | None:
        """Return the digest and the job of an idempotency key, None for one that is not remembered."""
        row = self._database.execute(
            "SELECT digest, job FROM idempotency WHERE key = ? AND created > ?", (key, time.time() - KEY_SECONDS)
        ).fetchone()
        job = None if row is None else self.get(row[1])
        return None if job is None else (row[0], job)

    def in_status(self, *statuses: str) -> list[Job]:
        """Return the jobs of these states in the order of acceptance."""
        marks = ", ".join("?" * len(statuses))
        return self._several(f"SELECT * FROM jobs WHERE status IN ({marks}) ORDER BY number", *statuses)

    def num_queued(self, up_to: int | None = None) -> int:
        """Return how many jobs wait; up_to: of those with this number or a lower one."""
        query = "SELECT COUNT(*) FROM jobs WHERE status = ? AND number <= ?"
        most = 2**62 if up_to is None else up_to
        return int(self._database.execute(query, (QUEUED, most)).fetchone()[0])

    def page(
        self,
        kind: str,
        *,
        limit: int,
        is_descending: bool,
        after: int | None = None,
        status: str | None = None,
        owner: str | None = None,
    ) -> tuple[list[Job], bool]:
        """Return one page of a list and whether there are more. after: the number of the job that it begins behind.
        owner: whose jobs alone. The order is that of acceptance, in which no two are equal."""
        wanted = {
            "kind = ?": kind,
            "number < ?" if is_descending else "number > ?": after,
            "status = ?": status,
            "owner = ?": owner,
        }
        wanted = {condition: value for condition, value in wanted.items() if value is not None}
        order = "DESC" if is_descending else "ASC"
        query = f"SELECT * FROM jobs WHERE {' AND '.join(wanted)} ORDER BY number {order} LIMIT ?"
        found = self._several(query, *wanted.values(), limit + 1)
        return found[:limit], len(found) > limit

    def begin(self, job_ids: Iterable[str]) -> None:
        with _Transaction(self._database):
            for job_id in job_ids:
                self._database.execute(
                    "UPDATE jobs SET status = ?, started = ?, attempts = attempts + 1 WHERE id = ? AND status = ?",
                    (IN_PROGRESS, time.time(), job_id, QUEUED),
                )

    def requeue(self, job_id: str, *, is_loss: bool) -> None:
        """Let a job that was begun wait again, in its old place. is_loss: its engine died."""
        with _Transaction(self._database):
            self._database.execute(
                "UPDATE jobs SET status = ?, started = NULL, losses = losses + ? WHERE id = ? AND status = ?",
                (QUEUED, int(is_loss), job_id, IN_PROGRESS),
            )

    def complete(self, job_id: str, result: Mapping[str, Any], num_bytes: int) -> bool:
        """Note what came of a running job; False where it has ended meanwhile."""
        return self._end(job_id, COMPLETED, result=result, num_bytes=num_bytes)

    def fail(self, job_id: str, error: Mapping[str, Any]) -> bool:
        """Note why a job came to nothing; False where it has ended already."""
        return self._end(job_id, FAILED, error=error)

    def delete(self, job_id: str) -> None:
        with _Transaction(self._database):
            self._database.execute("DELETE FROM jobs WHERE id = ?", (job_id,))
            self._database.execute("DELETE FROM idempotency WHERE job = ?", (job_id,))

    def expire(self, job_id: str) -> None:
        """Note that the files of a job are gone."""
        with _Transaction(self._database):
            self._database.execute("UPDATE jobs SET num_bytes = 0 WHERE id = ?", (job_id,))

    def ended(self, before: float = math.inf, *, with_files: bool = False, limit: int = -1) -> list[Job]:
        """Return the jobs that ended before a time, the first one first. with_files: of those, the ones that hold
        files. limit: as many at most; -1 for all."""
        query = "SELECT * FROM jobs WHERE ended IS NOT NULL AND ended < ? AND num_bytes >= ? ORDER BY ended LIMIT ?"
        return self._several(query, before, int(with_files), limit)

    def num_bytes(self) -> int:
        """Return the bytes of all results."""
        return int(self._database.execute("SELECT COALESCE(SUM(num_bytes), 0) FROM jobs").fetchone()[0])

    def _end(
        self,
        job_id: str,
        status: str,
        *,
        result: Mapping[str, Any] | None = None,
        error: Mapping[str, Any] | None = None,
        num_bytes: int = 0,
    ) -> bool:
        texts = [None if value is None else json.dumps(value) for value in (result, error)]
        with _Transaction(self._database):
            cursor = self._database.execute(
                "UPDATE jobs SET status = ?, ended = ?, result = ?, error = ?, num_bytes = ? "
                "WHERE id = ? AND status IN (?, ?)",
                (status, time.time(), *texts, num_bytes, job_id, QUEUED, IN_PROGRESS),
            )
        return cursor.rowcount > 0

    def _one(self, query: str, *values: object) -> Job | None:
        return next(iter(self._several(query, *values)), None)

    def _several(self, query: str, *values: object) -> list[Job]:
        rows = self._database.execute(query.replace("*", _COLUMNS, 1), values).fetchall()
        return [_job(row) for row in rows]


class _Transaction:
    """Context manager: the changes inside are in the table together, or none is, whenever this process is killed."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database

    def __enter__(self) -> None:
        self._database.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if kind is None:
                self._database.execute("COMMIT")
        finally:
            # After a full disk SQLite has done so itself.
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")


def _job(row: tuple[Any, ...]) -> Job:
    *plain, work, result, error = row
    names = [item.name for item in dataclasses.fields(Job)]
    texts = [None if text is None else parse_json(text) for text in (work, result, error)]
    return Job(**dict(zip(names, (*plain, *texts), strict=True)))
