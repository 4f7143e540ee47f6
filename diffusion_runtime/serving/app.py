"""The HTTP application: routes, errors and the guard in front of them."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Scope

from diffusion_runtime.errors import DiffusionRuntimeError
from diffusion_runtime.serving.admin_routes import admin_routes
from diffusion_runtime.serving.api_errors import ApiError, api_error, invalid
from diffusion_runtime.serving.dispatcher import Dispatcher
from diffusion_runtime.serving.guard import Guard
from diffusion_runtime.serving.image_routes import image_routes
from diffusion_runtime.serving.job_routes import job_routes
from diffusion_runtime.serving.jobs import IMAGE, VIDEO
from diffusion_runtime.serving.openapi import request_schemas
from diffusion_runtime.serving.page_routes import page_routes
from diffusion_runtime.serving.server_routes import server_routes
from diffusion_runtime.serving.stream_routes import stream_routes
from diffusion_runtime.serving.submission import Submission
from diffusion_runtime.serving.unavailable import Unavailable
from diffusion_runtime.serving.video_routes import video_routes

_logger = logging.getLogger("diffusion_runtime.serving")
_CODES = {404: "not_found", 405: "method_not_allowed"}


class _Api(FastAPI):
    """FastAPI, whose document has the schemas of our requests."""

    def openapi(self) -> dict[str, Any]:
        document = super().openapi()
        document.setdefault("components", {}).setdefault("schemas", {}).update(request_schemas())
        return document


def build_api(dispatcher: Dispatcher) -> FastAPI:
    """Return the routes of a server, whose engine runs between startup and shutdown."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await dispatcher.start()
        yield
        await dispatcher.stop()

    api = _Api(title="diffusion-runtime", version="1", lifespan=lifespan, docs_url=None, redoc_url=None)
    submission = Submission(dispatcher)
    api.include_router(page_routes())
    api.include_router(video_routes(dispatcher, submission))
    api.include_router(image_routes(dispatcher, submission))
    api.include_router(stream_routes(dispatcher))
    for kind_of_job in (VIDEO, IMAGE):
        api.include_router(job_routes(kind_of_job, dispatcher))
    api.include_router(admin_routes(dispatcher))
    api.include_router(server_routes(dispatcher, submission, int(time.time())))

    async def answer(request: Request, error: Exception) -> Response:
        found = api_error(error, dispatcher.files)
        if found.status == 500:
            _logger.error("unexpected error", exc_info=error, extra={"request_id": request.state.request_id})
        request.state.outcome["code"] = found.code
        return found.response()

    async def answer_routing(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code = _CODES.get(error.status_code, "invalid_value")
        return await answer(request, ApiError(error.status_code, code, str(error.detail)))

    async def answer_parameter(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        name = str(first["loc"][-1])
        return await answer(request, invalid(name, f"{name}: {first['msg']}"))

    api.add_exception_handler(HTTPException, answer_routing)
    api.add_exception_handler(RequestValidationError, answer_parameter)
    # What the last one answers is raised once more, and ends in the guard.
    for kind in (ApiError, Unavailable, DiffusionRuntimeError, Exception):
        api.add_exception_handler(kind, answer)
    return api


def build_app(dispatcher: Dispatcher) -> ASGIApp:
    """Return the application as a server runs it."""
    api = build_api(dispatcher)

    def endpoint_of(scope: Scope) -> str:
        route = scope.get("route")
        return str(getattr(route, "path", "other"))

    guard = Guard(api, dispatcher.settings, dispatcher.metrics, endpoint_of)
    origins = dispatcher.settings.access.origins
    if not origins:
        return guard
    # In front: a browser asks without the key whether it may send it.
    return CORSMiddleware(
        guard,
        allow_origins=origins,
        allow_methods=("GET", "POST", "DELETE"),
        allow_headers=("authorization", "content-type", "idempotency-key", "last-event-id", "x-request-id"),
        expose_headers=("x-request-id", "retry-after", "openai-poll-after-ms", "x-should-retry"),
    )
