"""Generated media as HTML, for notebooks: the video or image inline, what it was made of, what attention ran."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from diffusion_runtime.errors import DiffusionRuntimeError
from diffusion_runtime.report.attention_report import AttentionReport
from diffusion_runtime.report.report_html import report_html

if TYPE_CHECKING:
    import numpy

# A notebook keeps what it shows: of a larger video the first frame stands for it.
MAX_INLINE_BYTES = 12 * 1024 * 1024


class ShownMedia(Protocol):
    """Attributes of GeneratedMedia that are read here."""

    @property
    def frames(self) -> numpy.ndarray: ...

    @property
    def num_frames(self) -> int: ...

    @property
    def fps(self) -> float: ...

    @property
    def recipe(self) -> Mapping[str, Any]: ...

    @property
    def timings(self) -> Mapping[str, float]: ...

    @property
    def attention_report(self) -> AttentionReport: ...

    @property
    def audio(self) -> object: ...

    def to_bytes(self, file_format: str) -> bytes: ...


def media_html(media: ShownMedia) -> str:
    """Return one self-contained piece of HTML without scripts or requests; prompts are escaped."""
    request = media.recipe.get("request") or {}
    prompt = html.escape(str(request.get("prompt", "")), quote=True)
    height, width = media.frames.shape[1:3]
    frames = f"{media.num_frames} frames at {media.fps:.5g} per second, " if media.num_frames > 1 else ""
    facts = f"{frames}{width} x {height}, seed {html.escape(str(request.get('seed', '')))}"
    seconds = sum(media.timings.get(stage, 0.0) for stage in ("text", "denoise", "decode"))
    return (
        f'<figure style="margin:0;font:13px sans-serif">{_shown(media, prompt)}'
        f"<figcaption>{prompt}<br>{facts}, {seconds:.1f} s</figcaption>"
        f"<details><summary>attention</summary>{report_html(media.attention_report.to_dict())}</details></figure>"
    )


def _shown(media: ShownMedia, prompt: str) -> str:
    """Return the HTML of the video or image, with the prompt as its description."""
    if media.num_frames == 1:
        return _image(media, prompt)
    try:
        video = media.to_bytes("mp4")
    except DiffusionRuntimeError as error:
        return f"{_image(media, prompt)}<div>the first frame: {html.escape(str(error)[:200])}</div>"
    if len(video) > MAX_INLINE_BYTES:
        size = f"{len(video) / 1e6:.0f} MB"
        return f"{_image(media, prompt)}<div>the first frame of {size}: save(path) writes the video</div>"
    muted = "" if media.audio is not None else " muted autoplay"
    source = f"data:video/mp4;base64,{base64.b64encode(video).decode('ascii')}"
    return f'<video controls loop{muted} style="max-width:100%" aria-label="{prompt}" src="{source}"></video>'


def _image(media: ShownMedia, prompt: str) -> str:
    """Return the HTML of the first frame."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(media.frames[0]).save(file, format="PNG")
    source = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode('ascii')}"
    return f'<img style="max-width:100%" alt="{prompt}" src="{source}">'
