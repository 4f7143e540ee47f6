"""Routes of the page: its HTML at `/`, and the files that it names."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from diffusion_runtime.page.assets import page_files
from diffusion_runtime.serving.api_errors import not_found

# Nothing from another address, no script or style inside of HTML; clips are also shown from memory (blob:).
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' blob: data:; "
    "media-src 'self' blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {"content-security-policy": _POLICY, "referrer-policy": "no-referrer", "cache-control": "no-cache"}
# The name of a file holds the digest of all of them.
_FOREVER = {"cache-control": "public, max-age=31536000, immutable"}


def page_routes() -> APIRouter:
    router = APIRouter(include_in_schema=False)
    page = page_files()
    etag = f'"{page.digest}"'

    @router.get("/")
    async def index(request: Request) -> Response:
        headers = {**_HEADERS, "etag": etag}
        if etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(page.index, media_type="text/html; charset=utf-8", headers=headers)

    @router.get("/page/{digest}/{name}")
    async def file(digest: str, name: str) -> Response:
        if digest != page.digest or name not in page.files:
            raise not_found("such file of the page; load the page again")
        content, kind = page.files[name]
        return Response(content, media_type=kind, headers=_FOREVER)

    return router
