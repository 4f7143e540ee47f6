"""The comparison as one self-contained HTML page: clips side by side under one clock (H.264, WebP for images), plots,
figures."""

from __future__ import annotations

import base64
import dataclasses
from pathlib import Path
from typing import Any

from diffusion_runtime.comparison.result import Comparison
from diffusion_runtime.media import GeneratedMedia
from diffusion_runtime.media.ffmpeg import find_ffmpeg
from diffusion_runtime.media.publish import publish_text
from diffusion_runtime.page.assets import single_page
from diffusion_runtime.request.generation_request import GenerationRequest


def write_page(result: Comparison, path: Path) -> None:
    """Write the whole page or none. Raises OutputError."""
    publish_text(path, render(result), "--html")


def render(result: Comparison) -> str:
    return single_page(_values(result))


def _values(result: Comparison) -> dict[str, Any]:
    """Return what `compare` writes, with the pictures and a title. What belongs to this machine is left out."""
    values, request, reference = result.to_dict(), result.reference.request, result.reference
    assert request is not None
    rows = []
    for row, plain in zip(result.rows, values["rows"], strict=True):
        clips = [
            {**clip, "path": None, "source": _source(each.picture, each.picture_type)}
            for clip, each in zip(plain["clips"], row.clips, strict=True)
        ]
        plain = {name: value for name, value in plain.items() if name not in ("runtime", "request", "failure")}
        rows.append({**plain, "speed": result.speed_text(row), "clips": clips})
    remarks = [
        *(f"{row.name}: {row.state.replace('_', ' ')}: {row.reason}" for row in result.rows if row.state != "measured"),
        *(f"{name.upper()}: {reason}" for name, reason in result.unavailable.items()),
        *result.remarks,
    ]
    size = f"{request.num_frames} frame(s) of {request.width} x {request.height}"
    return {
        **values,
        "rows": rows,
        "remarks": remarks,
        "title": f"{values['model']}: settings beside {reference.name}",
        "subtitle": f"{size}, {result.device}. The same prompts and seeds in every row.",
    }


def _source(picture: bytes | None, kind: str) -> str:
    return "" if picture is None else f"data:{kind};base64,{base64.b64encode(picture).decode('ascii')}"


def check_encoder(request: GenerationRequest) -> None:
    """Raises MissingPackageError where the page of a resolved request's clip needs ffmpeg, and there is none."""
    if (request.num_frames or 1) > 1:
        find_ffmpeg("the page of videos (--html)", "leave the page out")


def encode_picture(media: GeneratedMedia) -> tuple[bytes, str]:
    """Return the encoded bytes and their media type. Raises OutputError where the temporary folder has no room, and
    MissingPackageError as `check_encoder`."""
    file_format, kind = ("mp4", "video/mp4") if media.num_frames > 1 else ("webp", "image/webp")
    # A recipe names folders of this machine, and the page is made to be handed on.
    return dataclasses.replace(media, recipe={}, audio=None).to_bytes(file_format), kind
