"""The job table on a real disk: order, pages, what a second process finds, idempotency."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
import time
from pathlib import Path

import pytest

from diffusion_runtime.serving.files import ResultFiles
from diffusion_runtime.serving.jobs import VIDEO, Job, Jobs, new_id
from diffusion_runtime.serving.retention import Retention
from diffusion_runtime.serving.settings import Limits


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


def test_what_is_accepted_is_on_the_disk_and_no_other_answer_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs, _ = filled(tmp_path / "jobs", 1)
    synced: list[tuple[str, bool]] = []
    may_go_on = threading.Event()

    def sync(file: int) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        synced.append((os.readlink(f"/proc/self/fd/{file}"), is_main))
        assert may_go_on.wait(60)

    async def accept() -> None:
        waiting = [asyncio.ensure_future(jobs.log.kept()) for _ in range(5)]
        while not synced:
            await asyncio.sleep(0.01)
        # The disk is busy, and a change comes meanwhile: what is under way may not hold it.
        late = asyncio.ensure_future(jobs.log.kept())
        assert jobs.num_queued() == 1
        await asyncio.sleep(0)
        assert not any(each.done() for each in (*waiting, late))
        may_go_on.set()
        await asyncio.gather(*waiting, late)

    monkeypatch.setattr(os, "fdatasync", sync)
    asyncio.run(accept())
    assert synced == [(str(tmp_path / "jobs-wal"), False)] * 2
    jobs.close()


def test_an_expired_result_is_known_for_as_long_again(tmp_path: Path) -> None:
    jobs, (made,) = filled(tmp_path / "jobs", 1)
    files, limits = ResultFiles(tmp_path), Limits(keep=100.0, max_storage=1000)
    retention = Retention(jobs, files, limits)
    files.target(made.id).write_bytes(b"x")
    jobs.begin([made.id])
    jobs.complete(made.id, {"parts": []}, 10)
    now = time.time()
    for seconds, is_there, is_known in ((99.0, True, True), (101.0, False, True), (201.0, False, False)):
        retention.remove_expired(now + seconds)
        assert (files.target(made.id).exists(), jobs.get(made.id) is not None) == (is_there, is_known), seconds
    assert retention.refusal(999) is None
    assert "--max-storage" in (retention.refusal(1001) or "")
    roomy = Retention(jobs, files, Limits(max_storage=2**70))
    assert "disk" in (roomy.refusal(2**60) or "")
    jobs.close()


def test_an_idempotency_key_finds_its_job_until_that_is_deleted(tmp_path: Path) -> None:
    jobs, _ = filled(tmp_path / "jobs", 1)
    job = jobs.add(Job(id=new_id(VIDEO), kind=VIDEO, created=time.time(), work={}), ("key", "digest"))
    known = jobs.idempotent("key")
    assert known is not None
    assert (known[0], known[1].id) == ("digest", job.id)
    jobs.delete(job.id)
    assert jobs.idempotent("key") is None
    jobs.close()
