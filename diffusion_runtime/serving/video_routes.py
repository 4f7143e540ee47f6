"""Routes of videos beside those of all jobs: create, content, remix, and the synchronous one."""

from __future__ import annotations

import json
import re
from urllib.parse import quote

from fastapi import APIRouter, Request
from starlette.responses import FileResponse, JSONResponse, Response

from diffusion_runtime.errors import shown
from diffusion_runtime.serving.api_errors import ApiError, invalid, not_found
from diffusion_runtime.serving.bodies import read_body
from diffusion_runtime.serving.dispatcher import Dispatcher
from diffusion_runtime.serving.files import VARIANTS
from diffusion_runtime.serving.job_objects import inference_seconds, peak_megabytes
from diffusion_runtime.serving.job_routes import found_job, job_answer
from diffusion_runtime.serving.jobs import COMPLETED, FAILED, VIDEO, Job
from diffusion_runtime.serving.openapi import request_body
from diffusion_runtime.serving.request_fields import Draft, checked_prompt
from diffusion_runtime.serving.submission import Submission, owner_of
from diffusion_runtime.serving.waiting import until_over

_MEDIA_TYPES = {
    "video": "video/mp4",
    "thumbnail": "image/webp",
    "spritesheet": "image/webp",
    "sidecar": "application/json",
    "sound": "audio/wav",
    "latents": "application/octet-stream",
}


def video_routes(dispatcher: Dispatcher, submission: Submission) -> APIRouter:
    router = APIRouter(tags=["videos"])

    def found(video_id: str, request: Request) -> Job:
        return found_job(VIDEO, video_id, request, dispatcher)

    def answer(job: Job) -> JSONResponse:
        return job_answer(job, dispatcher)

    @router.post("/v1/videos", openapi_extra=request_body(VIDEO))
    async def create_video(request: Request) -> Response:
        """Accept a video to be made; it is made when its turn comes."""
        job, _ = await submission.accept(VIDEO, request)
        return answer(job)

    @router.post("/v1/videos/sync", openapi_extra=request_body(VIDEO))
    async def make_video(request: Request) -> Response:
        """Make a video and answer with its file; it is cancelled when the client leaves."""
        job, _ = await submission.accept(VIDEO, request)
        job = await until_over(request, dispatcher, job)
        part = (job.result or {})["parts"][0]
        headers = {
            "x-video-id": job.id,
            "x-model": quote(job.work["model"], safe=" /:@"),
            "x-inference-time-s": str(inference_seconds(part)),
            "x-stage-durations": json.dumps(part["timings"]),
            "x-peak-memory-mb": str(peak_megabytes(part)),
        }
        return content(request, job, "video", headers)

    @router.post("/v1/videos/{video_id}/remix")
    async def remix_video(video_id: str, request: Request) -> Response:
        """Make a video again with its seed and settings, and another prompt."""
        job = found(video_id, request)
        values = (await read_body(request)).values
        for name in values:
            if name not in ("prompt", "model"):
                message = f"{name[:80]}: a remix has the settings of its video, and another prompt"
                raise invalid(name[:80], message, "unknown_parameter")
        prompt = checked_prompt(values.get("prompt"))
        if job.work["inputs"]:
            message = "the images that this video began with are not kept; create a video with them again"
            raise ApiError(400, "unsupported_for_model", message)
        draft = Draft(
            kind=VIDEO,
            requests=[{**each, "prompt": prompt} for each in job.work["requests"]],
            preset=job.work["preset"],
            attention=job.work["attention"],
            loras=job.work["loras"],
            options=job.work["options"],
            num_previews=job.work["previews"],
        )
        return answer(await submission.accept_draft(draft, owner_of(request), remixed_from=job.id))

    @router.get("/v1/videos/{video_id}/content")
    async def video_content(video_id: str, request: Request, variant: str = "video") -> Response:
        """Return a file of a finished video; a Range of it where one is asked for."""
        if variant not in _MEDIA_TYPES:
            raise invalid("variant", f"variant: expected one of {', '.join(_MEDIA_TYPES)}, got {shown(variant)}")
        job = found(video_id, request)
        if job.status == FAILED:
            error = dict(job.error or {})
            raise ApiError(422, error["code"], error["message"], kind=error["type"])
        if job.status != COMPLETED:
            raise ApiError(409, "video_not_ready", f"the video is {job.status}", seconds=1)
        return content(request, job, variant, {})

    def content(request: Request, job: Job, variant: str, headers: dict[str, str]) -> Response:
        path = dispatcher.files.variant(job.id, variant)
        if path is None and variant == "sound" and job.num_bytes:
            raise not_found("sound beside this video; models that make sound put it into the video")
        if path is None:
            raise ApiError(410, "expired", "the file is no longer kept")
        if variant == "video" and job.result is not None:
            headers = {**headers, "etag": f'"{job.result["parts"][0]["file"]["sha256"]}"'}
        if (refused := _refused_range(request, path.stat().st_size)) is not None:
            return refused
        suffix = ".mp4" if variant == "video" else VARIANTS[variant]
        return FileResponse(path, media_type=_MEDIA_TYPES[variant], filename=f"{job.id}{suffix}", headers=headers)

    return router


_RANGES = re.compile(r"bytes=(\d{1,18}-\d{0,18}|-\d{1,18})(,\s*(\d{1,18}-\d{0,18}|-\d{1,18}))*", re.IGNORECASE)


def _refused_range(request: Request, num_bytes: int) -> Response | None:
    """Return the answer to a Range that begins behind the end, None for others. One that is none is taken away, as if
    it had not been sent (RFC 9110, 14.2)."""
    text = request.headers.get("range")
    if text is None:
        return None
    is_range = _RANGES.fullmatch(text.strip()) is not None
    ends = [part.strip().partition("-") for part in text.strip()[6:].split(",")] if is_range else []
    if not is_range or any(first and last and int(first) > int(last) for first, _, last in ends):
        request.scope["headers"] = [pair for pair in request.scope["headers"] if pair[0] != b"range"]
        return None
    if all(int(first) < num_bytes if first else int(last) > 0 for first, _, last in ends):
        return None
    message = f"range: the file has {num_bytes} bytes, got {shown(text[:80])}"
    response = ApiError(416, "range_not_satisfiable", message, param="range").response()
    response.headers["content-range"] = f"bytes */{num_bytes}"
    return response
