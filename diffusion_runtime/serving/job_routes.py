"""Routes that videos and images have in common: list, get, delete, cancel, events."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from diffusion_runtime.errors import shown
from diffusion_runtime.serving.api_errors import invalid, not_found
from diffusion_runtime.serving.dispatcher import Dispatcher
from diffusion_runtime.serving.event_stream import event, with_pings
from diffusion_runtime.serving.files import ID
from diffusion_runtime.serving.job_objects import job_object, poll_milliseconds, preview_object
from diffusion_runtime.serving.jobs import COMPLETED, FAILED, IN_PROGRESS, QUEUED, Job
from diffusion_runtime.serving.submission import may_see, whose

_UNCACHED: dict[str, Any] = {"cache-control": "no-store"}


def found_job(kind: str, job_id: str, request: Request, dispatcher: Dispatcher) -> Job:
    """Return a job that the request may see. Raises ApiError."""
    job = dispatcher.jobs.get(job_id) if ID.fullmatch(job_id) else None
    if job is None or job.kind != kind or not may_see(request, job, dispatcher.settings.access):
        raise not_found(f"{kind} {shown(job_id[:64])}")
    return job


def job_answer(job: Job, dispatcher: Dispatcher) -> JSONResponse:
    headers = {} if job.is_over else {"openai-poll-after-ms": str(poll_milliseconds(dispatcher))}
    return JSONResponse(job_object(job, dispatcher), headers=headers)


def job_routes(kind: str, dispatcher: Dispatcher) -> APIRouter:
    """Return the routes of one kind of job, below `/v1/videos` or `/v1/images`."""
    router = APIRouter(tags=[f"{kind}s"], prefix=f"/v1/{kind}s")
    access = dispatcher.settings.access

    def found(job_id: str, request: Request) -> Job:
        return found_job(kind, job_id, request, dispatcher)

    @router.get("")
    async def list_jobs(
        request: Request,
        limit: str = "20",
        order: str = "desc",
        after: str | None = None,
        status: str | None = None,
    ) -> Response:
        """List jobs by acceptance, the newest first."""
        if not re.fullmatch("[1-9][0-9]?|100", limit):
            raise invalid("limit", f"limit: expected 1 to 100, got {shown(limit)}")
        if order not in ("asc", "desc"):
            raise invalid("order", f"order: expected asc or desc, got {shown(order)}")
        if status not in (None, QUEUED, IN_PROGRESS, COMPLETED, FAILED):
            raise invalid("status", f"status: expected queued, in_progress, completed or failed, got {shown(status)}")
        jobs, has_more = dispatcher.jobs.page(
            kind,
            limit=int(limit),
            is_descending=order == "desc",
            after=None if after is None else found(after, request).number,
            status=status,
            owner=whose(request, access),
        )
        data = [job_object(job, dispatcher) for job in jobs]
        ids = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
        return JSONResponse({"object": "list", "data": data, **ids, "has_more": has_more})

    @router.get("/{job_id}")
    async def get_job(job_id: str, request: Request) -> Response:
        """Return a job's state; 200 for one that failed, too."""
        return job_answer(found(job_id, request), dispatcher)

    @router.delete("/{job_id}")
    async def delete_job(job_id: str, request: Request) -> Response:
        """Stop a job if it is being made, and remove it."""
        job = found(job_id, request)
        await dispatcher.delete(job.id)
        return JSONResponse({"id": job.id, "object": f"{kind}.deleted", "deleted": True})

    @router.post("/{job_id}/cancel")
    async def cancel_job(job_id: str, request: Request) -> Response:
        """Stop a job; it is then `failed` with the code `cancelled`."""
        dispatcher.cancel(found(job_id, request).id, "client")
        await dispatcher.jobs.log.kept()
        return job_answer(found(job_id, request), dispatcher)

    @router.get("/{job_id}/events")
    async def job_events(job_id: str, request: Request) -> Response:
        """Stream the job's state now and after every change, as server-sent events; previews with return_previews, and
        frames with stream: JPEG pictures in base64, of one chunk each."""
        job = found(job_id, request)
        last = request.headers.get("last-event-id", "")

        async def events() -> AsyncIterator[bytes]:
            # Kept here, as the last previews may come together with the end.
            live = None if job.is_over else dispatcher.live(job.id)
            num_sent = num_chunks = 0
            async for each in dispatcher.follow(job.id):
                for chunk in () if live is None else live.chunks[num_chunks:]:
                    num_chunks += 1
                    yield event("frames", {name: value for name, value in chunk.items() if name not in ("type", "job")})
                for preview in () if live is None else live.previews[num_sent:]:
                    num_sent += 1
                    yield event("preview", await asyncio.to_thread(preview_object, job, preview))
                name = each.status if each.is_over else "progress"
                number = "end" if live is None or each.is_over else str(live.version)
                if number != last:
                    yield event(name, job_object(each, dispatcher), number)

        return StreamingResponse(with_pings(events()), media_type="text/event-stream", headers=_UNCACHED)

    return router
