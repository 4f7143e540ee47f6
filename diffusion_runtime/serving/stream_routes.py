"""Routes of streams: another prompt on the way, and forks. Their frames are events of the video."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from diffusion_runtime.errors import shown
from diffusion_runtime.serving.api_errors import ApiError, invalid
from diffusion_runtime.serving.bodies import read_body
from diffusion_runtime.serving.dispatcher import Dispatcher
from diffusion_runtime.serving.job_routes import found_job, job_answer
from diffusion_runtime.serving.jobs import VIDEO, Job
from diffusion_runtime.serving.request_fields import checked_prompt, checked_seed
from diffusion_runtime.serving.running_streams import fork_stream, send_to_stream


def stream_routes(dispatcher: Dispatcher) -> APIRouter:
    router = APIRouter(tags=["streams"], prefix="/v1/videos")

    async def running(video_id: str, request: Request, *known: str) -> tuple[Job, dict[str, Any]]:
        """Return a stream that runs, and the body. Raises ApiError."""
        job = found_job(VIDEO, video_id, request, dispatcher)
        values = dict((await read_body(request)).values)
        for name in values:
            if name not in known:
                raise invalid(name[:80], f"{shown(name)}: expected {' and '.join(known)}", "unknown_parameter")
        if not job.is_stream:
            raise ApiError(
                409, "not_a_stream", "the video was made without `stream`; its prompt is that of its request"
            )
        if job.id not in dispatcher.running:
            raise ApiError(409, "stream_not_running", f"the stream is {job.status}")
        return job, values

    @router.post("/{job_id}/prompt")
    async def set_prompt(job_id: str, request: Request) -> Response:
        """Give a stream another prompt, from the next chunk on that has not been begun."""
        job, values = await running(job_id, request, "prompt")
        send_to_stream(dispatcher, job.id, "prompt", prompt=checked_prompt(values.get("prompt")))
        return job_answer(job, dispatcher)

    @router.post("/{job_id}/fork")
    async def fork(job_id: str, request: Request) -> Response:
        """Continue a stream in a second way from here: another video, with a prompt or a seed of its own."""
        job, values = await running(job_id, request, "prompt", "seed")
        prompt = None if values.get("prompt") is None else checked_prompt(values["prompt"])
        seed = None if values.get("seed") is None else checked_seed(values["seed"])
        return job_answer(await fork_stream(dispatcher, job, prompt, seed), dispatcher)

    return router
