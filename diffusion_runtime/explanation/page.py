"""The explanation as one HTML page without scripts or outside resources."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from diffusion_runtime.attention.select import Decision
from diffusion_runtime.explanation.explanation import (
    Explanation,
    LayerSchedule,
    implementation_rows,
    layer_map,
)
from diffusion_runtime.explanation.text_map import describe
from diffusion_runtime.media.publish import publish_text
from diffusion_runtime.report.attention_report import index_ranges

_CELL = 12
# Colours from few pairs to all of them (ColorBrewer Blues, light to dark), and of a density that the content decides.
_SCALE = ("#deebf7", "#c6dbef", "#9ecae1", "#6baed6", "#4292c6", "#2171b5", "#08519c", "#08306b")
_BY_CONTENT = "#fd8d3c"
NOTE = "Expected time: by what one H200 reached in bfloat16; `diffusion-runtime bench generate` measures it."


def write_page(explanation: Explanation, path: Path) -> None:
    """Write the whole page or none. Raises OutputError."""
    publish_text(path, render(explanation), "--html")


def render(explanation: Explanation) -> str:
    environment = Environment(
        loader=PackageLoader("diffusion_runtime.explanation", "."), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template("page.html.jinja").render(_values(explanation))


def _values(explanation: Explanation) -> dict[str, Any]:
    description, request = explanation.description, explanation.request
    frames, height, width = explanation.grid
    text = f" and {explanation.num_text_tokens} of text" if explanation.num_text_tokens else ""
    return {
        "title": f"{description.config.model_path}: what would run",
        "facts": [
            ("device", f"{description.device}, {description.dtype}"),
            ("size", f"{request.num_frames} frame(s) of {request.width} x {request.height}"),
            ("tokens", f"{frames * height * width} in a grid of {frames} x {height} x {width}{text}"),
            *(("reference", each) for each in explanation.references),
            ("forward passes", explanation.passes_text),
            *([("quantization", description.quantization)] if description.quantization else []),
        ],
        "attention": [
            {
                "role": row.role,
                "when": row.when,
                "layers": index_ranges(row.layers),
                "backend": row.decision.backend + (f" {dict(row.decision.options)}" if row.decision.options else ""),
                "why": [
                    f"{row.decision.source}: {row.decision.reason}",
                    *(f"not {name}: {reason}" for name, reason in row.decision.rejected),
                    *_dense_calls(row.decision),
                ],
            }
            for row in description.attention
        ],
        "implementations": [row.to_dict() for row in implementation_rows(explanation)],
        "remarks": explanation.remarks,
        "maps": [_map(explanation, role, rows) for role, rows in layer_map(explanation.schedule).items()],
        "steps": _steps_of_map(explanation),
        "legend": {
            describe(backend, density): _colour(density)
            for row in explanation.schedule
            for backend, density in zip(row.backends, row.density, strict=True)
        },
        "parts": [
            {
                "name": part.name,
                "operations": in_tera(part.operations),
                "kept": ("at most " if explanation.is_bound and part.kept else "") + in_tera(part.kept),
                "percent": round(100 * part.share),
            }
            for part in explanation.parts
        ],
        "note": f"{NOTE} Of it {explanation.step_text}.",
        "memory": [] if description.memory is None else description.memory.rows(),
    }


def in_tera(operations: float) -> str:
    """Four digits, `78,330` and `0.05389`; `-` for a part that is counted by its time alone."""
    tera = float(f"{operations / 1e12:.4g}")
    return "-" if not operations else f"{tera:,.0f}" if tera >= 1000 else f"{tera:g}"


def _dense_calls(decision: Decision) -> list[str]:
    dense = decision.dense
    return [] if dense is None else [f"dense calls: {dense.backend} ({dense.source}: {dense.reason})"]


def _steps_of_map(explanation: Explanation) -> str:
    if explanation.num_first_steps is None:
        return f"{explanation.num_steps} steps"
    return f"{explanation.num_first_steps} steps of the first chunk and {explanation.num_steps} of the others"


def _map(explanation: Explanation, role: str, rows: Sequence[LayerSchedule]) -> Mapping[str, Any]:
    first = rows[0]
    return {
        "role": role,
        "cell": _CELL,
        "width": _CELL * len(first.backends),
        "height": _CELL * len(rows),
        "num_layers": len(rows),
        "runs": [run for line, row in enumerate(rows) for run in _runs(explanation, row, line)],
        "commits": _commits(rows),
    }


def _commits(rows: Sequence[LayerSchedule]) -> str:
    """`commits: torch_sdpa in layers 0-28, not run in layers 29`; empty without any."""
    layers: dict[str, list[int]] = {}
    for row in rows:
        if row.commit is not None:
            layers.setdefault(row.commit, []).append(row.index)
    texts = ", ".join(f"{backend} in layers {index_ranges(found)}" for backend, found in layers.items())
    return f"commits: {texts}" if texts else ""


def _runs(explanation: Explanation, row: LayerSchedule, line: int) -> Iterator[Mapping[str, Any]]:
    """Consecutive steps of a layer that are alike, as one rectangle: a page of 40 layers and 50 steps stays small."""
    ways = list(zip(row.backends, row.density, strict=True))
    for (backend, density), steps in groupby(range(len(ways)), key=ways.__getitem__):
        found = list(steps)
        yield {
            "x": found[0] * _CELL,
            "y": line * _CELL,
            "width": len(found) * _CELL,
            "fill": _colour(density),
            "text": f"layer {row.index}, steps {explanation.steps_text(found)}: {describe(backend, density)}",
        }


def _colour(density: float | None) -> str:
    return _BY_CONTENT if density is None else _SCALE[min(len(_SCALE) - 1, int(density * len(_SCALE)))]
