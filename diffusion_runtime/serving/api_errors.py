"""Errors of the HTTP interface, in the form that OpenAI's clients read: `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from diffusion_runtime.errors import (
    BackendUnavailableError,
    DiffusionRuntimeError,
    DiskFullError,
    ForbiddenAddressError,
)
from diffusion_runtime.media.publish import FULL_DISK
from diffusion_runtime.serving.engine_process import Refused
from diffusion_runtime.serving.files import ResultFiles
from diffusion_runtime.serving.unavailable import Unavailable

if TYPE_CHECKING:
    from starlette.responses import JSONResponse

INVALID, SERVER = "invalid_request_error", "server_error"
_NAMED = re.compile(r"([a-z_]+(?:\[\d+\])?)[:,]")


class ApiError(Exception):
    """An answer that is an error. param: the field that is wrong. retries: whether the same request may work later; a
    client repeats some errors by itself, each of which would be another generation. seconds: until then. reasons: why
    each backend of a choice cannot run."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        kind: str = INVALID,
        retries: bool = False,
        seconds: int | None = None,
        reasons: Sequence[Sequence[str]] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.kind = kind
        self.retries = retries
        self.seconds = seconds
        self.reasons = [list(pair) for pair in reasons]

    def to_dict(self) -> dict[str, Any]:
        reasons = {"reasons": self.reasons} if self.reasons else {}
        named = None if self.param is None else _encodable(self.param)
        return {"message": _encodable(str(self)), "type": self.kind, "param": named, "code": self.code, **reasons}

    def response(self) -> JSONResponse:
        # `batch` reads rows by the same fields, and needs no server.
        from starlette.responses import JSONResponse

        headers = {"x-should-retry": "true" if self.retries else "false"}
        if self.seconds is not None:
            headers["retry-after"] = str(self.seconds)
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return JSONResponse({"error": self.to_dict()}, self.status, headers)


def _encodable(text: str) -> str:
    """Return a text that UTF-8 can encode: JSON can hold halves of characters."""
    return text.encode("utf-8", "backslashreplace").decode()


def invalid(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    return ApiError(400, code, message, param=param)


def not_found(what: str) -> ApiError:
    return ApiError(404, "not_found", f"there is no {what}")


def api_error(error: Exception, files: ResultFiles) -> ApiError:
    """Return the answer to an error of the runtime or of the engine, without the folders of this machine."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Unavailable):
        status = {"queue_full": 429, "storage_full": 507}.get(error.code, 503)
        kind = "rate_limit_error" if status == 429 else SERVER
        return ApiError(status, error.code, str(error), kind=kind, retries=True, seconds=error.seconds)
    if _is_full_disk(error):
        return ApiError(507, "storage_full", "the disk of the results is full", kind=SERVER, retries=True, seconds=60)
    if isinstance(error, Refused):
        return _refused(error.details, files)
    if isinstance(error, DiffusionRuntimeError) and error.is_callers_fault:
        reasons = error.reasons if isinstance(error, BackendUnavailableError) else ()
        refused = _refused({"message": str(error), "is_callers_fault": True, "reasons": reasons, "kind": ""}, files)
        if isinstance(error, ForbiddenAddressError):
            refused.code = "forbidden_parameter"
        return refused
    return ApiError(500, "internal_error", "the server failed; its log says how", kind=SERVER)


def _is_full_disk(error: Exception) -> bool:
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
    return isinstance(error, DiskFullError) or (isinstance(error, OSError) and error.errno in FULL_DISK)


def _refused(details: Mapping[str, Any], files: ResultFiles) -> ApiError:
    message = files.scrub(str(details["message"]))
    found = _NAMED.match(message)
    param = None if found is None else found.group(1)
    if details["kind"] == BackendUnavailableError.__name__ or details["reasons"]:
        return ApiError(400, "backend_unavailable", message, param="attention", reasons=details["reasons"])
    if details["kind"] == "DeviceMemoryError":
        return ApiError(400, "out_of_memory", message)
    if not details["is_callers_fault"]:
        return ApiError(500, "generation_failed", message, kind=SERVER)
    code = "unknown_parameter" if "unknown key" in message else "invalid_value"
    return ApiError(400, code, message, param=param)
