"""Routes for the admin's key: the LoRA files that requests have by default, and profiles of a batch."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import FileResponse, JSONResponse, Response

from diffusion_runtime.errors import nearest, shown
from diffusion_runtime.serving.admin_state import TRACE_ID
from diffusion_runtime.serving.api_errors import ApiError, invalid, not_found
from diffusion_runtime.serving.bodies import read_body
from diffusion_runtime.serving.dispatcher import Dispatcher
from diffusion_runtime.serving.guard import key_of
from diffusion_runtime.serving.request_fields import lora_choices

_MAX_STEPS = 50


def admin_routes(dispatcher: Dispatcher) -> APIRouter:
    router = APIRouter(tags=["admin"])
    access, loras = dispatcher.settings.access, dispatcher.default_loras

    async def fields_of(request: Request, *known: str) -> dict[str, Any]:
        """Return the body of an admin's request. Raises ApiError for other keys and for other fields."""
        _require_admin(request)
        has_body = request.headers.get("content-length", "0") != "0"
        values = dict((await read_body(request)).values) if has_body else {}
        if (name := next((name for name in values if name not in known), None)) is not None:
            is_file = name in ("lora_path", "merge_mode", "lora_alpha")
            hint = " Files are named at start, by --named-lora." if is_file else nearest(name, known)
            code = "forbidden_parameter" if is_file else "unknown_parameter"
            raise invalid(name[:80], f"{shown(name)}: expected {' and '.join(known)}.{hint}", code)
        if values.pop("target", "all") != "all":
            message = "target: a LoRA file is applied to every module that it names; expected all"
            raise invalid("target", message, "unsupported_for_model")
        return values

    def _require_admin(request: Request) -> None:
        if not access.is_admin(key_of(request.headers) or ""):
            hint = "" if access.admin_keys else "; start the server with --admin-key-file"
            raise ApiError(403, "admin_key_required", f"expected Authorization: Bearer KEY with an admin's key{hint}")

    async def now(given: list[dict[str, Any]]) -> Response:
        """Make these LoRA files the default of the requests that come from here on."""
        # The engine refuses what it cannot merge.
        work = {"requests": [{"prompt": "-", "seed": 0}], "loras": given}
        await dispatcher.engines.ask("check", work)
        loras.give(given)
        names = ", ".join(f"{each['name']} at {each['scale']:g}" for each in given) or "none"
        return JSONResponse({"status": "ok", "message": f"LoRA files of new requests: {names}", "active": given})

    @router.post("/v1/set_lora")
    async def set_lora(request: Request) -> Response:
        """Set the LoRA files of requests that name none; lora_nickname: of --named-lora, one or several."""
        values = await fields_of(request, "lora_nickname", "strength", "target")
        names = values.get("lora_nickname")
        names = [names] if isinstance(names, str) else names
        if not isinstance(names, list) or not names:
            raise invalid("lora_nickname", f"lora_nickname: expected a name or several, got {shown(names)}")
        strengths = values.get("strength", 1.0)
        strengths = strengths if isinstance(strengths, list) else [strengths] * len(names)
        if len(strengths) != len(names):
            raise invalid("strength", f"strength: expected one, or {len(names)}, one of each name")
        pairs = zip(names, strengths, strict=True)
        return await now(lora_choices([{"name": name, "scale": strength} for name, strength in pairs]))

    @router.post("/v1/merge_lora_weights")
    async def merge_lora_weights(request: Request) -> Response:
        """Set the LoRA files again that were set before /v1/unmerge_lora_weights."""
        values = await fields_of(request, "strength", "target")
        if not loras.last:
            raise invalid("lora_nickname", "lora_nickname: none was set; POST /v1/set_lora first")
        strength = values.get("strength", 1.0)
        return await now(lora_choices([{**each, "scale": strength} for each in loras.last]))

    @router.post("/v1/unmerge_lora_weights")
    async def unmerge_lora_weights(request: Request) -> Response:
        """Let requests that name no LoRA file have none."""
        await fields_of(request, "target")
        return await now([])

    @router.post("/start_profile")
    async def start_profile(request: Request) -> Response:
        """Record the next batch with torch.profiler; the answer has the id of the trace. num_steps: how many steps."""
        num_steps = (await fields_of(request, "num_steps")).get("num_steps", 2)
        if type(num_steps) is not int or not 1 <= num_steps <= _MAX_STEPS:
            raise invalid("num_steps", f"num_steps: expected 1 to {_MAX_STEPS}, got {shown(num_steps)}")
        return JSONResponse({"id": dispatcher.profiles.start(num_steps), "num_steps": num_steps})

    @router.post("/stop_profile")
    async def stop_profile(request: Request) -> Response:
        """Record nothing, if the next batch has not begun."""
        await fields_of(request)
        return JSONResponse({"id": dispatcher.profiles.stop()})

    @router.get("/profiles/{trace_id}")
    async def get_profile(trace_id: str, request: Request) -> Response:
        """Return a trace in Chrome's format, for https://ui.perfetto.dev"""
        _require_admin(request)
        if not TRACE_ID.fullmatch(trace_id) or (state := dispatcher.profiles.state(trace_id)) is None:
            raise not_found(f"profile {shown(trace_id[:64])}")
        if state != "ready":
            is_waiting = state in ("waiting", "recording")
            message = f"the profile is {state}" if is_waiting else f"nothing was recorded: {state}"
            raise ApiError(409 if is_waiting else 422, "profile_not_ready", message, seconds=1 if is_waiting else None)
        path = dispatcher.profiles.path(trace_id)
        return FileResponse(path, media_type="application/json", filename=path.name)

    return router
