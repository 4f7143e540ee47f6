"""Running streams in the server: messages to the engine that makes them, and forks, which are jobs of their own."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from diffusion_runtime.serving.api_errors import ApiError
from diffusion_runtime.serving.engines import EngineLost
from diffusion_runtime.serving.jobs import VIDEO, Job, new_id, work_of
from diffusion_runtime.serving.unavailable import Unavailable

if TYPE_CHECKING:
    from diffusion_runtime.serving.dispatcher import Dispatcher

# Streams of one job, forks included: each has a cache of keys.
_MAX_STREAMS = 4


def send_to_stream(dispatcher: Dispatcher, job_id: str, kind: str, /, **values: Any) -> None:
    """Send a message about a running stream to its engine. Raises Unavailable where it has just ended."""
    try:
        dispatcher.running[job_id][0].send(kind, job=job_id, **values)
    except (EngineLost, KeyError) as error:
        raise Unavailable("engine_lost", "the engine ended, and is started again") from error


async def fork_stream(dispatcher: Dispatcher, job: Job, prompt: str | None, seed: int | None) -> Job:
    """Add a job that continues a running stream in another way, with a prompt and a seed of its own; it fails where the
    stream takes no fork. Raises ApiError where there are too many already, and Unavailable."""
    jobs = dispatcher.streams[job.id]
    if len(jobs) >= _MAX_STREAMS:
        raise ApiError(409, "too_many_forks", f"expected at most {_MAX_STREAMS} streams at once, forks included")
    changes = {name: value for name, value in (("prompt", prompt), ("seed", seed)) if value is not None}
    work = {**job.work, "requests": [{**job.work["requests"][0], **changes}], "forked_from": job.id}
    twin = dispatcher.jobs.add(Job(id=new_id(VIDEO), kind=VIDEO, owner=job.owner, created=time.time(), work=work))
    # Before the dispatcher looks at who waits.
    dispatcher.jobs.begin([twin.id])
    jobs.append(twin)
    dispatcher.streams[twin.id] = jobs
    dispatcher.running[twin.id] = (dispatcher.running[job.id][0], time.monotonic())
    dispatcher.live(twin.id)
    made = work_of(twin, 0, work["requests"][0], dispatcher.files)
    send_to_stream(dispatcher, job.id, "fork", work=made, prompt=prompt, seed=seed)
    await dispatcher.jobs.log.kept()
    return dispatcher.jobs.get(twin.id) or twin
