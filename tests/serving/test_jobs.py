"""The job table on a real disk: order, pages, what a second process finds, idempotency."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

import pytest

from diffusion_runtime.serving.jobs import VIDEO, Job, Jobs, new_id


def filled(path: Path, count: int) -> tuple[Jobs, list[Job]]:
    jobs = Jobs(path)
    now = time.time()
    # All within one second: their order must not depend on the time.
    made = [jobs.add(Job(id=new_id(VIDEO), kind=VIDEO, created=now, work={"n": number})) for number in range(count)]
    return jobs, made


def test_pages_neither_lose_nor_repeat_a_job_of_one_second(tmp_path: Path) -> None:
    jobs, made = filled(tmp_path / "jobs", 23)
    for is_descending in (True, False):
        seen: list[str] = []
        after = None
        while True:
            page, has_more = jobs.page(VIDEO, limit=5, is_descending=is_descending, after=after, status=None)
            seen += [job.id for job in page]
            if not has_more:
                break
            after = page[-1].number
        expected = [job.id for job in made]
        assert seen == (expected[::-1] if is_descending else expected)


def test_what_was_accepted_is_found_by_the_next_process_and_a_second_one_is_refused(tmp_path: Path) -> None:
    jobs, made = filled(tmp_path / "jobs", 3)
    jobs.begin([made[0].id])
    assert jobs.complete(made[0].id, {"parts": []}, 10)
    # It has ended: nothing that comes later changes it.
    assert not jobs.fail(made[0].id, {"code": "cancelled"})
    jobs.begin([made[1].id])
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        sqlite3.connect(tmp_path / "jobs", timeout=0.1).execute("UPDATE jobs SET status = 'queued'")
    jobs.close()
    again = Jobs(tmp_path / "jobs")
    assert [job.status for job in again.in_status("queued", "in_progress", "completed")] == [
        "completed",
        "in_progress",
        "queued",
    ]
    again.requeue(made[1].id, is_loss=True)
    found = again.get(made[1].id)
    assert found is not None
    assert (found.status, found.losses, found.attempts) == ("queued", 1, 1)
    assert again.num_bytes() == 10
    again.close()


def test_an_idempotency_key_finds_its_job_until_that_is_deleted(tmp_path: Path) -> None:
    jobs, _ = filled(tmp_path / "jobs", 1)
    job = jobs.add(Job(id=new_id(VIDEO), kind=VIDEO, created=time.time(), work={}), ("key", "digest"))
    known = jobs.idempotent("key")
    assert known is not None
    assert (known[0], known[1].id) == ("digest", job.id)
    jobs.delete(job.id)
    assert jobs.idempotent("key") is None
    jobs.close()
