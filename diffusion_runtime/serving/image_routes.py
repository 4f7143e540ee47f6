"""Routes of images beside those of all jobs: generations, edits, streams of partial images, content."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from diffusion_runtime.errors import shown
from diffusion_runtime.serving.api_errors import ApiError, invalid
from diffusion_runtime.serving.dispatcher import Dispatcher
from diffusion_runtime.serving.event_stream import DONE, event, with_pings
from diffusion_runtime.serving.job_objects import image_bytes, image_text, images_object
from diffusion_runtime.serving.job_routes import found_job, job_answer
from diffusion_runtime.serving.jobs import COMPLETED, IMAGE, Job
from diffusion_runtime.serving.openapi import request_body
from diffusion_runtime.serving.pictures import converted
from diffusion_runtime.serving.submission import Submission
from diffusion_runtime.serving.waiting import job_error, until_over

_USAGE = {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0}
_USAGE_DETAILS = {"input_tokens_details": {"text_tokens": 0, "image_tokens": 0}}


def image_routes(dispatcher: Dispatcher, submission: Submission) -> APIRouter:
    router = APIRouter(tags=["images"])

    async def made(request: Request, name: str) -> Response:
        job, draft = await submission.accept(IMAGE, request)
        if not draft.options["wait"]:
            return job_answer(job, dispatcher)
        if draft.options["stream"]:
            events = with_pings(_events(job, dispatcher, name))
            return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-store"})
        job = await until_over(request, dispatcher, job)
        address = str(request.base_url).rstrip("/")
        return JSONResponse(await asyncio.to_thread(images_object, job, dispatcher, address))

    @router.post("/v1/images/generations", openapi_extra=request_body(IMAGE))
    async def generate_images(request: Request) -> Response:
        """Make images; they are cancelled when the client leaves, except with `wait` false, which answers at once."""
        return await made(request, "image_generation")

    @router.post("/v1/images/edits", openapi_extra=request_body(IMAGE))
    async def edit_images(request: Request) -> Response:
        """Make images of images, with models that take them."""
        card = dispatcher.engines.card
        if card is not None and not card.get("takes_image", True):
            raise ApiError(400, "unsupported_for_model", "this model takes no images", param="image")
        return await made(request, "image_edit")

    @router.get("/v1/images/{image_id}/content")
    async def image_content(image_id: str, request: Request, variant: str = "0") -> Response:
        """Return one image of a finished request."""
        job = found_job(IMAGE, image_id, request, dispatcher)
        if variant not in map(str, range(len(job.work["requests"]))):
            raise invalid("variant", f"variant: expected 0 to {len(job.work['requests']) - 1}, got {shown(variant)}")
        if job.status != COMPLETED:
            raise ApiError(409, "image_not_ready", f"the image is {job.status}")
        content = await asyncio.to_thread(image_bytes, job, dispatcher, int(variant))
        if content is None:
            raise ApiError(410, "expired", "the file is no longer kept")
        return Response(content, media_type=f"image/{job.work['options']['output_format']}")

    return router


async def _events(job: Job, dispatcher: Dispatcher, name: str) -> AsyncIterator[bytes]:
    """Yield the events of one image: estimates of it, then itself. A client that leaves cancels it."""
    num_sent = 0
    # Kept here: the last estimates may come together with the end, when the dispatcher has dropped it.
    live = dispatcher.live(job.id)
    try:
        async for each in dispatcher.follow(job.id):
            for preview in live.previews[num_sent : int(job.work["previews"])]:
                yield event(f"{name}.partial_image", await asyncio.to_thread(_partial, job, name, preview, num_sent))
                num_sent += 1
            if each.status == COMPLETED:
                yield event(f"{name}.completed", await asyncio.to_thread(_completed, each, dispatcher, name))
                yield DONE
            elif each.is_over:
                yield event("error", {"error": job_error(each).to_dict()})
    finally:
        # Nothing happens to one that is over.
        dispatcher.cancel(job.id, "client_left")


def _partial(job: Job, name: str, preview: Mapping[str, Any], index: int) -> dict[str, Any]:
    options = job.work["options"]
    request = job.work["requests"][0]
    size = (request["width"], request["height"])
    png = base64.b64decode(preview["png"])
    content = converted(png, options["output_format"], options["output_compression"], size)
    return {
        **_described(job, f"{name}.partial_image"),
        "partial_image_index": index,
        "b64_json": base64.b64encode(content).decode(),
        "step": preview["step"],
        "num_steps": preview["num_steps"],
    }


def _completed(job: Job, dispatcher: Dispatcher, name: str) -> dict[str, Any]:
    assert job.result is not None
    part = job.result["parts"][0]
    return {
        **_described(job, f"{name}.completed"),
        "b64_json": image_text(job, dispatcher, 0),
        "usage": {**_USAGE, **_USAGE_DETAILS},
        "seed": job.work["requests"][0]["seed"],
        "attention_report": part["attention_report"] if job.work["options"]["return_report"] else None,
    }


def _described(job: Job, kind: str) -> dict[str, Any]:
    request = job.work["requests"][0]
    return {
        "type": kind,
        "id": job.id,
        "created_at": int(time.time()),
        "size": f"{request['width']}x{request['height']}",
        "quality": "auto",
        "background": "opaque",
        "output_format": job.work["options"]["output_format"],
    }
