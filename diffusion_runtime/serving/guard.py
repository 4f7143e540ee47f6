"""Guard: ASGI middleware in front of every route: Host, key, size and pace of the body, request id, log, metrics."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diffusion_runtime.serving.api_errors import ApiError
from diffusion_runtime.serving.metrics import Metrics
from diffusion_runtime.serving.settings import ServerSettings

_logger = logging.getLogger("diffusion_runtime.serving.access")
# Answered without a key: whoever starts processes asks the first two; the page, which asks for the key, holds nothing.
_OPEN, _PAGE = ("/liveness", "/health", "/"), "/page/"
# Bytes per second of a body.
_SLOWEST = 1024
_REQUEST_ID = re.compile(r"[\w.-]{1,64}")


class Guard:
    """app: what is guarded. endpoint_of: the route of a scope, for metrics: a path of a client is no label."""

    def __init__(
        self, app: ASGIApp, settings: ServerSettings, metrics: Metrics, endpoint_of: Callable[[Scope], str]
    ) -> None:
        self._app = app
        self._settings = settings
        self._metrics = metrics
        self._endpoint_of = endpoint_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"
        scope.setdefault("state", {})["request_id"] = request_id
        began, seen = time.perf_counter(), {"status": 0, "code": ""}
        scope["state"]["outcome"] = seen

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                seen["status"] = message["status"]
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", request_id.encode()),
                    (b"x-content-type-options", b"nosniff"),
                ]
            await send(message)

        bounded = BoundedBody(receive, self._settings.limits.max_body, self._settings.limits.read_timeout)
        try:
            refusal = self._refusal(scope["path"], headers)
            if refusal is not None:
                seen["code"] = refusal.code
                response = refusal.response()
                if _has_two_ends(headers):
                    # What follows is another request to one of the two, and would be answered.
                    response.headers["connection"] = "close"
                await response(scope, receive, answer)
            else:
                await self._app(scope, bounded.receive, answer)
        except Exception:
            # It was answered and logged; a connection in the middle of an answer is closed.
            if not seen["status"]:
                raise
        finally:
            self._note(scope, request_id, seen, time.perf_counter() - began)

    def _refusal(self, path: str, headers: dict[str, str]) -> ApiError | None:
        access = self._settings.access
        if not access.allows_host(headers.get("host", "")):
            return ApiError(403, "host_not_allowed", "the Host header names another server; see --allowed-host")
        if "origin" in headers and not access.allows_origin(headers["origin"], headers.get("host", "")):
            return ApiError(403, "origin_not_allowed", "pages of this site may not call; see --allow-origin")
        key = key_of(headers)
        is_open = path in _OPEN or path.startswith(_PAGE)
        if access.api_keys and not is_open and (key is None or not access.accepts(key)):
            return ApiError(401, "invalid_api_key", "expected Authorization: Bearer KEY with a key of this server")
        length = headers.get("content-length", "0")
        if _has_two_ends(headers):
            return ApiError(400, "invalid_value", "expected content-length or transfer-encoding, not both")
        if not length.isdecimal() or int(length) > self._settings.limits.max_body:
            return too_large(self._settings.limits.max_body)
        return None

    def _note(self, scope: Scope, request_id: str, seen: dict[str, Any], seconds: float) -> None:
        endpoint = self._endpoint_of(scope)
        self._metrics.requests.labels(endpoint, str(seen["status"]), seen["code"]).inc()
        values = {
            "request_id": request_id,
            "method": scope["method"],
            "endpoint": endpoint,
            "seconds": round(seconds, 4),
        }
        _logger.info("%s %s %s", scope["method"], endpoint, seen["status"], extra={**values, **seen})


def _has_two_ends(headers: Mapping[str, str]) -> bool:
    """Return whether a proxy in front may see another end of a request than this server does."""
    return "content-length" in headers and "transfer-encoding" in headers


def key_of(headers: Mapping[str, str]) -> str | None:
    """Return the key of a request, None where it has none."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else None


class BoundedBody:
    """The body of a request, of at most max_bytes, each part within `seconds` and all of it at _SLOWEST or faster: a
    client that sends a byte now and then would hold its connection for ever."""

    def __init__(self, receive: Receive, max_bytes: int, seconds: float) -> None:
        self._receive = receive
        self._left = max_bytes
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._began = time.monotonic()
        self._is_whole = False

    async def receive(self) -> Message:
        if self._is_whole:
            # What comes now is the client's leaving, which takes as long as it takes.
            return await self._receive()
        received = self._max_bytes - self._left
        left = self._began + self._seconds + received / _SLOWEST - time.monotonic()
        try:
            message = await asyncio.wait_for(self._receive(), max(0.0, min(self._seconds, left)))
        except TimeoutError:
            raise ApiError(408, "timeout", "the body did not come in time", retries=False) from None
        self._left -= len(message.get("body", b""))
        self._is_whole = not message.get("more_body", False)
        if self._left < 0:
            raise too_large(self._max_bytes)
        return message


def too_large(max_bytes: int) -> ApiError:
    return ApiError(413, "request_too_large", f"expected a body of at most {max_bytes} bytes")
