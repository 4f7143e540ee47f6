"""Server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

_PING_SECONDS = 15.0
DONE = b"data: [DONE]\n\n"


def event(name: str, data: Mapping[str, Any], number: str | None = None) -> bytes:
    """Return one event. JSON has no line breaks, which would end it."""
    identifier = "" if number is None else f"id: {number}\n"
    return f"{identifier}event: {name}\ndata: {json.dumps(data)}\n\n".encode()


async def with_pings(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the events, and a comment where none comes for a while, so that proxies keep the stream."""
    following = asyncio.ensure_future(anext(events, None))
    try:
        while True:
            done, _ = await asyncio.wait((following,), timeout=_PING_SECONDS)
            if not done:
                yield b": ping\n\n"
                continue
            if (each := following.result()) is None:
                return
            yield each
            following = asyncio.ensure_future(anext(events, None))
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        close = getattr(events, "aclose", None)
        if close is not None:
            await close()
