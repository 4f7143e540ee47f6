"""Submission: from the body of a request to an accepted job."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request

from diffusion_runtime.serving.api_errors import ApiError, invalid
from diffusion_runtime.serving.bodies import read_body
from diffusion_runtime.serving.body import Body
from diffusion_runtime.serving.dispatcher import Dispatcher
from diffusion_runtime.serving.engines import Refused
from diffusion_runtime.serving.guard import key_of
from diffusion_runtime.serving.input_images import check_image, check_media
from diffusion_runtime.serving.jobs import VIDEO, Job, new_id
from diffusion_runtime.serving.request_fields import (
    RECORDED,
    Draft,
    check_limits,
    in_clients_words,
    may_be_of_any_kind,
    read_draft,
)
from diffusion_runtime.serving.retention import bytes_of
from diffusion_runtime.serving.settings import Access
from diffusion_runtime.untrusted.image_urls import data_of_url, fetch_image

_MAX_KEY = 255


class Submission:
    """Accepts jobs. One client's request that comes twice at once, with one idempotency key, is one job."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._locks: dict[str, asyncio.Lock] = {}

    async def accept(self, kind: str, request: Request) -> tuple[Job, Draft]:
        """Read, check and accept a request for videos or images. Raises ApiError, Unavailable and Refused."""
        owner = owner_of(request)
        body = await read_body(request)
        draft = self._draft(kind, body)
        key = request.headers.get("idempotency-key")
        if key is not None and not 1 <= len(key) <= _MAX_KEY:
            raise invalid(None, f"Idempotency-Key: expected 1 to {_MAX_KEY} characters")
        if key is None:
            return await self.accept_draft(draft, owner), draft
        async with self._alone(f"{owner}/{key}") as name:
            digest = await asyncio.to_thread(_digest, kind, body)
            if (known := self._dispatcher.jobs.idempotent(name)) is None:
                return await self.accept_draft(draft, owner, (name, digest)), draft
            if known[0] != digest:
                raise ApiError(409, "idempotency_key_reused", "Idempotency-Key: was used for another request")
            return known[1], draft

    async def accept_draft(
        self,
        draft: Draft,
        owner: str,
        idempotency: tuple[str, str] | None = None,
        *,
        remixed_from: str | None = None,
    ) -> Job:
        """Check a draft against the model, and accept it. Raises what `accept` raises."""
        dispatcher = self._dispatcher
        dispatcher.refuse_new(owner)
        job_id = new_id(draft.kind)
        try:
            work = await self._checked(job_id, draft)
            # Others may have come while the engine looked at this one.
            dispatcher.refuse_new(owner, bytes_of(work["requests"]))
        except BaseException:
            dispatcher.files.remove(job_id)
            raise
        work["remixed_from"] = remixed_from
        job = Job(id=job_id, kind=draft.kind, owner=owner, created=time.time(), work=work)
        return await dispatcher.submit(job, idempotency)

    async def explained(self, request: Request) -> Any:
        """Return what a request for a video would run, which is not made."""
        body = await read_body(request)
        draft = self._draft("video", Body({"prompt": "a prompt", **body.values}, {}, body.is_form))
        if draft.images or body.files:
            raise invalid("input_reference", "input_reference: an explanation is of requests without images")
        return await self._dispatcher.engines.ask("explain", draft.work())

    def _draft(self, kind: str, body: Body) -> Draft:
        settings = self._dispatcher.settings
        draft = read_draft(kind, body, settings.name, settings.limits)
        if draft.loras is None:
            draft.loras = self._dispatcher.default_loras.given
        return draft

    async def _checked(self, job_id: str, draft: Draft) -> dict[str, Any]:
        """Return the work of a job: its requests as the model has filled them in."""
        dispatcher, settings = self._dispatcher, self._dispatcher.settings
        card = dispatcher.engines.card or {}
        if draft.num_previews and not card.get("previews"):
            name = "return_previews" if draft.kind == VIDEO else "partial_images"
            message = f"{name}: this server shows no estimates of running jobs: {card.get('no_previews')}; leave it out"
            raise invalid(name, message, "unsupported_for_model")
        is_stream = bool(draft.options.get("stream")) and draft.kind == VIDEO
        if is_stream and not card.get("streams"):
            message = "stream: this model makes a clip at once, or runs in several processes; leave it out"
            raise invalid("stream", message, "unsupported_for_model")
        if "image_path" in draft.images and not card.get("takes_image", True):
            name = in_clients_words(draft.kind, "image_path")
            raise invalid(name, f"{name}: this model takes no images; leave it out", "unsupported_for_model")
        names = []
        paths: dict[str, list[str]] = {}
        for field, contents in draft.images.items():
            for index, content in enumerate(contents):
                sent_as = in_clients_words(draft.kind, field)
                image = await self._image(sent_as, content)
                check = check_media if may_be_of_any_kind(draft.kind, sent_as) else check_image
                extension = await asyncio.to_thread(check, sent_as, image, settings.limits.max_upload_pixels)
                names.append(f"{field}-{index}.{extension}")
                path = await asyncio.to_thread(dispatcher.files.write_input, job_id, names[-1], image)
                paths.setdefault(field, []).append(str(path))
        inputs = {field: each[0] if len(each) == 1 else each for field, each in paths.items()}
        draft.requests = [{**request, **inputs} for request in draft.requests]
        try:
            checked = await dispatcher.engines.ask("check", draft.work())
        except Refused as error:
            message = in_clients_words(draft.kind, str(error.details["message"]))
            raise Refused({**error.details, "message": message}) from error
        for resolved in checked["requests"]:
            check_limits(resolved, settings.limits)
        remarks = [in_clients_words(draft.kind, dispatcher.files.scrub(remark)) for remark in checked["remarks"]]
        return {
            "requests": checked["requests"],
            # What is counted in one batch is counted of all its requests.
            "key": checked["key"]
            + "".join(f" {name}" for name in RECORDED[1:] if draft.options[name])
            # A stream runs by itself.
            + (f" {job_id}" if is_stream else ""),
            "attention": draft.attention,
            "loras": draft.loras,
            "preset": draft.preset,
            "previews": draft.num_previews,
            "inputs": names,
            "options": draft.options,
            "warnings": [*draft.warnings, *remarks],
            "model": settings.name,
        }

    async def _image(self, field: str, content: bytes | str) -> bytes:
        if isinstance(content, bytes):
            return content
        if content.startswith("data:"):
            return await asyncio.to_thread(data_of_url, field, content)
        hosts = self._dispatcher.settings.access.url_hosts
        return await asyncio.to_thread(fetch_image, field, content, hosts, "send the image")

    @contextlib.asynccontextmanager
    async def _alone(self, name: str) -> AsyncIterator[str]:
        """Asynchronous context manager: nobody else is in it with this idempotency key."""
        lock = self._locks.setdefault(name, asyncio.Lock())
        try:
            async with lock:
                yield name
        finally:
            if not lock.locked():
                self._locks.pop(name, None)


def owner_of(request: Request) -> str:
    """Return what stands for the key of a request; keys themselves are not kept."""
    key = key_of(request.headers)
    return hashlib.sha256(key.encode()).hexdigest()[:16] if key else ""


def may_see(request: Request, job: Job, access: Access) -> bool:
    """Return whether a request may see, stop and remove a job."""
    return whose(request, access) in (None, job.owner)


def whose(request: Request, access: Access) -> str | None:
    """Return the owner whose jobs alone a request may see; None for those of all: of an admin, and without keys."""
    is_all = not access.api_keys or access.is_admin(key_of(request.headers) or "")
    return None if is_all else owner_of(request)


def _digest(kind: str, body: Body) -> str:
    files = {name: [hashlib.sha256(each).hexdigest() for each in contents] for name, contents in body.files.items()}
    text = json.dumps([kind, body.values, files], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
