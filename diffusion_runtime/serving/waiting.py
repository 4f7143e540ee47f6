"""Waiting for a job while its client waits: one that leaves cancels it."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from diffusion_runtime.serving.api_errors import SERVER, ApiError
from diffusion_runtime.serving.dispatcher import Dispatcher
from diffusion_runtime.serving.jobs import FAILED, Job
from diffusion_runtime.serving.unavailable import Unavailable

_STATUS = {"cancelled": 409, "timeout": 504, "engine_lost": 503, "storage_full": 507}


async def until_over(request: Request, dispatcher: Dispatcher, job: Job) -> Job:
    """Return a job once it is completed. Raises ApiError for one that failed, and Unavailable where the server ends
    first."""
    done = asyncio.ensure_future(_over(dispatcher, job.id))
    gone = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait((done, gone), return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            dispatcher.cancel(job.id, "client_left")
            raise ApiError(499, "client_left", "the client left")
        found = done.result()
    except asyncio.CancelledError:
        dispatcher.cancel(job.id, "client_left")
        raise
    finally:
        done.cancel()
        gone.cancel()
        await asyncio.gather(done, gone, return_exceptions=True)
    if found is None and not dispatcher.is_draining:
        raise ApiError(409, "cancelled", "the job was deleted while it was being made")
    if found is None:
        failure = dispatcher.engines.failure
        why = "" if failure is None else f", as {dispatcher.files.scrub(str(failure['message']))}"
        raise Unavailable("draining", f"the server ends{why}; the job is made when it is started again")
    if found.status == FAILED:
        raise job_error(found)
    return found


def job_error(job: Job) -> ApiError:
    """Return the answer to a request whose job failed. A client must not send it again by itself."""
    error = job.error or {}
    code = str(error.get("code"))
    return ApiError(_STATUS.get(code, 500), code, str(error.get("message")), kind=str(error.get("type", SERVER)))


async def _over(dispatcher: Dispatcher, job_id: str) -> Job | None:
    """Return a job once it is over; None for one that was deleted, or that the next process makes."""
    async for job in dispatcher.follow(job_id):
        if job.is_over:
            return job
    return None


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
