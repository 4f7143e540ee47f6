"""Replicas: who takes which job, how many run, and what becomes of jobs when one dies, hangs or has another version."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import sqlite3
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from running_server import SMALL, finished, is_running, running_server, wait_for
from tables import table

from diffusion_runtime.config import ParallelConfig, RuntimeConfig
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.serving.dispatcher import Dispatcher
from diffusion_runtime.serving.engines import EngineLost, versions
from diffusion_runtime.serving.files import ResultFiles
from diffusion_runtime.serving.jobs import COMPLETED, FAILED, VIDEO, Job, Jobs, new_id
from diffusion_runtime.serving.machine_share import take_share
from diffusion_runtime.serving.metrics import Metrics
from diffusion_runtime.serving.settings import Limits, ServerSettings
from diffusion_runtime.serving.unavailable import Unavailable

ENOUGH = 20.0
CARD = {"family": "scripted", "dtype": "bfloat16", "device": "cuda"}


class ScriptedEngine:
    """An engine that says what the test has it say."""

    def __init__(self, given: Mapping[str, Any], on_message: Callable[[dict[str, Any]], None]) -> None:
        self.given = given
        self.on_message = on_message
        self.sent: list[dict[str, Any]] = []
        self.end: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def run(self) -> int:
        return await self.end

    async def ask(self, kind: str, work: Mapping[str, Any]) -> Any:
        return {"kind": kind, "replica": self.given["replica"][0]}

    def send(self, kind: str, /, **values: Any) -> None:
        if self.end.done():
            raise EngineLost("the engine has ended")
        self.sent.append({"type": kind, **values})

    def kill(self) -> None:
        if not self.end.done():
            self.end.set_result(-9)

    def release(self) -> None:
        self.kill()

    def say(self, kind: str, **values: Any) -> None:
        self.on_message({"type": kind, **values})

    def be_ready(self) -> None:
        self.say("hello", versions=versions())
        self.say("ready", card=CARD)

    def finish(self) -> None:
        """Complete what it was handed last."""
        last = [message for message in self.sent if message["type"] == "run"][-1]
        for work in last["works"]:
            file = {"name": "x.mp4", "bytes": 1, "sha256": "0", "all_bytes": 1}
            report: dict[str, Any] = {"rows": []}
            sizes = {"num_frames": 1, "height": 8, "width": 8, "timings": {}, "peak_memory": {}}
            self.say("finished", job=work["job"], index=0, file=file, attention_report=report, **sizes)
        self.say("done")


class ScriptedEngines:
    """started: every engine so far, by replica. end_at_once: replicas whose engines do, as their programs fail;
    cannot_start: those for which the system has no process."""

    max_starts = 3

    def __init__(self) -> None:
        self.started: dict[int, list[ScriptedEngine]] = {}
        self.end_at_once: set[int] = set()
        self.cannot_start: set[int] = set()

    async def connect(self) -> None: ...

    async def close(self) -> None: ...

    def engine(
        self, index: int, given: Mapping[str, Any], on_message: Callable[[dict[str, Any]], None]
    ) -> ScriptedEngine:
        engine = ScriptedEngine(given, on_message)
        self.started.setdefault(index, []).append(engine)
        if index in self.cannot_start:
            raise BlockingIOError(11, "Resource temporarily unavailable", "/secret")
        if index in self.end_at_once:
            engine.end.set_result(1)
        return engine


class Running:
    """A dispatcher with scripted engines."""

    def __init__(self, folder: Path, replicas: tuple[int, int], **limits: Any) -> None:
        self.jobs = Jobs(folder / "jobs.sqlite3")
        settings = ServerSettings(storage=folder, name="x", replicas=replicas, limits=Limits(**limits))
        self.engines = ScriptedEngines()
        self.dispatcher = Dispatcher(settings, self.engines, {}, self.jobs, ResultFiles(folder), Metrics())

    async def __aenter__(self) -> Running:
        await self.dispatcher.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.dispatcher.stop()
        self.jobs.close()

    def engine(self, replica: int) -> ScriptedEngine:
        return self.engines.started[replica][-1]

    async def add(self, key: str = "a") -> str:
        work = {"requests": [{"num_frames": 1}], "key": key, "options": {}, "inputs": []}
        job = Job(id=new_id(VIDEO), kind=VIDEO, created=time.time(), work=work)
        return (await self.dispatcher.submit(job)).id

    def handed(self, replica: int) -> list[str]:
        """Return the jobs that the replica's engine was handed last."""
        sent = [message for message in self.engine(replica).sent if message["type"] == "run"]
        return [work["job"] for work in sent[-1]["works"]] if sent else []

    def job(self, job_id: str) -> Job:
        job = self.jobs.get(job_id)
        assert job is not None
        return job

    def states(self) -> list[str]:
        return [each["state"] for each in self.dispatcher.engines.states()]


async def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + ENOUGH
    while not condition():
        assert time.monotonic() < deadline, "it does not become true"
        await asyncio.sleep(0.01)


def test_jobs_go_to_free_replicas_in_their_order_and_outlive_one_that_dies(tmp_path: Path) -> None:
    async def run() -> None:
        async with Running(tmp_path, (2, 2)) as server:
            await until(lambda: len(server.engines.started) == 2)
            # Of one key, both waiting, and not one batch: the other replica would have nothing to do.
            first, second = await server.add(), await server.add()
            for replica in (0, 1):
                server.engine(replica).be_ready()
            await until(lambda: server.handed(0) and server.handed(1))
            assert (server.handed(0), server.handed(1)) == ([first], [second])
            third, fourth = await server.add(), await server.add()
            # What waits joins once one alone is free.
            server.engine(1).finish()
            await until(lambda: len(server.handed(1)) == 2)
            assert server.handed(1) == [third, fourth]
            assert server.states() == ["busy", "busy"]
            # A cancelled job is stopped where it runs, and nowhere else.
            server.dispatcher.cancel(fourth, "asked")
            assert server.engine(1).sent[-1] == {"type": "cancel", "job": fourth}
            assert all(message["type"] != "cancel" for message in server.engine(0).sent)
            # The engine of the first dies twice: the job is made again by whoever is free, once.
            server.engine(0).kill()
            await until(lambda: server.job(first).status == "queued")
            assert server.states() == ["loading", "busy"]
            server.engine(1).finish()
            await until(lambda: server.handed(1) == [first])
            await until(lambda: len(server.engines.started[0]) == 2)
            server.engine(1).kill()
            await until(lambda: server.job(first).status == FAILED)
            assert (server.job(first).error or {})["code"] == "engine_lost"
            ended = [server.job(each) for each in (second, third, fourth)]
            assert [(job.status, job.attempts) for job in ended] == [(COMPLETED, 1), (COMPLETED, 1), (FAILED, 1)]

    asyncio.run(run())


def test_replicas_start_for_what_waits_and_end_when_idle_and_questions_start_one(tmp_path: Path) -> None:
    async def run() -> None:
        async with Running(tmp_path, (0, 2), idle=0.2, max_batch_size=1) as server:
            # One starts though the fewest is none: a model that cannot be loaded ends the server.
            await until(lambda: 0 in server.engines.started)
            server.engine(0).be_ready()
            await until(lambda: server.states() == ["off", "off"])
            server.dispatcher.engines.check_ready()
            jobs = [await server.add("a"), await server.add("b"), await server.add("c")]
            await until(lambda: server.states() == ["loading", "loading"])
            await until(lambda: [len(server.engines.started[replica]) for replica in (0, 1)] == [2, 1])
            for replica in (0, 1):
                server.engine(replica).be_ready()
            await until(lambda: server.handed(0) and server.handed(1))
            server.engine(0).finish()
            await until(lambda: server.handed(0) == [jobs[2]])
            server.engine(0).finish()
            server.engine(1).finish()
            await until(lambda: server.states() == ["off", "off"])
            assert all(server.job(job).status == COMPLETED for job in jobs)
            asked = asyncio.ensure_future(server.dispatcher.engines.ask("check", {}))
            await until(lambda: len(server.engines.started[0]) == 3)
            server.engine(0).be_ready()
            assert await asked == {"kind": "check", "replica": 0}

    asyncio.run(run())


def test_an_engine_that_hangs_or_is_of_another_version_is_refused(tmp_path: Path) -> None:
    async def run() -> None:
        async with Running(tmp_path, (1, 1), hang_timeout=0.3) as server:
            await until(lambda: server.engines.started)
            server.engine(0).be_ready()
            # It says nothing any more: no sign of life.
            await until(lambda: len(server.engines.started[0]) == 2)
            server.engine(0).be_ready()
            job = await server.add()
            await until(lambda: server.handed(0) == [job])
            began = server.engine(0)
            async with asyncio.timeout(ENOUGH):
                while not began.end.done():
                    # Alive, and its batch does not move.
                    began.say("alive")
                    await asyncio.sleep(0.05)
            await until(lambda: server.job(job).losses == 1)
            await until(lambda: len(server.engines.started[0]) == 3)
            assert server.dispatcher.engines.failure is None
            server.engine(0).say("hello", versions={**versions(), "torch": "1.0"})
            failure = server.dispatcher.engines.failure
            assert failure is not None
            assert "version skew: it runs torch 1.0 instead of" in failure["message"]
            assert server.engine(0).end.done()

    asyncio.run(run())


def test_a_replica_whose_engines_all_end_at_once_has_failed_and_the_server_with_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diffusion_runtime.serving.kept_engine._FIRST_PAUSE", 0.02)

    async def run() -> None:
        async with Running(tmp_path, (2, 2)) as server:
            replicas = server.dispatcher.engines
            server.engines.end_at_once.add(1)
            await until(lambda: 0 in server.engines.started)
            await until(lambda: server.states() == ["loading", "failed"])
            # The other one may still load; it serves, and who asks for the server's health is told of the first one.
            assert replicas.failure is None
            server.engine(0).be_ready()
            job = await server.add()
            await until(lambda: server.handed(0) == [job])
            failed = replicas.states()[1]
            assert failed["reason"] == "replica 1: 3 engines in a row did not stay, the last one ended with code 1"
            server.engine(0).finish()
            await until(lambda: server.job(job).status == COMPLETED)
            # One that jobs end is none of these, however often.
            for losses in (1, 2, 1, 2):
                job = job if losses == 2 else await server.add()
                await until(lambda job=job: server.handed(0) == [job])
                number = len(server.engines.started[0])
                server.engine(0).kill()
                await until(lambda number=number: len(server.engines.started[0]) > number)
                assert replicas.failure is None
                server.engine(0).be_ready()
            assert (server.job(job).error or {})["code"] == "engine_lost"
            # It is started again all the same, and may be mended.
            server.engines.end_at_once.clear()
            number = len(server.engines.started[1])
            await until(lambda: len(server.engines.started[1]) > number)
            server.engine(1).be_ready()
            await until(lambda: "failed" not in server.states())
            server.engines.cannot_start |= {0, 1}
            waiting = await server.add()
            server.engine(0).kill()
            server.engine(1).kill()
            await until(lambda: replicas.failure is not None)
            failure = replicas.failure
            assert failure is not None
            assert "could not be run (Resource temporarily unavailable)" in failure["message"]
            assert "/secret" not in json.dumps([failure, replicas.states()])
            with pytest.raises(Unavailable, match="3 engines in a row"):
                server.dispatcher.refuse_new("")
            assert server.job(waiting).status == "queued", "the next server makes it"

    asyncio.run(run())


def test_a_server_without_a_place_for_its_engines_says_so_and_ends(tmp_path: Path) -> None:
    async def run() -> None:
        server = Running(tmp_path, (1, 1))

        async def connect() -> None:
            raise KeyError("/secret")

        server.engines.connect = connect  # type: ignore[method-assign]
        async with server:
            await until(lambda: server.dispatcher.engines.failure is not None)
            failure = server.dispatcher.engines.failure
            assert failure is not None
            assert (failure["exit_code"], failure["message"]) == (1, "no place to run: KeyError; the log says how")

    asyncio.run(run())


def test_jobs_are_made_once_a_full_disk_has_room_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with Running(tmp_path, (1, 1)) as server:
            failed: list[str] = []

            def fill_disk(*names: str) -> None:
                def fail(*_: Any, name: str, **__: Any) -> Any:
                    failed.append(name)
                    raise sqlite3.OperationalError("database or disk is full")

                for name in names:
                    monkeypatch.setattr(server.jobs, name, functools.partial(fail, name=name))

            await until(lambda: server.engines.started)
            fill_disk("begin")
            server.engine(0).be_ready()
            job = await server.add()
            await until(lambda: failed)
            monkeypatch.undo()
            await until(lambda: server.handed(0) == [job])
            # Neither what came of it nor that it was lost can be written.
            fill_disk("complete", "requeue", "fail")
            server.engine(0).end.set_exception(sqlite3.OperationalError("as on_message raises it"))
            await until(lambda: "fail" in failed)
            monkeypatch.undo()
            await until(lambda: len(server.engines.started[0]) == 2)
            server.engine(0).be_ready()
            await until(lambda: server.handed(0) == [job])
            server.engine(0).finish()
            assert server.job(job).status == COMPLETED

    asyncio.run(run())


@table(
    "device, num_gpus, index, count, visible, found, expected",
    [
        ("auto", 1, 1, 2, None, 2, "1"),
        ("cuda", 2, 1, 2, "4,5,6,7", 4, "6,7"),
        ("auto", 2, 0, 1, None, 8, None),
        ("cpu", 1, 1, 2, None, 2, None),
        ("auto", 1, 1, 2, None, 0, None),
        ("auto", 2, 0, 2, None, 3, ConfigError),
        ("cuda:1", 1, 0, 2, None, 2, ConfigError),
        ("cuda", 1, 0, 2, None, 0, ConfigError),
    ],
)
def test_a_machine_is_shared_out(
    device: str,
    num_gpus: int,
    index: int,
    count: int,
    visible: str | None,
    found: int,
    expected: Any,
) -> None:
    config = RuntimeConfig(device=device, parallel=ParallelConfig(num_gpus=num_gpus))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.cuda.device_count", lambda: found)
        patch.setattr("os.sched_getaffinity", lambda _: set(range(12)))
        for name, value in (("CUDA_VISIBLE_DEVICES", visible), ("OMP_NUM_THREADS", None)):
            patch.setenv(name, value or "")
            if value is None:
                patch.delenv(name)
        if expected is ConfigError:
            with pytest.raises(ConfigError, match="replicas"):
                take_share(config, index, count)
        else:
            take_share(config, index, count)
            assert os.environ.get("CUDA_VISIBLE_DEVICES") == expected
            threads = None if count == 1 else str(12 // (count * num_gpus))
            assert os.environ.get("OMP_NUM_THREADS") == threads


@pytest.mark.slow
def test_a_server_of_two_processes_loses_none_of_its_jobs(tmp_path: Path) -> None:
    body = {"prompt": "a ring", "seed": 1, **SMALL, "num_inference_steps": 12}
    with running_server(tmp_path / "storage", "--replicas", "2", "--hang-timeout", "5") as server:
        with server.client() as http:
            wait_for(lambda: [each["state"] for each in http.get("/health").json()["replicas"]] == ["ready"] * 2)
            engines = server.engine_pids()
            assert len(engines) == 2
            expected = finished(http, http.post("/v1/videos", json=body).json()["id"])["sha256"]
            # One is killed, the other one stopped, both with a job that has begun.
            jobs = [http.post("/v1/videos", json=body).json()["id"] for _ in range(2)]
            wait_for(lambda: all(http.get(f"/v1/videos/{each}").json()["step"] for each in jobs))
            os.kill(engines[0], signal.SIGKILL)
            os.kill(engines[1], signal.SIGSTOP)
            made = [finished(http, each) for each in jobs]
            assert [(each["sha256"], each["attempts"]) for each in made] == [(expected, 2)] * 2
            assert not any(is_running(pid) for pid in engines)
            # On a Ray cluster a lease may be of a replica that is about to be replaced: that is one more.
            metrics = http.get("/metrics").text
            assert server.is_on_ray or "diffusion_runtime_engine_restarts_total 2.0" in metrics
        engines = server.engine_pids()
        # On a Ray cluster they stay for the next server.
        if not server.is_on_ray:
            server.kill()
            wait_for(lambda: not any(is_running(pid) for pid in engines))
