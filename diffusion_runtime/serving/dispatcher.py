"""Dispatcher: takes waiting jobs in their order, hands them to replicas, and writes down what comes of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from diffusion_runtime.serving.admin_state import DefaultLoras, Profiles
from diffusion_runtime.serving.engines import EngineLost, Engines
from diffusion_runtime.serving.files import ResultFiles
from diffusion_runtime.serving.jobs import IN_PROGRESS, QUEUED, Job, Jobs, work_of
from diffusion_runtime.serving.kept_engine import KeptEngine
from diffusion_runtime.serving.live_jobs import Live
from diffusion_runtime.serving.queueing import NextBatch, WaitingJob, next_batch, refuse, seconds_until_place
from diffusion_runtime.serving.replicas import Replicas
from diffusion_runtime.serving.request_fields import RECORDED
from diffusion_runtime.serving.retention import Retention
from diffusion_runtime.serving.settings import ServerSettings
from diffusion_runtime.serving.unavailable import Unavailable

if TYPE_CHECKING:
    from diffusion_runtime.serving.metrics import Metrics

_logger = logging.getLogger("diffusion_runtime.serving")
# A job whose engine died is made again so often.
_MAX_LOSSES = 1
_LOOK_SECONDS = 0.5
_CLEAN_SECONDS = 30.0
# Codes of failures that have one of their own, by the kind of error.
_CODES = {"DeviceMemoryError": "out_of_memory", "DiskFullError": "storage_full"}
# When a client may try again where the disk is full.
_FULL_SECONDS = 60
# An engine that does not stop at a step within so many seconds is ended.
_STOP_SECONDS = 60.0


class Dispatcher:
    """The one user of the engines. engines: where they run. given: their config. jobs, files: of the storage."""

    def __init__(
        self,
        settings: ServerSettings,
        engines: Engines,
        given: Mapping[str, Any],
        jobs: Jobs,
        files: ResultFiles,
        metrics: Metrics,
    ) -> None:
        self.settings = settings
        self.jobs = jobs
        self.files = files
        self.metrics = metrics
        # What waits already is a warm-up.
        warm_up = settings.warm_up and not jobs.in_status(QUEUED, IN_PROGRESS)
        storage = str(files.storage.absolute())
        given = {**given, "warm_up": warm_up, "preview": settings.preview, "storage": storage}
        self.model_path = given.get("config", {}).get("model_path")
        self.engines = Replicas(engines, given, settings, self._take, metrics)
        self.is_draining = False
        self.step_seconds = 1.0
        self.mean_seconds = 10.0
        self.default_loras = DefaultLoras()
        self.profiles = Profiles(files.storage / "traces")
        self._retention = Retention(jobs, files, settings.limits)
        self._live: dict[str, Live] = {}
        self._overtaken: dict[str, int] = {}
        self.running: dict[str, tuple[KeptEngine, float]] = {}
        self._batches: set[asyncio.Task[None]] = set()
        # Jobs of each stream that runs, to which forks are added.
        self.streams: dict[str, list[Job]] = {}
        self._wake = asyncio.Event()
        self._step_began: dict[int, tuple[int, float]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._keeping: asyncio.Future[None] | None = None
        metrics.watch("queue_length", "Jobs that wait.", lambda: float(self.jobs.num_queued()))
        metrics.watch("running", "Jobs that run.", lambda: float(len(self.running)))
        metrics.watch("storage_bytes", "Bytes of results.", lambda: float(self.jobs.num_bytes()))

    async def start(self) -> None:
        """Queue again what an earlier process left, and start the engines."""
        for job in self.jobs.in_status(IN_PROGRESS):
            self._note_loss(job.id, is_loss=False)
        self.files.remove_unowned(self.jobs.ids())
        tasks = (self.engines.run(), _again(self._dispatch), _again(self._look_after))
        self._tasks = [asyncio.create_task(task) for task in tasks]

    async def drain(self) -> None:
        """Begin nothing more, and wait for what runs, at most `Limits.drain` seconds."""
        self.is_draining = True
        if self._batches:
            await asyncio.wait(self._batches, timeout=self.settings.limits.drain)

    async def stop(self) -> None:
        """End the engines. What runs is made again by the next process on this storage."""
        self.is_draining = True
        tasks = (*self._tasks, *self._batches)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for live in self._live.values():
            live.note()

    def refuse_new(self, owner: str, num_bytes: int = 0) -> None:
        """Raises Unavailable where no job of `owner` can be taken now. num_bytes: that its results may take."""
        if self.is_draining:
            raise Unavailable("draining", "the server is about to end; send it to another, or later")
        self.engines.check_ready()
        limits = self.settings.limits
        waiting = self._waiting()
        if (reason := refuse(waiting, owner, limits)) is not None:
            seconds = seconds_until_place(
                len(waiting), self.engines.seconds_per_job(self.mean_seconds), limits.max_queue
            )
            raise Unavailable("queue_full", reason, seconds)
        if (reason := self._retention.refusal(num_bytes)) is not None:
            raise Unavailable("storage_full", reason, _FULL_SECONDS)

    async def submit(self, job: Job, idempotency: tuple[str, str] | None = None) -> Job:
        """Accept a job: once this returns it is not lost."""
        job = self.jobs.add(job, idempotency)
        self.live(job.id)
        self._wake.set()
        await self.jobs.log.kept()
        return job

    def live(self, job_id: str) -> Live:
        return self._live.setdefault(job_id, Live())

    def cancel(self, job_id: str, reason: str, message: str = "the job was cancelled", code: str = "cancelled") -> bool:
        """End a job that waits or runs; False where it is over."""
        job = self.jobs.get(job_id)
        if job is None or job.is_over:
            return False
        self._fail(job_id, code, message)
        self.metrics.cancelled.labels(reason).inc()
        if job_id in self.running:
            with contextlib.suppress(EngineLost):
                self.running[job_id][0].send("cancel", job=job_id)
        return True

    async def delete(self, job_id: str) -> None:
        """Stop a job, wait for the engine to let go of it, and remove its row and files."""
        self.cancel(job_id, "deleted")
        deadline = time.monotonic() + 10.0
        while job_id in self.running and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        self.jobs.delete(job_id)
        self.files.remove(job_id)
        self._live.pop(job_id, Live()).note()
        await self.jobs.log.kept()

    async def follow(self, job_id: str) -> AsyncIterator[Job]:
        """Yield a job now and after every change, until it is over, deleted, or this process ends."""
        while (job := self.jobs.get(job_id)) is not None:
            if job.is_over:
                yield job
                return
            changed = self.live(job_id).changed
            yield job
            if self.is_draining and job_id not in self.running:
                return
            await changed.wait()

    def _waiting(self) -> list[WaitingJob]:
        return [
            WaitingJob(job.id, job.work["key"], job.owner, len(job.work["requests"]), self._overtaken.get(job.id, 0))
            for job in self.jobs.in_status(QUEUED)
        ]

    async def _dispatch(self) -> None:
        while True:
            self._wake.clear()
            waiting, free = self._waiting(), self.engines.free()
            if not self.is_draining:
                self.engines.scale(len(waiting))
            is_open = bool(free) and not self.is_draining
            sizes = self.engines.batch_size, self.settings.limits.max_overtakes
            batch = next_batch(waiting, *sizes, len(free)) if is_open else NextBatch()
            if not batch.ids:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), _LOOK_SECONDS)
                continue
            for job_id in batch.overtaken:
                self._overtaken[job_id] = self._overtaken.get(job_id, 0) + 1
            # Here, before the next look at who waits and who is free.
            self.jobs.begin(batch.ids)
            self.running |= {job_id: (free[0], time.monotonic()) for job_id in batch.ids}
            free[0].batch = asyncio.get_running_loop().create_future()
            found = [self.jobs.get(job_id) for job_id in batch.ids]
            task = asyncio.ensure_future(self._run(free[0], [job for job in found if job is not None]))
            self._batches.add(task)
            task.add_done_callback(self._batches.discard)

    async def _run(self, replica: KeptEngine, jobs: list[Job]) -> None:
        """Have a replica make a batch."""
        try:
            await self._hand_over(replica, jobs)
        except Exception:
            # A fault of ours with these jobs must not keep the others waiting for ever.
            _logger.exception("a batch could not be run")
            for job in jobs:
                self._fail(job.id, "internal_error", "the server failed; its log says how", kind="server_error")
        finally:
            for job in jobs:
                self.running.pop(job.id, None)
            replica.batch = None
            replica.idle_since = time.monotonic()
            self._wake.set()

    async def _hand_over(self, replica: KeptEngine, jobs: list[Job]) -> None:
        assert replica.batch is not None
        began = time.monotonic()
        works = []
        for job in jobs:
            self._overtaken.pop(job.id, None)
            self.live(job.id).parts.clear()
            self.live(job.id).previews.clear()
            self.live(job.id).chunks.clear()
            self.live(job.id).note()
            self.metrics.queue_seconds.observe(max(0.0, time.time() - job.created))
            works += [work_of(job, index, request, self.files) for index, request in enumerate(job.work["requests"])]
        self.metrics.batch_size.observe(len(works))
        shared = {name: jobs[0].work.get(name) for name in ("attention", "loras", "preset")}
        recorded = {name: bool(jobs[0].work["options"].get(name)) for name in RECORDED[1:]}
        previews = max(int(job.work.get("previews") or 0) for job in jobs)
        profile = self.profiles.take()
        if jobs[0].is_stream:
            self.streams[jobs[0].id] = jobs
        try:
            replica.send(
                "run", works=works, previews=previews, profile=profile, stream=jobs[0].is_stream, **recorded, **shared
            )
            await replica.batch
        except EngineLost:
            if profile is not None:
                self.profiles.note(profile["id"], "the engine ended")
            for job in jobs:
                self._note_loss(job.id)
        else:
            for job in jobs:
                # The engine said nothing of it: it was cancelled.
                self._fail(job.id, "cancelled", "the job was cancelled")
        finally:
            for job in jobs:
                self.running.pop(job.id, None)
                self.streams.pop(job.id, None)
            seconds = time.monotonic() - began
            self.mean_seconds += 0.2 * (seconds / len(jobs) - self.mean_seconds)
            for job in jobs:
                self.files.remove_inputs(job.id, is_over=(now := self.jobs.get(job.id)) is None or now.is_over)
                if now is None or now.is_over:
                    # Those that follow it have the object.
                    self._live.pop(job.id, Live()).note()

    def _note_loss(self, job_id: str, *, is_loss: bool = True) -> None:
        job = self.jobs.get(job_id)
        if job is None or job.is_over:
            return
        if job.is_stream:
            # Prompts that came on the way, and what a fork continued, are lost with it.
            self._fail(job_id, "engine_lost", "the stream ended with its engine; begin it again", kind="server_error")
        elif not is_loss:
            self.jobs.requeue(job_id, is_loss=False)
        elif job.losses >= _MAX_LOSSES:
            self._fail(job_id, "engine_lost", "the engine ended twice while it made this job", kind="server_error")
        else:
            self.jobs.requeue(job_id, is_loss=True)
            self.live(job_id).note()

    def _take(self, replica: KeptEngine, message: dict[str, Any]) -> None:
        """Act on one message of a replica's engine."""
        kind = message["type"]
        if kind == "ready":
            self._wake.set()
        elif kind == "progress":
            self._note_progress(replica, message)
        elif kind == "preview" and message["job"] in self.running:
            self.live(message["job"]).previews.append(message)
            self.live(message["job"]).note()
        elif kind == "frames" and message["job"] in self.running:
            self.live(message["job"]).chunks.append(message)
            self.live(message["job"]).note()
        elif kind == "finished":
            self._note_result(replica, message)
        elif kind == "profiled":
            error = message["error"]
            self.profiles.note(message["id"], None if error is None else self.files.scrub(error))
        elif kind == "failed":
            code = _CODES.get(message["kind"], "generation_failed")
            self._fail(message["job"], code, self.files.scrub(message["message"]), kind="server_error")

    def _note_progress(self, replica: KeptEngine, message: Mapping[str, Any]) -> None:
        stage, step, num_steps = message["stage"], message["step"], max(1, message["num_steps"])
        now = time.monotonic()
        if stage == "denoise":
            before, at = self._step_began.get(replica.index, (0, 0.0))
            if step == before + 1:
                self.step_seconds += 0.3 * (now - at - self.step_seconds)
                self.metrics.step_seconds.observe(now - at)
            self._step_began[replica.index] = (step, now)
        for job_id in message["jobs"]:
            self.live(job_id).advance(stage, step, num_steps)

    def _note_result(self, replica: KeptEngine, message: dict[str, Any]) -> None:
        job = self.jobs.get(message["job"])
        if job is None or job.is_over:
            # Cancelled or deleted while the file was written.
            self.files.remove(message["job"])
            return
        self.metrics.count_result(message, replica.index)
        parts = self.live(job.id).parts
        parts[message["index"]] = {name: value for name, value in message.items() if name not in ("type", "job")}
        if len(parts) < len(job.work["requests"]):
            return
        results = [parts[index] for index in sorted(parts)]
        num_bytes = sum(part["file"]["all_bytes"] for part in results)
        self.jobs.complete(job.id, {"parts": results}, num_bytes)
        # A job whose end is lost with the power is made again; nobody waits for this.
        self._keeping = asyncio.ensure_future(self.jobs.log.kept())
        self.metrics.request_seconds.labels(job.kind).observe(max(0.0, time.time() - job.created))
        self.live(job.id).progress = 100
        self.live(job.id).note()
        self._retention.make_room()

    def _fail(self, job_id: str, code: str, message: str, kind: str = "invalid_request_error") -> None:
        if self.jobs.fail(job_id, {"code": code, "message": message, "param": None, "type": kind}):
            self.files.remove(job_id, keeps_inputs=job_id in self.running)
            self.live(job_id).note()
            if job_id not in self.running:
                self._live.pop(job_id, Live()).note()

    async def _look_after(self) -> None:
        """End jobs that waited or ran too long, and remove what has expired."""
        limits = self.settings.limits
        cleaned = 0.0
        while True:
            now = time.time()
            for job in self.jobs.in_status(QUEUED) if limits.queue_timeout else ():
                # The clock of the wall may be set meanwhile.
                if time.monotonic() - self.live(job.id).since > limits.queue_timeout:
                    self.cancel(job.id, "timeout", "the job waited longer than --queue-timeout", "timeout")
            for job in self.jobs.in_status(IN_PROGRESS):
                # Its end could not be written down, as the disk was full.
                if job.id not in self.running:
                    self._note_loss(job.id)
            for job_id, (replica, began) in tuple(self.running.items()):
                seconds = time.monotonic() - began
                if seconds > limits.request_timeout:
                    self.cancel(job_id, "timeout", "the job ran longer than --request-timeout", "timeout")
                if seconds > limits.request_timeout + _STOP_SECONDS:
                    replica.kill()
            if now - cleaned > _CLEAN_SECONDS:
                cleaned = now
                self._retention.remove_expired(now)
                # Somebody may have asked once more for what is known beside the row of a job, at its end.
                for job_id in tuple(self._live):
                    if (known := self.jobs.get(job_id)) is None or known.is_over:
                        self._live.pop(job_id).note()
            await asyncio.sleep(_LOOK_SECONDS)


async def _again(loop: Callable[[], Awaitable[None]]) -> None:
    """Run a loop, and again where it fails, such as of a full disk: without it the server would take jobs and make
    none."""
    while True:
        try:
            await loop()
        except Exception:
            _logger.exception("the queue is held up")
        await asyncio.sleep(_LOOK_SECONDS)
