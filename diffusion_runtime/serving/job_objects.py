"""Objects of jobs as clients see them: videos, images, their errors and events."""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping
from typing import Any

from diffusion_runtime.serving.dispatcher import Dispatcher
from diffusion_runtime.serving.jobs import COMPLETED, IMAGE, IN_PROGRESS, QUEUED, VIDEO, Job
from diffusion_runtime.serving.pictures import converted
from diffusion_runtime.serving.request_fields import PLAIN_FIELDS

# Milliseconds that a client is told to wait before it asks again: at least, and at most.
_POLL = (50, 5000)
_PREVIEW_PIXELS, _PREVIEW_QUALITY = 512, 80


def job_object(job: Job, dispatcher: Dispatcher) -> dict[str, Any]:
    """Return a job as OpenAI's videos are, with fields of ours behind theirs; of images, what is of one file is of the
    first one."""
    work, request = job.work, job.work["requests"][0]
    # Not of one that waits: its row may be older than what an engine has reported since.
    live = dispatcher.live(job.id) if job.status == IN_PROGRESS else None
    part = None if job.result is None else job.result["parts"][0]
    num_frames, fps = _frames_of_file(request, part)
    seconds = None if not num_frames or not fps else num_frames / fps
    report = part["attention_report"] if part is not None and work["options"].get("return_report", True) else None
    keep = dispatcher.settings.limits.keep
    return {
        "id": job.id,
        "object": job.kind,
        "model": work["model"],
        "status": job.status,
        "progress": 100 if job.status == COMPLETED else live.progress if live is not None else 0,
        "created_at": int(job.created),
        "completed_at": int(job.ended) if job.status == COMPLETED and job.ended is not None else None,
        "expires_at": None if job.ended is None else int(job.ended + keep),
        "prompt": request["prompt"],
        "size": f"{request.get('width')}x{request.get('height')}",
        "seconds": "" if seconds is None else f"{seconds:.2f}".rstrip("0").rstrip("."),
        "remixed_from_video_id": work.get("remixed_from"),
        "error": None if job.error is None else dict(job.error),
        "seed": request.get("seed"),
        "fps": fps,
        "num_frames": num_frames,
        "duration_s": seconds,
        "queue_position": _position(job, dispatcher),
        "eta_s": _seconds_left(job, dispatcher),
        "stage": None if live is None else live.stage,
        "step": None if live is None else live.step,
        "num_steps": request.get("num_inference_steps"),
        "started_at": None if job.started is None else int(job.started),
        "attempts": job.attempts,
        "timings": None if part is None else part["timings"],
        "inference_time_s": inference_seconds(part),
        "peak_memory_mb": peak_megabytes(part),
        "attention_report": report,
        "warnings": work.get("warnings") or [],
        "media_type": "video/mp4" if job.kind == VIDEO else f"image/{work['options']['output_format']}",
        "file_name": None if part is None else part["file"]["name"],
        "bytes": None if part is None else part["file"]["bytes"],
        "sha256": None if part is None else part["file"]["sha256"],
        "has_sound": None if part is None else part["has_sound"],
        "num_images": len(work["requests"]) if job.kind == IMAGE else None,
        "settings": _settings(work, request if part is None else part.get("request") or request),
        "recorded": [name for name in ("density", "latents") if work["options"].get(f"return_{name}")],
        "is_stream": job.is_stream,
        "forked_from_video_id": work.get("forked_from"),
    }


def _frames_of_file(request: Mapping[str, Any], part: Mapping[str, Any] | None) -> tuple[int | None, float | None]:
    """Return how many frames the file has and how many a second, those in between counted; before it is there, what
    the request says."""
    if part is not None:
        return part["num_frames"], part["fps"]
    num_frames, fps, between = request.get("num_frames"), request.get("fps"), request.get("interpolate") or 1
    return None if num_frames is None else num_frames * between, None if fps is None else fps * between


def _settings(work: Mapping[str, Any], request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request that makes the same job again, beside its prompt, size and seed. Images that came
    with it, whose names stand for them, are not kept."""
    values = {name: request[name] for name in PLAIN_FIELDS if request.get(name) is not None}
    chosen = {name: work.get(of) for name, of in (("attention", "attention"), ("lora", "loras"), ("preset", "preset"))}
    return {"values": values, **chosen, "images": list(work.get("inputs") or ())}


def preview_object(job: Job, preview: Mapping[str, Any]) -> dict[str, Any]:
    """Return an estimate of a video as its events carry it: a WebP of at most _PREVIEW_PIXELS at the longer side."""
    request = job.work["requests"][0]
    part = min(1.0, _PREVIEW_PIXELS / max(request["width"], request["height"]))
    size = (max(1, round(request["width"] * part)), max(1, round(request["height"] * part)))
    content = converted(base64.b64decode(preview["png"]), "webp", _PREVIEW_QUALITY, size)
    steps = {"step": preview["step"], "num_steps": preview["num_steps"]}
    return {**steps, "output_format": "webp", "b64_json": base64.b64encode(content).decode()}


def images_object(job: Job, dispatcher: Dispatcher, address: str) -> dict[str, Any]:
    """Return a finished job as OpenAI's images are. address: of this server, for URLs."""
    assert job.result is not None
    assert job.started is not None
    options, parts = job.work["options"], job.result["parts"]
    first = parts[0]
    data = []
    for index, (part, request) in enumerate(zip(parts, job.work["requests"], strict=True)):
        is_url = options["response_format"] == "url"
        url = f"{address}/v1/images/{job.id}/content?variant={index}" if is_url else None
        content = None if is_url else image_text(job, dispatcher, index)
        data.append(
            {
                "b64_json": content,
                "url": url,
                "revised_prompt": None,
                "seed": request["seed"],
                "sha256": part["file"]["sha256"],
            }
        )
    return {
        "created": int(job.created),
        "background": "opaque",
        "output_format": options["output_format"],
        "size": f"{first['width']}x{first['height']}",
        "quality": "auto",
        "data": data,
        "usage": None,
        "id": job.id,
        "model": job.work["model"],
        "inference_time_s": inference_seconds(first),
        "peak_memory_mb": peak_megabytes(first),
        "timings": {"queue": round(job.started - job.created, 4), **first["timings"]},
        "attention_report": first["attention_report"] if options["return_report"] else None,
        "warnings": job.work.get("warnings") or [],
    }


def image_bytes(job: Job, dispatcher: Dispatcher, index: int) -> bytes | None:
    """Return an image in the format that was asked for, None where there is none. A PNG is the file itself, with its
    recipe."""
    content = dispatcher.files.image(job.id, index)
    options = job.work["options"]
    return None if content is None else converted(content, options["output_format"], options["output_compression"])


def image_text(job: Job, dispatcher: Dispatcher, index: int) -> str:
    return base64.b64encode(image_bytes(job, dispatcher, index) or b"").decode()


def inference_seconds(part: Mapping[str, Any] | None) -> float | None:
    """Return the seconds of a result's own stages, those of loading and writing left out."""
    if part is None:
        return None
    seconds: float = sum(part["timings"].get(stage, 0.0) for stage in ("text", "denoise", "decode"))
    return round(seconds, 4)


def peak_megabytes(part: Mapping[str, Any] | None) -> float | None:
    if part is None or not part["peak_memory"]:
        return None
    memory: Mapping[str, int] = part["peak_memory"]
    return round(memory.get("device", max(memory.values())) / 2**20, 1)


def poll_milliseconds(dispatcher: Dispatcher) -> int:
    """Return how long a client should wait before it asks again: about one step."""
    return int(min(_POLL[1], max(_POLL[0], dispatcher.step_seconds * 1000)))


def _position(job: Job, dispatcher: Dispatcher) -> int | None:
    """Return the place of a job in the queue, from 1; None for one that does not wait."""
    return dispatcher.jobs.num_queued(job.number) if job.status == QUEUED else None


def _seconds_left(job: Job, dispatcher: Dispatcher) -> float | None:
    """Estimate by the mean of what ran before; None for a job that is over."""
    if job.is_over:
        return None
    if job.status == IN_PROGRESS and job.started is not None:
        return round(max(0.0, dispatcher.mean_seconds - (time.time() - job.started)), 1)
    return round((_position(job, dispatcher) or 1) * dispatcher.engines.seconds_per_job(dispatcher.mean_seconds), 1)
