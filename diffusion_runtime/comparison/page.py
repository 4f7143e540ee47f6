"""The comparison as one self-contained HTML page: clips side by side under one clock (H.264, WebP for images), plots,
figures."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from diffusion_runtime.comparison.plots import colour_of, divergence_plot, quality_plot
from diffusion_runtime.comparison.result import Comparison, Row, filled_columns
from diffusion_runtime.core.memory_size import size_text
from diffusion_runtime.media import GeneratedMedia
from diffusion_runtime.media.ffmpeg import find_ffmpeg
from diffusion_runtime.media.publish import publish_text
from diffusion_runtime.request.generation_request import GenerationRequest


def write_page(result: Comparison, path: Path) -> None:
    """Write the whole page or none. Raises OutputError."""
    publish_text(path, render(result), "--html")


def render(result: Comparison) -> str:
    environment = Environment(
        loader=PackageLoader("diffusion_runtime.comparison", "."), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template("page.html.jinja").render(_values(result))


def _values(result: Comparison) -> dict[str, Any]:
    rows, colours = result.rows, colour_of(result.rows)
    letters = [_letter(position) for position in range(len(rows))]
    request = result.reference.request
    assert request is not None
    assert result.reference.runtime is not None
    model = result.reference.runtime.model_path
    return {
        "title": f"{model}: settings beside {result.reference.name}",
        "size": f"{request.num_frames} frame(s) of {request.width} x {request.height}",
        "device": result.device,
        "num_frames": request.num_frames,
        "fps": request.fps or 1,
        "is_video": (request.num_frames or 1) > 1,
        "threshold": result.threshold,
        "groups": [
            {
                "prompt": clip.prompt,
                "seed": clip.seed,
                "clips": [
                    _clip(row, letters[position], colours[position], index)
                    for position, row in enumerate(rows)
                    if row.clips
                ],
            }
            for index, clip in enumerate(result.reference.clips)
        ],
        "names": [
            {"letter": letters[position], "colour": colours[position], "name": _name(row)}
            for position, row in enumerate(rows)
        ],
        "tables": [
            _table("Quality", [_quality(result, row) for row in rows]),
            _table("Time and memory", [_cost(row) for row in rows]),
        ],
        "divergence": divergence_plot(result, letters),
        "quality": quality_plot(result, letters),
        "remarks": [
            *(f"{row.name}: {row.state.replace('_', ' ')}: {row.reason}" for row in rows if row.state != "measured"),
            *(f"{name.upper()}: {reason}" for name, reason in result.unavailable.items()),
            *result.remarks,
        ],
    }


def _letter(position: int) -> str:
    number, letter = divmod(position, len(ascii_uppercase))
    return ascii_uppercase[letter] + (str(number + 1) if number else "")


def _clip(row: Row, letter: str, colour: str, index: int) -> Mapping[str, Any]:
    clip = row.clips[index]
    source = ""
    if clip.picture is not None:
        source = f"data:{clip.picture_type};base64,{base64.b64encode(clip.picture).decode('ascii')}"
    psnr = clip.metrics.get("psnr_db")
    return {
        "letter": letter,
        "colour": colour,
        "name": row.name,
        "source": source,
        "note": "reference" if psnr is None else f"{psnr:.1f} dB",
    }


def _table(title: str, rows: Sequence[Mapping[str, str]]) -> Mapping[str, Any]:
    """rows: figures by column. Columns without any figure are left out, so that the others fit next to each other."""
    columns, cells = filled_columns(list(rows[0]), [list(row.values()) for row in rows])
    return {"title": title, "columns": columns, "rows": cells}


def _name(row: Row) -> str:
    return row.name + (f", in the time of {row.beside}" if row.kind == "fewer_steps" else "")


def _quality(result: Comparison, row: Row) -> Mapping[str, str]:
    return {
        "steps": "-" if row.num_steps is None else str(row.num_steps),
        "latent L2": _figure(row.final_latent_l2, 3),
        f"first step over {result.threshold:g}": row.first_step_text(result.threshold),
        "PSNR, dB": _figure(row.metric("psnr_db"), 1),
        "SSIM": _figure(row.metric("ssim"), 3),
        "LPIPS": _figure(row.metric("lpips"), 3),
        "all right (95 %)": _accuracy(row),
        "CLIP": _figure(row.clip_score, 1),
        "speed": result.speed_text(row),
    }


def _cost(row: Row) -> Mapping[str, str]:
    peak = row.peak_memory.get("device", row.peak_memory.get("machine"))
    return {
        **{f"{stage}, s": _figure(row.seconds.get(stage), 2) for stage in ("text", "denoise", "decode")},
        "per step, s": _figure(row.seconds_per_step, 3),
        "total, s": _figure(row.total_seconds, 2),
        "attention, s": _figure(row.attention_seconds, 2),
        "density": _figure(row.density, 2),
        "memory": "-" if peak is None else size_text(peak),
    }


def _accuracy(row: Row) -> str:
    """`0.94 (0.71 to 0.99)`."""
    accuracy = row.accuracy
    if accuracy is None:
        return "-"
    joint = accuracy.joint
    return f"{joint.rate:.2f} ({joint.low:.2f} to {joint.high:.2f})"


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


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
