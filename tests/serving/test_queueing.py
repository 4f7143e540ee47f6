"""Queue rules alone: order, batches, bounded overtaking, admission."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

from diffusion_runtime.serving.dispatcher import Dispatcher
from diffusion_runtime.serving.engine_process import LocalEngines
from diffusion_runtime.serving.engines import batch_size
from diffusion_runtime.serving.files import ResultFiles
from diffusion_runtime.serving.job_objects import job_object
from diffusion_runtime.serving.jobs import VIDEO, Job, Jobs, new_id
from diffusion_runtime.serving.metrics import Metrics
from diffusion_runtime.serving.queueing import WaitingJob, next_batch, refuse, seconds_until_place
from diffusion_runtime.serving.settings import Limits, ServerSettings


def test_every_job_runs_once_in_batches_of_one_key_and_none_is_overtaken_too_often() -> None:
    draw = random.Random(0)
    for _ in range(300):
        max_size, max_overtakes = draw.randint(1, 5), draw.randint(0, 3)
        sizes = [draw.randint(1, 3) for _ in range(draw.randint(1, 12))]
        jobs = [WaitingJob(str(number), draw.choice("abc"), size=size) for number, size in enumerate(sizes)]
        waiting, ran = list(jobs), []
        overtaken = dict.fromkeys((job.id for job in jobs), 0)
        while waiting:
            seen = [WaitingJob(j.id, j.key, "", j.size, overtaken[j.id]) for j in waiting]
            batch = next_batch(seen, max_size, max_overtakes)
            chosen = [job for job in waiting if job.id in batch.ids]
            assert batch.ids[0] == waiting[0].id
            assert [job.id for job in chosen] == list(batch.ids)
            assert len({job.key for job in chosen}) == 1
            assert len(chosen) == 1 or sum(job.size for job in chosen) <= max_size
            last = waiting.index(chosen[-1])
            assert set(batch.overtaken) == {job.id for job in waiting[:last]} - set(batch.ids)
            for job_id in batch.overtaken:
                overtaken[job_id] += 1
            ran += batch.ids
            waiting = [job for job in waiting if job.id not in batch.ids]
        assert sorted(ran) == sorted(job.id for job in jobs)
        assert max(overtaken.values()) <= max_overtakes
    assert next_batch([], 4, 8).ids == ()


def test_requests_run_alone_on_a_cpu_unless_someone_says_so() -> None:
    assert [batch_size(asked, {"device": device}) for asked in (None, 3) for device in ("cpu", "cuda")] == [1, 4, 3, 3]


def test_a_job_joins_past_others_and_stops_before_one_that_waited_enough() -> None:
    waiting = [WaitingJob("1", "a"), WaitingJob("2", "b", overtaken=1), WaitingJob("3", "a"), WaitingJob("4", "a")]
    assert next_batch(waiting, 3, 2).ids == ("1", "3", "4")
    assert next_batch(waiting, 3, 2).overtaken == ("2",)
    waiting[1] = WaitingJob("2", "b", overtaken=2)
    assert next_batch(waiting, 3, 2).ids == ("1",)


def test_admission_is_bounded_in_all_and_per_key_and_says_when_to_come_again() -> None:
    limits = Limits(max_queue=3, max_queue_per_key=2)
    waiting = [WaitingJob("1", "k", "alice"), WaitingJob("2", "k", "alice")]
    assert "of this key" in (refuse(waiting, "alice", limits) or "")
    assert refuse(waiting, "bob", limits) is None
    waiting.append(WaitingJob("3", "k", "bob"))
    assert "at most 3" in (refuse(waiting, "carol", limits) or "")
    assert seconds_until_place(3, 12.0, 3) == 12
    assert seconds_until_place(2, 0.1, 3) == 1


def test_a_job_waits_by_a_clock_that_nobody_sets(tmp_path: Path) -> None:
    settings = ServerSettings(storage=tmp_path, name="shapes", limits=Limits(queue_timeout=60.0))
    jobs = Jobs(tmp_path / "jobs.sqlite3")
    dispatcher = Dispatcher(settings, LocalEngines(), {}, jobs, ResultFiles(tmp_path), Metrics())

    async def status_after_a_look() -> str:
        task = asyncio.ensure_future(dispatcher._look_after())
        await asyncio.sleep(0)
        task.cancel()
        found = jobs.get(job.id)
        assert found is not None
        return found.status

    # The wall clock was set forward by a day since.
    job = Job(id=new_id(VIDEO), kind=VIDEO, created=time.time() - 86400.0, work={"requests": [{}], "key": ""})
    asyncio.run(dispatcher.submit(job))
    assert asyncio.run(status_after_a_look()) == "queued"
    dispatcher.live(job.id).since -= 61.0
    assert asyncio.run(status_after_a_look()) == "failed"
    jobs.close()


def test_a_job_that_waits_has_no_progress(tmp_path: Path) -> None:
    """Also where its row was read before the engine began, as in the answer that accepts it, and after its engine was
    lost; what it had reached counts again once it runs."""
    settings = ServerSettings(storage=tmp_path, name="shapes")
    jobs = Jobs(tmp_path / "jobs.sqlite3")
    dispatcher = Dispatcher(settings, LocalEngines(), {}, jobs, ResultFiles(tmp_path), Metrics())
    work = {"requests": [{"prompt": "a"}], "key": "", "model": "shapes", "options": {}, "attention": None}
    accepted = jobs.add(
        Job(id=new_id(VIDEO), kind=VIDEO, created=time.time(), work={**work, "loras": [], "preset": ""})
    )
    jobs.begin([accepted.id])
    dispatcher.live(accepted.id).advance("denoise", 1, 4)

    def seen(job: Job | None) -> tuple[object, ...]:
        assert job is not None
        return tuple(job_object(job, dispatcher)[name] for name in ("status", "progress", "stage", "step"))

    assert seen(accepted) == ("queued", 0, None, None)
    assert seen(jobs.get(accepted.id)) == ("in_progress", 24, "denoise", 1)
    jobs.requeue(accepted.id, is_loss=True)
    assert seen(jobs.get(accepted.id)) == ("queued", 0, None, None)
    jobs.close()
