"""Routes about the server: models, explain, health, metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from diffusion_runtime.errors import shown
from diffusion_runtime.serving.api_errors import ApiError
from diffusion_runtime.serving.dispatcher import Dispatcher
from diffusion_runtime.serving.jobs import VIDEO
from diffusion_runtime.serving.openapi import request_body
from diffusion_runtime.serving.submission import Submission
from diffusion_runtime.serving.unavailable import Unavailable
from diffusion_runtime.untrusted.json_text import read_json_file

# Written by scripts/write_shipped_figures.py.
_FIGURES = Path(__file__).with_name("shipped_figures.json")


def server_routes(dispatcher: Dispatcher, submission: Submission, created: int) -> APIRouter:
    router = APIRouter(tags=["server"])
    settings = dispatcher.settings

    def card() -> dict[str, Any]:
        known = {"id": settings.name, "object": "model", "created": created, "owned_by": "diffusion-runtime"}
        limits = {"max_pixels": settings.limits.max_pixels, "max_frames": settings.limits.max_frames}
        return {**known, "root": settings.name, **limits, **(dispatcher.engines.card or {})}

    @router.get("/v1/models")
    async def list_models() -> Response:
        """List the model, with all that a form for requests needs."""
        return JSONResponse({"object": "list", "data": [card()]})

    @router.get("/v1/models/{model:path}")
    async def get_model(model: str) -> Response:
        if model != settings.name:
            raise ApiError(
                404, "model_not_found", f"model: this server has {shown(settings.name)} alone", param="model"
            )
        return JSONResponse(card())

    @router.get("/v1/model_info")
    async def model_info() -> Response:
        return JSONResponse(card())

    @router.get("/v1/list_loras")
    async def list_loras() -> Response:
        """List the names that requests may give as `lora`; active: those that requests have which give none."""
        data = [{"name": name} for name in sorted(settings.loras)]
        return JSONResponse({"object": "list", "data": data, "active": dispatcher.default_loras.given})

    @router.post("/v1/explain", openapi_extra=request_body(VIDEO))
    async def explain(request: Request) -> Response:
        """Return what a request would run and cost, by layer and step; nothing is made."""
        return JSONResponse(await submission.explained(request))

    @router.get("/v1/figures")
    async def figures() -> Response:
        """Return measured settings of the model: the time and the quality of each; none for most models."""
        shipped = read_json_file(_FIGURES)
        return JSONResponse(shipped if dispatcher.model_path == shipped["model"] else {"rows": []})

    @router.get("/liveness")
    async def liveness() -> Response:
        """Answer while the HTTP process runs."""
        return JSONResponse({"status": "alive"})

    @router.get("/health")
    async def health() -> Response:
        """Answer 200 once jobs can be made, 503 with the reason before."""
        if dispatcher.is_draining:
            raise Unavailable("draining", "the server is about to end")
        dispatcher.engines.check_ready()
        return JSONResponse({"status": "ready", "replicas": dispatcher.engines.states()})

    if settings.has_metrics:

        @router.get("/metrics")
        async def metrics() -> Response:
            return Response(dispatcher.metrics.text(), media_type="text/plain; version=0.0.4")

    return router
