"""Calls of a server's HTTP API with the standard library alone: ComfyUI's environment needs nothing else."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

KEY_VARIABLE, URL_VARIABLE = "DIFFUSION_RUNTIME_API_KEY", "DIFFUSION_RUNTIME_URL"
_THIS_MACHINE = ("127.0.0.1", "localhost", "::1")
_TIMEOUT_SECONDS = 60.0
_POLL_SECONDS = 0.4


class ServerRefused(Exception):
    """An answer of the server that is an error, with its message."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """urllib would send the key on to wherever an answer points. Every redirect is an HTTPError."""

    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirects)


@dataclass(frozen=True)
class Address:
    """A server. key: kept out of `repr`, which ComfyUI may log."""

    url: str
    key: str = field(default="", repr=False)

    @classmethod
    def of(cls, url: str, environment: Mapping[str, str]) -> Address:
        """Return a server that this machine's owner chose: one of this machine, or URL_VARIABLE of the environment. A
        workflow, which comes from a stranger, could else send prompts, images and the key anywhere. Raises
        ValueError."""
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url: expected http:// or https:// and a host, got {url[:80]!r}")
        if parts.hostname not in _THIS_MACHINE and url.rstrip("/") != environment.get(URL_VARIABLE, "").rstrip("/"):
            raise ValueError(
                f"url: {url[:80]!r} is not this machine; if it is your server, set {URL_VARIABLE} to it before "
                "ComfyUI starts"
            )
        return cls(url, environment.get(KEY_VARIABLE, ""))

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """Return the body of an answer. Raises ServerRefused."""
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        content = None
        if body is not None:
            headers["content-type"] = "application/json"
            content = json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url.rstrip('/')}/{path}", content, headers, method=method)
        try:
            with _OPENER.open(request, timeout=_TIMEOUT_SECONDS) as answer:
                found: bytes = answer.read()
                return found
        except urllib.error.HTTPError as error:
            raise ServerRefused(_message(error)) from error
        except OSError as error:
            raise ServerRefused(f"{self.url} cannot be reached: {error}") from error

    def job(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return an answer that is a JSON object. Raises ServerRefused."""
        found: dict[str, Any] = json.loads(self.call(method, path, body))
        return found


def _message(error: urllib.error.HTTPError) -> str:
    try:
        found = json.loads(error.read())["error"]
    except (ValueError, KeyError, TypeError):
        return f"the server answered {error.code}"
    reasons = "".join(f"\n{name}: {why}" for name, why in found.get("reasons", ()))
    return f"{found['message']}{reasons}"


def made(
    server: Address,
    path: str,
    body: Mapping[str, Any],
    on_progress: Callable[[int], None],
    check_interrupted: Callable[[], None],
) -> dict[str, Any]:
    """Create a job below `v1/videos` or `v1/images`, and return it once it is completed; it is cancelled where
    check_interrupted raises. on_progress: called with the percent. Raises ServerRefused."""
    job = server.job("POST", path, body)
    kind = f"v1/{job['object']}s/{job['id']}"
    try:
        while job["status"] not in ("completed", "failed"):
            check_interrupted()
            time.sleep(_POLL_SECONDS)
            job = server.job("GET", kind)
            on_progress(int(job["progress"]))
    except BaseException:
        server.job("POST", f"{kind}/cancel", {})
        raise
    if job["status"] == "failed":
        raise ServerRefused(job["error"]["message"])
    return job
